"""Decide how each leaf of the state is stored between steps, as `state=` asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.analysis.leaf_roles import averages, divided_by
from canzona_compile.capture.eager_parity import needs_whole_matrix
from canzona_compile.ir.layout import Layout
from canzona_compile.ir.step import Form, Leaf, Role, Step, Template
from canzona_compile.ir.storage import BLOCK, StateRules, Storage, no_codes, storable


@dataclass(frozen=True, slots=True)
class StoreState:
    """Mark each leaf that is stored in another dtype, or in host memory.

    - "int8" is refused for a leaf whose elements the step divides by, or takes roots of, or that it decomposes. If
      users gave one storage for all leaves, these have 16 bits, as all have that are no running mean of gradients, and
      those of elementwise optimizers.
    - A fragment can keep codes if columns are cut at multiples of a block. Otherwise the owner stores the leaf whole;
      an elementwise update has none, so "int8" is refused.
    - Numbers, such as counters, stay as they are.

    Attributes:
        rules: what users asked for; None to mark nothing.
        complete: whether the step has all optimizers, so that every pattern has to fit a leaf.
    """

    rules: StateRules | None
    complete: bool = True

    name: ClassVar[str] = "store-state"
    requires: ClassVar[Form] = Form.CAPTURED
    ensures: ClassVar[Form] = Form.CAPTURED

    def __call__(self, step: Step) -> Step:
        if self.rules is None:
            return step
        families: dict[str, list[Template]] = defaultdict(list)
        for template in step.templates:
            families[template.kin].append(template)
        layouts: dict[str, dict[int, Layout]] = defaultdict(dict)
        for task in step.tasks:
            layouts[task.template][id(task.layout)] = task.layout
        if self.complete and not any(template.interpreted for template in step.templates):
            every = (leaf for template in step.templates for leaf in template.leaves)
            self.rules.check_fit(leaf.name for leaf in every if storable(leaf.shape, leaf.dtype))
        made: dict[str, Template] = {}
        for family in families.values():
            own = [layout for template in family for layout in layouts[template.name].values()]
            leaves = {leaf.name: leaf for template in family for leaf in template.leaves}
            storages = {name: self.storage(leaf, family, own) for name, leaf in leaves.items()}
            for template in family:
                made[template.name] = marked(template, storages)
        return replace(step, templates=tuple(made[template.name] for template in step.templates))

    def storage(self, leaf: Leaf, family: Sequence[Template], layouts: Sequence[Layout]) -> Storage | None:
        """How a leaf is stored; None if it stays as it is."""
        assert self.rules is not None
        if leaf.dtype is None or not storable(leaf.shape, leaf.dtype):
            return None
        found = self.rules.of(leaf.name, leaf.dtype)
        if found is None:
            return None
        if found.dtype == "int8" and (why := self._no_codes(leaf, family)):
            return self.rules.without_codes(found, leaf.name, leaf.dtype, why)
        if found.dtype != "int8" or leaf.shape != family[0].shape or not any(map(cuts_blocks, layouts)):
            return found
        if not any(map(needs_whole_matrix, family)):
            raise no_codes(leaf.name, "ranks hold parts of its blocks, and an elementwise update has no owner")
        return replace(found, whole=True)

    def _no_codes(self, leaf: Leaf, family: Sequence[Template]) -> str:
        """Why a leaf cannot be int8; empty if it can."""
        assert self.rules is not None
        if divided_by(family, leaf.name):
            return "the step divides by it, takes roots of it, or decomposes it, so its smallest elements matter most"
        if self.rules.lenient and not (averages(family, leaf.name) and any(map(needs_whole_matrix, family))):
            return "it is no running mean of gradients of a matrix"
        return ""


def marked(template: Template, storages: dict[str, Storage | None]) -> Template:
    """The template whose leaves say how they are stored."""

    def with_storage(leaf: Leaf) -> Leaf:
        return replace(leaf, stored=storages[leaf.name]) if leaf.role is Role.STATE else leaf

    inputs, state = (tuple(map(with_storage, own)) for own in (template.inputs, template.state))
    return replace(template, inputs=inputs, state=state)


def cuts_blocks(layout: Layout) -> bool:
    """Does a rank hold a part of a block of a leaf that is laid out so?"""
    ends = {end for box in layout.boxes if box.numel for end in (box.start[-1], box.start[-1] + box.size[-1])}
    return any(end % BLOCK and end != layout.shape[-1] for end in ends)
