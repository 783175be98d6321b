"""Ranks tell each other what fragments they hold, because only all of them together know the whole tensor.

A rank that refuses a parameter says so in the same exchange, so that no rank waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from canzona_compile.errors import CanzonaError, RankMismatch, UnsupportedLayout
from canzona_compile.ir.given_layout import GivenLayout
from canzona_compile.ir.layout import MeshCoordinate, Shape
from canzona_compile.ir.sharding import Sharding, Tiling
from canzona_compile.replica.raised import first_line
from canzona_compile.views.fragment import FragmentView
from canzona_compile.views.given_layout import Named, Shardings, mesh_key, shardings_of

ALIKE = "pass the same layout= for the same parameter names on every rank"
GridRows = tuple[tuple[int, ...], ...]


class FragmentEntry(NamedTuple):
    """What a rank tells of one parameter.

    Attributes:
        size: the shape of its fragment.
        how: the dtype and the sharding, as text.
        refusal: why the rank refuses the parameter; empty if it does not.
    """

    size: Shape
    how: str
    refusal: str


class KnownFragments(NamedTuple):
    """What all ranks together know of the plain parameters that are fragments.

    Attributes:
        refused: the parameters that this rank or another one refuses, by name.
        rows: by the rows of a grid of one replica, those of all replicas.
    """

    views: dict[str, FragmentView]
    refused: dict[str, CanzonaError]
    rows: dict[GridRows, GridRows]


def exchange_fragments(
    named: Named, given: GivenLayout | None, replicate: dist.ProcessGroup | None, rank: int
) -> KnownFragments:
    """Make the views of all plain parameters that are fragments. This is a collective if there are any.

    What is wrong with a parameter is not raised here, because other ranks wait for this rank's part of the exchange.

    Args:
        replicate: the process group of `replicate=`; None without it.
    """
    known = shardings_of(named, given)
    params = {name: param for name, _, param in named}
    replicas = () if replicate is None else tuple(dist.get_process_group_ranks(replicate))
    for name, sharding in known.by_name.items():
        if error := refused_together(sharding, replicas, rank):
            known.refused[name] = type(error)(error.problem, at=name, hint=error.hint)
    tilings = exchange_sizes(known, params)
    found = KnownFragments({}, known.refused, {})
    if replicate is not None and given is not None:
        found.rows.update(exchange_rows(tilings, found.refused, replicate, rank))
    for name, tiling in tilings.items():
        if name in found.refused:
            continue
        try:
            found.views[name] = FragmentView(name, params[name], tiling, tiling.box(rank))
        except Exception as error:  # others may wait for a further exchange
            found.refused[name] = CanzonaError(f"its fragments cannot be put together: {first_line(error)}", at=name)
    return found


def exchange_sizes(own: Shardings, params: Mapping[str, Tensor]) -> dict[str, Tiling]:
    """Find the whole tensors of all fragments that this rank holds. This is a collective over each mesh.

    Args:
        own: what this rank knows. Parameters that it or another rank refuses are added to `refused`.
    """
    found: dict[str, Tiling] = {}
    for mesh in own.own_meshes:
        here = {n: s for n, s in own.by_name.items() if mesh_key(s.mesh) == mesh_key(mesh)}
        told = {
            name: FragmentEntry(tuple(params[name].shape), f"{params[name].dtype} {sharding}", "")
            for name, sharding in here.items()
        }
        told |= {name: FragmentEntry((), "", str(error)) for name, error in own.refused.items()}
        try:
            everybody = gathered(mesh, told)
        except Exception as error:  # a rank died, or made no exchange over this mesh
            for name in here:
                own.refused[name] = no_answer(name, mesh, error)
            continue
        for name in dict.fromkeys(name for told_there in everybody.values() for name in told_there):
            try:
                sizes = agreed(name, mesh, everybody)
                if name in here:
                    found[name] = Tiling.of(here[name], sizes)
            except CanzonaError as error:
                own.refused.setdefault(name, type(error)(error.problem, at=name, hint=error.hint))
    return found


def agreed(
    name: str, mesh: DeviceMesh, everybody: Mapping[MeshCoordinate, Mapping[str, FragmentEntry]]
) -> dict[MeshCoordinate, Shape]:
    """The sizes of one parameter's fragments."""
    first: tuple[int, FragmentEntry] | None = None
    for at, told in everybody.items():
        rank, entry = int(mesh.mesh[at]), told.get(name)
        if entry is None:
            raise RankMismatch(
                f"rank {rank} does not hold a fragment of this parameter over the ranks {ranks_of(mesh)}", hint=ALIKE
            )
        if entry.refusal:
            raise RankMismatch(f"rank {rank} cannot use this parameter:\n{entry.refusal}")
        if first is None:
            first = rank, entry
        if (entry.how, len(entry.size)) != (first[1].how, len(first[1].size)):
            raise RankMismatch(
                f"ranks disagree: rank {first[0]} has {list(first[1].size)} {first[1].how}, "
                f"rank {rank} {list(entry.size)} {entry.how}",
                hint=ALIKE,
            )
    return {at: told[name].size for at, told in everybody.items()}


def exchange_rows(
    tilings: Mapping[str, Tiling], refused: dict[str, CanzonaError], group: dist.ProcessGroup, rank: int
) -> dict[GridRows, GridRows]:
    """Find the ranks that hold the same fragments in other replicas. This is a collective over the replicas.

    Args:
        tilings: the tensors of which this rank holds fragments. All replicas must have the same ones.
        refused: the parameters that this rank refuses; those that replicas see differently are added.
    """
    told = {}
    for name, tiling in tilings.items():
        layout = tiling.layout(rank)
        told[name] = layout.grid.ranks, f"{list(layout.shape)} as {' '.join(map(str, layout.boxes))}"
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, (told, {name: str(error) for name, error in refused.items()}), group=group)
    ranks = dist.get_process_group_ranks(group)
    found: dict[GridRows, GridRows] = {}
    for name, (rows, text) in told.items():
        for other, (theirs, refusals) in zip(ranks, everybody, strict=True):
            if name in refusals:
                refused.setdefault(
                    name, RankMismatch(f"rank {other} cannot use this parameter:\n{refusals[name]}", at=name)
                )
            elif name not in theirs or theirs[name][1] != text:
                there = theirs[name][1] if name in theirs else "no fragment"
                refused.setdefault(
                    name,
                    RankMismatch(
                        f"replicas disagree: rank {rank} has {text}, rank {other} {there}", at=name, hint=ALIKE
                    ),
                )
        if name not in refused:
            found[rows] = tuple(row for theirs, _ in everybody for row in theirs[name][0])
    return found


def gathered(mesh: DeviceMesh, told: Mapping[str, FragmentEntry]) -> dict[MeshCoordinate, Mapping[str, FragmentEntry]]:
    """What every rank of a mesh tells, by coordinate. This is a collective over each dim of the mesh in turn."""
    found: dict[MeshCoordinate, Mapping[str, FragmentEntry]] = {tuple(mesh.get_coordinate() or ()): told}
    for dim in reversed(range(mesh.ndim)):
        everybody: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(everybody, found, group=mesh.get_group(dim))
        found = {at: entries for known in everybody for at, entries in known.items()}
    return dict(sorted(found.items()))


def ranks_of(mesh: DeviceMesh) -> list[int]:
    return [int(rank) for rank in mesh.mesh.flatten()]


def no_answer(name: str, mesh: DeviceMesh, error: Exception) -> CanzonaError:
    made = CanzonaError(
        f"not all of the ranks {ranks_of(mesh)} sent the sizes of their fragments: {str(error).splitlines()[0]}",
        at=name,
        hint=ALIKE,
    )
    made.__cause__ = error
    return made


def refused_together(sharding: Sharding, replicas: Sequence[int], rank: int) -> CanzonaError | None:
    """Say why ranks cannot be both replicas and holders of fragments; None if they are not."""
    members = set(ranks_of(sharding.mesh))
    if set(replicas) <= members or not members & (set(replicas) - {rank}):
        return None
    return UnsupportedLayout(
        f"its fragments lie on the ranks {sorted(members)} and replicate= has the ranks {list(replicas)}; "
        "the two may share only this rank",
        hint='pass only the data-parallel ranks: replicate=mesh["dp"], with layout= over mesh["tp"]',
    )
