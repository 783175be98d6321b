"""Kinds of parameters: the graphs that their step is, and what their state holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from canzona_compile.capture.recorder import StepRecorder
from canzona_compile.capture.variant import Variant
from canzona_compile.eager.own_object import Maker
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.step import Leaf, Template
from canzona_compile.ir.variant_period import VariantPeriod
from canzona_compile.replica.leaves import LeafForm, LeafPaths


@dataclass(eq=False)
class ParamKind:
    """A kind of parameters: one recorder (None if the step is interpreted) and one template per variant.

    Variants are added when the step's control flow first takes them, such as with and without periodic work.
    """

    recorder: StepRecorder | None
    templates: dict[Variant | None, Template]
    state: tuple[Leaf, ...]  # tensor leaves of the state after the first step
    python_state: Mapping[str, Any]  # its other leaves then
    variant_period: VariantPeriod | None = None
    transitional: bool = False  # whether the next step is interpreted because it changes the form of the state
    shared: frozenset[str] | None = None  # leaves that all matrices of a stack share; None before a stack was tried
    maker: Maker | None = None  # makes the optimizer object of a matrix, if each has one of its own

    @property
    def by_dispatch(self) -> bool:
        """Whether it is captured in the second way, after which there is no other."""
        return self.recorder is not None and self.recorder.why != ""

    @property
    def template(self) -> Template:
        """The template of the variant that was captured first."""
        return next(iter(self.templates.values()))

    def leaves(self, shape: Shape) -> tuple[Leaf, ...]:
        """The tensor leaves of the state of a parameter of this shape, which is a matrix or a stack of them."""
        lead = shape[: len(shape) - len(self.template.shape)]
        return tuple(leaf if leaf.name in (self.shared or ()) else leaf.of_stack(lead) for leaf in self.state)

    @property
    def leaf_forms(self) -> frozenset[LeafForm]:
        """What its state holds, as `leaf_forms` tells of a real one."""
        tensors = {(leaf.name, leaf.shape, leaf.dtype, leaf.stride) for leaf in self.state}
        return frozenset(tensors | {(name, None, None, None) for name in self.python_state})

    @property
    def structure(self) -> Mapping[str, Any]:
        """The containers of the state."""
        return {} if self.recorder is None else self.recorder.structure

    @property
    def paths(self) -> LeafPaths:
        """Where in the state its leaves are."""
        return {} if self.recorder is None else self.recorder.paths

    @property
    def grad_dtype(self) -> torch.dtype:
        dtype = self.template.leaf("grad").dtype
        assert dtype is not None
        return dtype
