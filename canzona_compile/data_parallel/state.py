"""The state of an optimizer under ZeRO-1: whole on every rank for checkpoints, in parts on owners for steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.leaves import empty_containers, paths_of, read, structure_of, write
from canzona_compile.data_parallel.collectives import DataParallelGroup
from canzona_compile.data_parallel.fragment import Fragment, laid_out_like
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import dtensor_layout, local_part
from canzona_compile.session.division import Piece

State = dict[str, Any]
WholeOf = Callable[[Piece, str, DTensor], Tensor]


class TensorLeaf(NamedTuple):
    """The form of a tensor in the state, without its values.

    Attributes:
        shape: of the part that a rank holds.
        dtype: of its elements.
        sharded: whether it is a DTensor laid out like its parameter.
        on_host: whether it lies in the memory of the host.
        of_slice: whether it has one element per element of the slice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    on_host: bool
    of_slice: bool


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
            found = stand_in.lookalikes(state)
            stand_in.whole_leaves = frozenset(leaf for leaf, path in found.items() if division.piece_in(path))
            state = stand_in.taken(state)
        for part, double in zip(fragment.owned, fragment.doubles, strict=True):
            own = dict(state)
            if division is not None:
                own = division.taken(state, fragment.pieces[part.name])
            elif fragment.cut:
                own = cut(state, fragment, part)
            optimizer.state[double] = own


def cut(state: Mapping[str, Any], fragment: Fragment, part: BucketSlice) -> State:
    """The state of one slice, from the state of its parameter."""
    made: State = {}
    structure = structure_of(state)
    for name, path in paths_of(state).items():
        value = read(state, path)
        if isinstance(value, Tensor) and value.ndim:
            if value.shape != fragment.param.shape:
                raise CanzonaError(
                    f"state {name!r} of shape {list(value.shape)} cannot be cut like its parameter",
                    at=fragment.name,
                    hint="load a checkpoint of this optimizer",
                )
            param: Tensor = fragment.param
            if isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements != param.placements:
                value = value.redistribute(param.device_mesh, param.placements)
            if isinstance(param, DTensor) and not isinstance(value, DTensor):  # whole, as an unwrapped optimizer has it
                layout = dtensor_layout(param, dist.get_rank())
                value = value[layout.boxes[layout.grid.find(dist.get_rank())[1]].slices()]
            value = local_part(value).reshape(-1)[part.start : part.stop].clone()
        elif isinstance(value, Tensor):
            value = value.clone()
        write(made, path, value, structure)
    return made


def put_together(
    optimizer: Optimizer, fragments: Sequence[Fragment], group: DataParallelGroup, whole_of: WholeOf
) -> None:
    """Replace the state of what this rank owns by the whole state of all parameters. This is a collective.

    Args:
        optimizer: its state is that of the doubles, in portable form.
        fragments: its parameters.
        group: the ranks.
        whole_of: gathers a leaf of a piece from the ranks that hold its fragments, see `Division.merged`.
    """
    values: list[Tensor] = []
    own: list[SliceState] = []
    for fragment in fragments:
        if fragment.param in optimizer.state and not optimizer.state[fragment.param]:
            del optimizer.state[fragment.param]
        for part, double in zip(fragment.owned, fragment.doubles, strict=True):
            if state := optimizer.state.pop(double, None):
                own.append(described(state, part, double, values))
    everybody: list[Any] = [own]
    if group.shard is not None:
        everybody = [None] * group.size
        dist.all_gather_object(everybody, own, group=group.shard)
    holders = {part.name: fragment for fragment in fragments for part in fragment.slices}
    found: dict[str, State] = {}
    for owner, states in enumerate(everybody):
        sent = sent_by(owner, states, values, holders, group)
        for state in states:
            join(found.setdefault(state.part.name, {}), state, sent, holders[state.part.name])
    for fragment in fragments:
        state = found.get(fragment.name) if fragment.division is None else merged(fragment, found, whole_of)
        if state is not None:
            optimizer.state[fragment.param] = state


def merged(fragment: Fragment, found: Mapping[str, State], whole_of: WholeOf) -> State | None:
    """The state of a fused parameter, from the states of its pieces; None if none of them has any."""
    assert fragment.division is not None
    states = [found.get(name, {}) for name in fragment.pieces]
    if not any(states):
        return None
    state = fragment.division.merged(states, whole_of)
    return state if fragment.stand_in is None else fragment.stand_in.given_back(state)


def described(state: Mapping[str, Any], part: BucketSlice, double: Tensor, values: list[Tensor]) -> SliceState:
    """Describe the state of a slice, and append its tensors to `values`."""
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    for path in paths_of(state).values():
        value = read(state, path)
        if isinstance(value, Tensor):
            local = local_part(value)
            like = value.shape == double.shape
            on_host = local.device.type == "cpu"
            form = TensorLeaf(tuple(local.shape), local.dtype, isinstance(value, DTensor), on_host, like)
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


def join(whole: State, own: SliceState, sent: list[Tensor], fragment: Fragment) -> None:
    """Add the state of a slice to the state of its parameter.

    Args:
        whole: the state of the parameter, as far as it is known.
        own: the form of the slice's state.
        sent: the tensors of its owner that are not used yet; those of this slice are taken from the front.
        fragment: the parameter.
    """
    for key, container in empty_containers(own.structure).items():
        whole.setdefault(key, container)
    for path, leaf in own.leaves:
        if not isinstance(leaf, TensorLeaf):
            write(whole, path, leaf, own.structure)
            continue
        value = sent.pop(0)
        if fragment.division is not None:
            shape = fragment.pieces[own.part.name].shape
            write(whole, path, fragment.division.like(value, shape) if leaf.sharded else value, own.structure)
        elif not fragment.cut:
            write(whole, path, laid_out_like(value, fragment.param) if leaf.sharded else value, own.structure)
        elif not leaf.of_slice:
            write(whole, path, value, own.structure)
        else:
            if path[0] not in whole or read(whole, path) is None:
                blank = torch.zeros_like(local_part(fragment.param), dtype=leaf.dtype)
                write(whole, path, laid_out_like(blank, fragment.param), own.structure)
            local_part(read(whole, path)).view(-1)[own.part.start : own.part.stop] = value
