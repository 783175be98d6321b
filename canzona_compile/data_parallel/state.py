"""The state of an optimizer under ZeRO-1: whole on every rank for checkpoints, in parts on owners for steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.compat.torch_private import pytree
from canzona_compile.data_parallel.collectives import DataParallelGroup
from canzona_compile.data_parallel.fragment import Fragment
from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import local_part
from canzona_compile.replica.leaves import LeafPath
from canzona_compile.views.view import State, WholeOf, rewritten

SliceForm = tuple[BucketSlice, State]  # the state of a slice, with `TensorLeaf`s for tensors


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """The form of a tensor in the state, without its values.

    Attributes:
        shape: of the part that a rank holds.
        dtype: of its elements.
        sharded: whether it is a DTensor laid out like its parameter.
        on_host: whether it lies in the memory of the host.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    on_host: bool


def take_apart(optimizer: Optimizer, fragments: Sequence[Fragment]) -> None:
    """Replace whole state in `optimizer.state` by the state of what this rank owns, under the doubles.

    Args:
        optimizer: its state is portable: what the unwrapped optimizer would hold.
        fragments: its parameters.

    Raises:
        CanzonaError: the state of a parameter that is cut has a tensor that cannot be cut.
    """
    for fragment in fragments:
        state = optimizer.state.pop(fragment.param, None)
        if not state:
            continue
        division, stand_in = fragment.division, fragment.stand_in
        if division is not None and stand_in is not None:
            stand_in.whole_leaves = division.own_leaves(stand_in.lookalikes(state))
            (state,) = stand_in.state_in(state)
        optimizer.state.update(zip(fragment.doubles, fragment.view.state_in(state), strict=True))


def put_together(
    optimizer: Optimizer, fragments: Sequence[Fragment], group: DataParallelGroup, whole_of: WholeOf
) -> None:
    """Replace the state of what this rank owns by the whole state of all parameters. This is a collective.

    Args:
        optimizer: its state is that of the doubles, in portable form.
        fragments: its parameters.
        group: the ranks.
        whole_of: gathers a leaf of a piece from the ranks that hold its fragments, see `ParamView.state_out`.
    """
    values: list[Tensor] = []
    own: list[SliceForm] = []
    for fragment in fragments:
        if fragment.param in optimizer.state and not optimizer.state[fragment.param]:
            del optimizer.state[fragment.param]
        for part, double in zip(fragment.owned, fragment.doubles, strict=True):
            if state := optimizer.state.pop(double, None):
                own.append((part, described(state, values)))
    everybody: list[Any] = [own]
    if group.shard is not None:
        everybody = [None] * group.size
        dist.all_gather_object(everybody, own, group=group.shard)
    holders = {part.name: fragment for fragment in fragments for part in fragment.slices}
    found: dict[BucketSlice, State] = {}
    for owner, forms in enumerate(everybody):
        sent = sent_by(owner, forms, values, holders, group)
        found |= {part: received(form, sent, holders[part.name], part) for part, form in forms}
    for fragment in fragments:
        parts = [found.get(part, {}) for part in fragment.slices]
        if not any(parts):
            continue
        state = fragment.view.state_out(parts, whole_of)
        if fragment.division is not None and fragment.stand_in is not None:
            state = fragment.stand_in.state_out([state], whole_of)
        optimizer.state[fragment.param] = state


def described(state: State, values: list[Tensor]) -> State:
    """Describe the state of a slice: a `TensorLeaf` for each of its tensors, which are appended to `values`."""

    def form(_: LeafPath, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = local_part(value)
        values.append(local)
        return TensorLeaf(tuple(local.shape), local.dtype, isinstance(value, DTensor), local.device.type == "cpu")

    return rewritten(state, form)


def sent_by(
    owner: int,
    forms: Sequence[SliceForm],
    values: Sequence[Tensor],
    fragments: Mapping[str, Fragment],
    group: DataParallelGroup,
) -> list[Tensor]:
    """Broadcast the tensors of one owner: all of one dtype in one collective.

    Returns:
        Its tensors in the order of its leaves.
    """
    leaves = [leaf for leaf in pytree.tree_leaves([form for _, form in forms]) if isinstance(leaf, TensorLeaf)]
    device = next(iter(fragments.values())).param.device
    found: list[Tensor | None] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        sizes = [torch.Size(leaves[i].shape).numel() for i in places]
        if owner == group.rank:
            flat = torch.cat([values[i].reshape(-1).to(device) for i in places])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        if group.shard is not None:
            dist.broadcast(flat, dist.get_process_group_ranks(group.shard)[owner], group=group.shard)
        for i, part in zip(places, flat.split(sizes), strict=True):
            own = part.view(leaves[i].shape).clone()
            found[i] = own.cpu() if leaves[i].on_host else own
    return [value for value in found if value is not None]


def received(form: State, sent: list[Tensor], fragment: Fragment, part: BucketSlice) -> State:
    """The state of a slice as its owner has it.

    Args:
        form: what `described` returned there.
        sent: the tensors of its owner that are not used yet; those of this slice are taken from the front.
        fragment: the parameter.
        part: the slice.
    """

    def value(_: LeafPath, leaf: Any) -> Any:
        if not isinstance(leaf, TensorLeaf):
            return leaf
        own = sent.pop(0)
        return fragment.view.labelled(own, fragment.parts[part]) if leaf.sharded else own

    return rewritten(form, value)
