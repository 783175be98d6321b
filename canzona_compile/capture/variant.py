"""What oracles are asked and what they answer: the inputs of a step, and the variants of its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from canzona_compile.capture.external_counters import Counts
from canzona_compile.ir.layout import Shape

Scalars = dict[str, Any]
Source = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the step can see of a parameter besides its values.

    Attributes:
        marks: the attributes that users gave to it, see `twin.marks_of`.
        part: whether it stands for some entries of a stack. Their number differs between ranks, so their kinds are
            apart from those that all ranks have: one could not tell from a name otherwise that it is the same code.
    """

    shape: Shape
    dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device
    marks: tuple[tuple[str, Any], ...] = ()
    part: bool = False


class StepInputs(NamedTuple):
    """What the optimizer's code sees on a step of one parameter besides tensors.

    Attributes:
        group: the parameter group.
        spec: the shape, the dtypes and the device of the parameter.
        counters: the Python leaves of the parameter's state.
        elsewhere: the numbers that the optimizer keeps outside of parameter groups and of the state of parameters.
    """

    group: Mapping[str, Any]
    spec: ParameterSpec
    counters: Mapping[str, Any]
    elsewhere: Counts


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """One captured graph of the step.

    Attributes:
        graph: the functional graph.
        sources: what each placeholder stands for: ("param", i), ("grad", i), ("state", i, leaf) or ("scalar", name).
        results: by source, the position of its new value in the output tuple. A source that the step does not write
            keeps its value. A state tensor that the step replaces without reading it appears here only.
        baked: by position of a scalar input, the value that the graph holds as a constant.
        precision: the float32 matmul precision that the step sets for its products; empty if it sets none.
    """

    graph: fx.Graph
    sources: tuple[Source, ...]
    results: dict[Source, int]
    baked: Mapping[int, float]
    precision: str = ""


class Answer(NamedTuple):
    """What an oracle found out about one step.

    Attributes:
        variant: the variant that the step takes.
        scalars: the values of its scalars, by name.
        returned: what the graph computes beside new values of its inputs, in the order of its first outputs.
    """

    variant: Variant
    scalars: Scalars
    returned: tuple[Any, ...]


class Untraceable(Exception):
    """The step cannot be captured, and the message says why."""


class FormChange(Untraceable):
    """The step gives a tensor of its state other strides, so that later steps read a state of another form."""
