"""Stacks of matrices that an optimizer steps one by one: their kinds, and how they are divided among owners."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from canzona_compile.capture.batch_dim import check_matrix_dims, num_batch_dims
from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.templates import Capture
from canzona_compile.compat.torch_private import pytree
from canzona_compile.ir.layout import Shape
from canzona_compile.passes.place import everywhere
from canzona_compile.replica.parameter_spec import ParamExample
from canzona_compile.tensors import local_part

RANGES_PER_OWNER = 4  # of all stacks together, so that owners have about equal loads
MOST_BYTES = 1 << 28  # of a range, in the dtype of the parameter: 64 M elements of float32, as in a large matrix


def kind_of(capture: Capture, like: ParamExample) -> ParamKind:
    """Find the kind of a parameter. That of a stack whose matrices step one by one is the kind of one of them."""
    if not (dims := num_batch_dims(capture.optimizer, like.group, len(like.spec.shape))):
        return capture.kind_of(like)
    lead, spec = like.spec.shape[:dims], replace(like.spec, shape=like.spec.shape[dims:], part=False)
    one = capture.kind_of(replace(like, spec=spec, state=state_of_one(like.state, lead)))
    if one.recorder is None:
        return capture.interpreted(like.spec, one.template.interpreted)
    state = {leaf.name for leaf in one.state}
    if one.shared is None:
        one.shared = frozenset(state - check_matrix_dims(capture.optimizer, like.group, spec))
    numbers = {str(node.target) for node in everywhere([*one.templates.values()]) if node.op == "placeholder"}
    if other := one.shared ^ (numbers & state):
        reason = f"matrices of a stack share {min(other)!r}, which is not made of numbers, or have one each of numbers"
        return capture.interpreted(like.spec, reason)
    return one


def ranges(
    capture: Capture, like: ParamExample, owners: int, num_stacks: int, capacity: int | None
) -> list[tuple[int, int]]:
    """Divide a stack that ranks would gather into ranges of matrices, enough of them for all owners.

    A range has at most `capacity` bytes, if it is given, or `MOST_BYTES`, but at least one matrix: a micro-group
    cannot be smaller than its largest task.

    Args:
        like: the stack, without state.
        owners: how many ranks hold it.
        num_stacks: about how many such stacks share these owners.

    Returns:
        The first matrix of each range, and how many there are; none if the stack stays whole.
    """
    spec = like.spec
    if owners == 1 or not (dims := num_batch_dims(capture.optimizer, like.group, len(spec.shape))):
        return []
    entries = spec.shape[0]
    size = math.prod(spec.shape) * spec.dtype.itemsize
    count = max(-(-RANGES_PER_OWNER * owners // num_stacks), -(-size // (capacity or MOST_BYTES)))
    if (count := min(count, entries)) < 2:
        return []
    shape = spec.shape[dims:]
    one = capture.kind_of(replace(like, spec=replace(spec, shape=shape, part=False)))
    if one.recorder is None:
        return []
    cuts = [entries * i // count for i in range(count + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


def state_of_one(state: Mapping[str, Any] | None, lead: Shape) -> dict[str, Any] | None:
    """Make an example of the state of one matrix of a stack, with tensors of unknown values."""

    def narrowed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[: len(lead)] == lead:
            return local_part(leaf).new_empty_strided(leaf.shape[len(lead) :], leaf.stride()[len(lead) :])
        return leaf

    return pytree.tree_map(narrowed, dict(state)) if state else None
