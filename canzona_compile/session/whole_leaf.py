"""Gather the whole tensor of a leaf of the state of which ranks hold fragments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.errors import CanzonaError, some
from canzona_compile.ir.layout import Layout, Shape
from canzona_compile.ir.program_ops import Watch
from canzona_compile.ir.step import Task
from canzona_compile.replica.raised import first_line
from canzona_compile.replica.snapshot import inner_tensors
from canzona_compile.runtime.process_groups import Groups


def whole_leaf(
    task: Task, leaf: str, value: Tensor, groups: Groups, rank: int, watch: Watch, shape: Shape | None = None
) -> Tensor:
    """Gather the whole tensor of a leaf from portable state, on every rank of this rank's replica.

    This is a collective if the leaf is a DTensor and the replica has several ranks. A class that is made of several
    tensors, such as codes and scales of low-bit state, puts its fragments together itself, as `full_tensor` asks it to:
    only it knows which elements belong to which scale.

    Args:
        task: the task whose state it belongs to; its layout says where the fragments lie.
        leaf: its name.
        value: the leaf, whole or as this rank's fragment.
        groups: finds process groups by their ranks.
        rank: this rank, global.
        watch: waits for the collective.
        shape: of the whole tensor; None for that of `value`.

    Raises:
        CanzonaError: a whole leaf has another shape, or its class cannot put its fragments together.
    """
    shape = tuple(value.shape) if shape is None else shape
    if not isinstance(value, DTensor):
        if tuple(value.shape) != shape:
            raise CanzonaError(f"state {leaf!r} is {list(value.shape)}, expected {list(shape)}", at=task.name)
        return value
    grid, layout = task.layout.grid, task.layout
    r, _ = grid.find(rank)
    peers = grid.shard_peers(r)
    local = value._local_tensor.contiguous()
    if len(peers) == 1:
        return local.reshape(shape)
    boxes = [layout.boxes[s].of(shape) for s in peers]
    if inner_tensors(local):
        return put_together(value, leaf, task)
    group = groups.of(tuple(grid.ranks[r][s] for s in peers))
    received = torch.empty(sum(b.numel for b in boxes), dtype=local.dtype, device=local.device)
    sent = local.flatten().repeat(len(peers))
    sizes = [b.numel for b in boxes]
    sent_sizes = [local.numel()] * len(peers)
    watch.wait(dist.all_to_all_single(received, sent, sizes, sent_sizes, group=group, async_op=True))
    whole = torch.empty(shape, dtype=local.dtype, device=local.device)
    for box, part in zip(boxes, received.split(sizes), strict=True):
        whole[box.slices()] = part.view(box.size)
    return whole


def put_together(value: DTensor, leaf: str, task: Task) -> Tensor:
    """Gather a leaf whose fragments are made of several tensors."""
    try:
        whole = value.full_tensor()
        for name in inner_tensors(whole):
            # This waits for the collective and makes the inner tensors plain.
            setattr(whole, name, getattr(whole, name).clone())
    except Exception as error:  # whatever the class raises, on all ranks, as they hold equal shapes
        raise apart(leaf, value, first_line(error), task.name) from error
    return whole


def check_gathers(layout: Layout, state: Mapping[str, Any]) -> None:
    """Refuse state that ranks could not put together, before a rank waits for the others.

    Args:
        layout: of the parameter.
        state: its portable state.

    Raises:
        CanzonaError: fragments are made of several tensors, and have unequal shapes. DTensor would pad some of them,
            where the class cannot do that, and ranks may hold fragments of different classes.
    """
    shapes = dict.fromkeys(str(list(box.size)) for box in layout.boxes)
    for name, value in state.items():
        if len(shapes) > 1 and isinstance(value, DTensor) and inner_tensors(value._local_tensor):
            raise apart(name, value, f"their shapes differ: {some(shapes)}")


def apart(leaf: str, value: DTensor, why: str, at: str | None = None) -> CanzonaError:
    """Make the error for fragments of a leaf that cannot be put together."""
    kind = type(value._local_tensor).__name__
    return CanzonaError(
        f"the fragments of state {leaf!r}, of class {kind}, cannot be put together: {why}",
        at=at,
        hint="call wrap before the first step, so that owners create this state whole",
    )
