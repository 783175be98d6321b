"""Gather the whole tensor of a leaf of the state of which ranks hold fragments."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.step import Leaf, Task
from canzona_compile.runtime.process_groups import Groups


def whole_leaf(task: Task, leaf: Leaf, value: Tensor, groups: Groups, rank: int) -> Tensor:
    """Gather the whole tensor of a leaf from portable state, on every rank of this rank's replica.

    This is a collective if the leaf is a DTensor and the replica has several ranks.

    Args:
        task: the task whose state it belongs to; its layout says where the fragments lie.
        leaf: its name and whole shape.
        value: the leaf, whole or as this rank's fragment.
        groups: finds process groups by their ranks.
        rank: this rank, global.

    Raises:
        CanzonaError: a whole leaf has another shape than `leaf` says.
    """
    if not isinstance(value, DTensor):
        if tuple(value.shape) != leaf.shape:
            raise CanzonaError(f"state {leaf.name!r} is {list(value.shape)}, expected {list(leaf.shape)}", at=task.name)
        return value
    grid, layout = task.layout.grid, task.layout
    r, _ = grid.find(rank)
    peers = grid.shard_peers(r)
    local = value._local_tensor.contiguous()
    if len(peers) == 1:
        return local.reshape(leaf.shape)
    boxes = [layout.boxes[s].of(leaf.shape) for s in peers]
    group = groups.of(tuple(grid.ranks[r][s] for s in peers))
    received = torch.empty(sum(b.numel for b in boxes), dtype=local.dtype, device=local.device)
    sent = local.flatten().repeat(len(peers))
    sizes = [b.numel for b in boxes]
    dist.all_to_all_single(received, sent, sizes, [local.numel()] * len(peers), group=group)
    whole = torch.empty(leaf.shape, dtype=local.dtype, device=local.device)
    for box, part in zip(boxes, received.split(sizes), strict=True):
        whole[box.slices()] = part.view(box.size)
    return whole
