"""The state of an optimizer under ZeRO-1: whole on every rank for checkpoints, in parts on owners for steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.leaves import empty_containers, paths_of, read, structure_of, write
from canzona_compile.data_parallel.collectives import DataParallelGroup
from canzona_compile.data_parallel.fragment import Fragment
from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import local_part
from canzona_compile.views.view import State, WholeOf


class TensorLeaf(NamedTuple):
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


class SliceState(NamedTuple):
    """The state of one slice on its owner.

    Attributes:
        part: the slice.
        structure: the containers of the state.
        leaves: the leaves by path: a `TensorLeaf`, or the value of any other leaf.
    """

    part: BucketSlice
    structure: Mapping[str, Any]
    leaves: tuple[tuple[tuple[Any, ...], Any], ...]


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
    own: list[SliceState] = []
    for fragment in fragments:
        if fragment.param in optimizer.state and not optimizer.state[fragment.param]:
            del optimizer.state[fragment.param]
        for part, double in zip(fragment.owned, fragment.doubles, strict=True):
            if state := optimizer.state.pop(double, None):
                own.append(described(state, part, values))
    everybody: list[Any] = [own]
    if group.shard is not None:
        everybody = [None] * group.size
        dist.all_gather_object(everybody, own, group=group.shard)
    holders = {part.name: fragment for fragment in fragments for part in fragment.slices}
    found: dict[BucketSlice, State] = {}
    for owner, states in enumerate(everybody):
        sent = sent_by(owner, states, values, holders, group)
        found |= {state.part: received(state, sent, holders[state.part.name]) for state in states}
    for fragment in fragments:
        parts = [found.get(part, {}) for part in fragment.slices]
        if not any(parts):
            continue
        state = fragment.view.state_out(parts, whole_of)
        if fragment.division is not None and fragment.stand_in is not None:
            state = fragment.stand_in.state_out([state], whole_of)
        optimizer.state[fragment.param] = state


def described(state: Mapping[str, Any], part: BucketSlice, values: list[Tensor]) -> SliceState:
    """Describe the state of a slice, and append its tensors to `values`."""
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    for path in paths_of(state).values():
        value = read(state, path)
        if isinstance(value, Tensor):
            local = local_part(value)
            on_host = local.device.type == "cpu"
            form = TensorLeaf(tuple(local.shape), local.dtype, isinstance(value, DTensor), on_host)
            leaves.append((tuple(path), form))
            values.append(local)
        else:
            leaves.append((tuple(path), value))
    return SliceState(part, structure_of(state), tuple(leaves))


def sent_by(
    owner: int,
    states: Sequence[SliceState],
    values: Sequence[Tensor],
    fragments: Mapping[str, Fragment],
    group: DataParallelGroup,
) -> list[Tensor]:
    """Broadcast the tensors of one owner: all of one dtype in one collective.

    Returns:
        Its tensors in the order of its leaves.
    """
    forms = [leaf for state in states for _, leaf in state.leaves if isinstance(leaf, TensorLeaf)]
    device = next(iter(fragments.values())).param.device
    found: list[Tensor | None] = [None] * len(forms)
    for dtype in dict.fromkeys(form.dtype for form in forms):
        places = [i for i, form in enumerate(forms) if form.dtype == dtype]
        sizes = [torch.Size(forms[i].shape).numel() for i in places]
        if owner == group.rank:
            flat = torch.cat([values[i].reshape(-1).to(device) for i in places])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        if group.shard is not None:
            dist.broadcast(flat, dist.get_process_group_ranks(group.shard)[owner], group=group.shard)
        for i, part in zip(places, flat.split(sizes), strict=True):
            own = part.view(forms[i].shape).clone()
            found[i] = own.cpu() if forms[i].on_host else own
    return [value for value in found if value is not None]


def received(own: SliceState, sent: list[Tensor], fragment: Fragment) -> State:
    """The state of a slice as its owner has it.

    Args:
        own: its form.
        sent: the tensors of its owner that are not used yet; those of this slice are taken from the front.
        fragment: the parameter.
    """
    made = empty_containers(own.structure)
    for path, leaf in own.leaves:
        value = leaf
        if isinstance(leaf, TensorLeaf):
            value = sent.pop(0)
            value = fragment.labelled(value, own.part) if leaf.sharded else value
        write(made, path, value, own.structure)
    return made
