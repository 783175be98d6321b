"""Templates: the captured step of every kind of parameter, and the oracles that keep watching."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from canzona_compile.capture.faithful import holistic, same_bits
from canzona_compile.capture.interpreted import interpreted_template
from canzona_compile.capture.oracle import Oracle, ParameterSpec, Scalars, Untraceable, Variant
from canzona_compile.capture.separability import check_separable
from canzona_compile.capture.twin import plain_class, set_leaf, signature
from canzona_compile.ir import Leaf, Role, Template, outputs, placeholders, tensor_value
from canzona_compile.printer import dtype_name

log = logging.getLogger(__name__)

Key = tuple[Any, ...]
NOT_FAITHFUL = "its graph does not give the bits of its eager step: the code depends on being compiled"


@dataclass(eq=False)
class Kind:
    """All parameters alike: one template, one oracle (none where the step is interpreted)."""

    template: Template
    oracle: Oracle | None
    variant: Variant | None
    state: tuple[Leaf, ...]  # tensor leaves of the state after the first step
    python_state: Mapping[str, Any]  # its other leaves then

    @property
    def grad_dtype(self) -> torch.dtype:
        dtype = self.template.leaf("grad").dtype
        assert dtype is not None
        return dtype


@dataclass(eq=False)
class Capture:
    """Captures each kind of parameter of one optimizer once."""

    optimizer: Optimizer
    kinds: dict[Key, Kind] = field(default_factory=dict)
    captures: int = 0
    _separable: set[Key] = field(default_factory=set)
    _bake: set[str] = field(default_factory=set)  # scalars that graphs of this optimizer hold as constants

    def kind_of(
        self, group: Mapping[str, Any], spec: ParameterSpec, name: str, counters: Mapping[str, Any] | None = None
    ) -> Kind:
        """The kind of a parameter `name` of `group`; captured now if it is the first of its kind.

        Args:
            counters: the Python leaves of its state; None if it has no state yet.

        Raises:
            UnsupportedOptimizer: the optimizer couples parameters or communicates by itself.
        """
        style = signature(group)
        key = (spec, style)
        if key not in self.kinds:
            if (style, len(spec.shape)) not in self._separable:
                check_separable(self.optimizer, group, spec, name)
                self._separable.add((style, len(spec.shape)))
            self.kinds[key] = self._capture(group, spec)
        return self._taken(key, group, spec, counters)

    def _taken(
        self, key: Key, group: Mapping[str, Any], spec: ParameterSpec, counters: Mapping[str, Any] | None
    ) -> Kind:
        """The kind with the graph that the code takes now: hyperparameters and counters may lead to another."""
        kind = self.kinds[key]
        if kind.oracle is None:
            return kind
        known = len(kind.oracle.variants)
        for leaf, value in (kind.python_state if counters is None else counters).items():
            set_leaf(kind.oracle.twin_state(), leaf, value)
        try:
            variant, _ = kind.oracle.consult(group)
        except Untraceable as reason:
            return self.kinds.setdefault((*key, str(reason)), self._interpreted(spec, str(reason)))
        self.captures += len(kind.oracle.variants) - known
        if variant is kind.variant:
            return kind
        own = (*key, kind.oracle.variants.index(variant))
        if own not in self.kinds:
            template = template_of(variant, self._label(spec), spec)
            self.kinds[own] = replace(kind, template=template, variant=variant)
        return self.kinds[own]

    def _capture(self, group: Mapping[str, Any], spec: ParameterSpec) -> Kind:
        label = self._label(spec)
        try:
            oracle = Oracle(self.optimizer, group, spec, bake=self._bake)
        except Untraceable as reason:
            return self._interpreted(spec, str(reason))
        self.captures += len(oracle.variants)
        variant = oracle.variants[-1]
        template = template_of(variant, label, spec)
        if holistic(template) and not same_bits(self.optimizer, group, spec, template, oracle):
            return self._interpreted(spec, NOT_FAITHFUL)
        leaves = oracle.first_state[0]
        tensors = tuple(
            Leaf(Role.STATE, name, tuple(v.shape), v.dtype) for name, v in leaves.items() if isinstance(v, torch.Tensor)
        )
        python = {name: v for name, v in leaves.items() if not isinstance(v, torch.Tensor)}
        return Kind(template, oracle, variant, tensors, python)

    def _interpreted(self, spec: ParameterSpec, reason: str) -> Kind:
        label = self._label(spec)
        log.info("%s is interpreted: %s", label, reason)
        return Kind(interpreted_template(label, spec, reason), None, None, (), {})

    def _label(self, spec: ParameterSpec) -> str:
        dims = "x".join(map(str, spec.shape)) or "scalar"
        label = f"{plain_class(self.optimizer).__name__.lower()}_{dims}_{dtype_name(spec.dtype)}"
        taken = {kind.template.name for kind in self.kinds.values()}
        names = [label, *(f"{label}_{i}" for i in range(2, len(taken) + 3))]
        return next(name for name in names if name not in taken)


def template_of(variant: Variant, name: str, spec: ParameterSpec) -> Template:
    """The template of a variant: leaves by name, and only the leaves that the step writes as outputs."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs: list[Leaf] = []
    for node, source in zip(placeholders(variant.graph), variant.sources, strict=True):
        leaf = leaf_of(node, source)
        used = bool(node.users.keys() - {n for n in variant.graph.nodes if n.op == "output"})
        if leaf.role in (Role.SCALAR,) and not used:
            continue
        env[node] = graph.placeholder(leaf.name)
        env[node].meta = dict(node.meta) if leaf.dtype is not None else {}
        inputs.append(leaf)
    for node in variant.graph.nodes:
        if node.op == "call_function" and node.target is not torch.ops.aten.copy_.default:
            env[node] = graph.node_copy(node, lambda n: env[n])
    returned = outputs(variant.graph)
    writes: list[str] = []
    values: list[fx.Node] = []
    for node, source, place in zip(placeholders(variant.graph), variant.sources, variant.results, strict=True):
        value = returned[place]
        if node in env and value is not node and source[0] in ("param", "state"):
            writes.append(leaf_of(node, source).name)
            values.append(env[value])
    graph.output(tuple(values))
    return Template(name, spec.shape, spec.dtype, tuple(inputs), tuple(writes), graph)


def leaf_of(node: fx.Node, source: Sequence[Any]) -> Leaf:
    value = tensor_value(node)
    match source[0]:
        case "param" | "grad":
            assert value is not None
            return Leaf(Role(source[0]), source[0], tuple(value.shape), value.dtype)
        case "state":
            assert value is not None
            return Leaf(Role.STATE, source[2], tuple(value.shape), value.dtype)
    if value is not None and value.dtype != torch.float64:
        return Leaf(Role.SCALAR, source[1], tuple(value.shape), value.dtype)
    return Leaf(Role.SCALAR, source[1])


def scalars_of(kind: Kind, group: Mapping[str, Any]) -> tuple[Variant | None, Scalars]:
    """What the oracle of a kind says of this step."""
    return (None, {}) if kind.oracle is None else kind.oracle.consult(group)
