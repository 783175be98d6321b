"""What is known of plain tensors that somebody else sharded: what `layout=` says, and Megatron's attributes.

Megatron marks a parameter that is sharded over the tensor-parallel ranks by `tensor_model_parallel`, the dim by
`partition_dim`, and a fragment that is a share of several parts, such as gate and up, by `partition_stride`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from canzona_compile.errors import CanzonaError, RankMismatch, UnsupportedLayout
from canzona_compile.ir.layout import MeshCoordinate, Shape, cutting_order
from canzona_compile.ir.sharding import GivenLayout, Sharding, Tiling, shard_dim, with_mesh
from canzona_compile.ir.split import check_patterns
from canzona_compile.replica.raised import first_line
from canzona_compile.runtime.process_groups import distributed
from canzona_compile.tensors import is_expert
from canzona_compile.views.fragment import FragmentView

WHERE = "wrap(..., layout=)"
Named = Sequence[tuple[str, int, Tensor]]  # name, index of the parameter group, parameter


@dataclass(eq=False, slots=True)
class Shardings:
    """What this rank knows of its plain tensors, before it hears of the other ranks.

    Attributes:
        refused: the parameters of which nothing sensible is said.
        meshes: all meshes that are named, some of them several times.
    """

    by_name: dict[str, Sharding] = field(default_factory=dict)
    refused: dict[str, CanzonaError] = field(default_factory=dict)
    meshes: list[DeviceMesh] = field(default_factory=list)

    @property
    def own_meshes(self) -> list[DeviceMesh]:
        """The meshes that this rank is part of, in an order that is the same on all ranks of two meshes."""
        known = {mesh_key(mesh): mesh for mesh in self.meshes if mesh.get_coordinate() is not None}
        return [mesh for _, mesh in sorted(known.items())]


def shardings_of(named: Named, given: GivenLayout | None) -> Shardings:
    """Find out which parameters are fragments, and of what. This communicates with nobody and raises nothing."""
    if given is not None:
        given = given.on(named[0][2].device.type if named else "cpu")
    found = Shardings(meshes=[] if given is None else given.known_meshes())
    for name, _, param in named:
        try:
            sharding = sharding_of(name, param, given)
        except CanzonaError as error:
            found.refused[name] = error
            continue
        if sharding is not None:
            found.by_name[name] = sharding
            found.meshes.append(sharding.mesh)
    return found


def sharding_of(name: str, param: Tensor, given: GivenLayout | None) -> Sharding | None:
    """Find out how a parameter is sharded.

    Returns:
        Its sharding; None if its type tells its layout, or if this rank holds it whole.
    """
    told: Any = None if given is None else given.mesh
    explicit = False
    if given is not None and given.function is not None:
        told = asked(given, name, param)
        explicit = told is None
    elif given is not None:
        for pattern, value in given.patterns:
            if fnmatchcase(name, pattern):
                told, explicit = value, value is None
                break
    if isinstance(param, DTensor):
        if isinstance(told, tuple | list):
            raise UnsupportedLayout(
                "the parameter is a DTensor and has its own placements, but layout= gives some as well",
                at=name,
                hint="narrow the patterns of layout= so that they do not match it",
            )
        return None
    if isinstance(told, tuple | list):
        return stated(name, param, told)
    if told is not None and not isinstance(told, DeviceMesh):
        raise nonsense(name, told)
    if explicit or not getattr(param, "tensor_model_parallel", False):
        return None
    if told is None and not (distributed() and dist.get_world_size() > 1):
        return None  # Megatron marks weights without tensor parallelism as well
    return marked(name, param, told)


def asked(given: GivenLayout, name: str, param: Tensor) -> Any:
    """What the user's function says of a parameter."""
    assert given.function is not None
    try:
        return with_mesh(given.function(name, param), param.device.type)
    except Exception as error:
        raise CanzonaError(f"the function given as layout= raised {type(error).__name__}: {error}", at=name) from error


def stated(name: str, param: Tensor, told: Any) -> Sharding:
    """The sharding that a mesh and placements say."""
    if len(told) != 2 or not isinstance(told[0], DeviceMesh) or not isinstance(told[1], Sequence):
        raise nonsense(name, told)
    mesh, placements = told
    if not all(isinstance(p, Placement) for p in placements):
        raise nonsense(name, told)
    if len(placements) != mesh.ndim:
        raise UnsupportedLayout(
            f"layout= gives {len(placements)} placements for a mesh of {mesh.ndim} dims",
            at=name,
            hint="give one placement per mesh dim: Shard(dim) or Replicate()",
        )
    own = tuple(
        Shard(p.dim % param.ndim) if isinstance(p, Shard) and -param.ndim <= p.dim < 0 else p for p in placements
    )
    for placement in own:
        dim = shard_dim(placement)
        if dim is not None and not 0 <= dim < param.ndim:
            raise UnsupportedLayout(
                f"layout= says {placement}, but the fragment has shape {list(param.shape)}", at=name
            )
    try:
        cutting_order(tuple(mesh.mesh.shape), own)
    except CanzonaError as error:
        raise UnsupportedLayout(error.problem, at=name, hint=error.hint) from error
    return with_this_rank(name, Sharding(mesh, own))


def marked(name: str, param: Tensor, mesh: DeviceMesh | None) -> Sharding:
    """The sharding that Megatron's attributes say."""
    if is_expert(param) and (mesh is None or mesh.size() > 1):
        raise UnsupportedLayout(
            "its attribute allreduce=False says that it is an expert. Tensor-parallel ranks may hold different ones, "
            "each whole, although tensor_model_parallel is True",
            at=name,
            hint='say how experts are sharded: layout={"*.experts.*": None, "*": mesh} if each rank holds its own '
            'whole, or layout={"*.experts.*": (expert_mesh, [Shard(dim)]), "*": mesh} if expert_mesh has the ranks '
            "that hold fragments of the same ones",
        )
    if mesh is None:
        raise UnsupportedLayout(
            "its attribute tensor_model_parallel says that it is a fragment, but not which ranks hold the others",
            at=name,
            hint="pass the tensor-parallel mesh as layout=mesh, or say how each parameter is sharded: "
            'layout={"*.weight": (mesh, [Shard(0)])}',
        )
    if mesh.ndim != 1:
        raise UnsupportedLayout(
            f"its attributes describe one tensor-parallel dim, but the mesh has {mesh.ndim} dims",
            at=name,
            hint='pass only the tensor-parallel dim: layout=mesh["tp"]',
        )
    dim = getattr(param, "partition_dim", None)
    stride = getattr(param, "partition_stride", 1)
    if not isinstance(dim, int) or not 0 <= dim < param.ndim:
        raise UnsupportedLayout(
            f"tensor_model_parallel is True, but partition_dim={dim!r} is not a dim of its shape {list(param.shape)}",
            at=name,
            hint="say how the parameter is sharded in layout=, which overrides its attributes",
        )
    if not isinstance(stride, int) or stride < 1:
        raise UnsupportedLayout(f"partition_stride is {stride!r}, not a positive integer", at=name)
    return with_this_rank(name, Sharding(mesh, (Shard(dim),), stride))


def with_this_rank(name: str, sharding: Sharding) -> Sharding:
    """The sharding itself, if this rank is part of its mesh."""
    if sharding.mesh.get_coordinate() is None:
        raise UnsupportedLayout(
            f"rank {dist.get_rank()} is not in the mesh of layout=, which has the ranks {sharding.mesh.mesh.tolist()}",
            at=name,
            hint="on each rank, pass the mesh of the ranks that hold the other fragments of the same parameters",
        )
    return sharding


def nonsense(name: str, told: object) -> CanzonaError:
    """The error for what cannot be a layout."""
    return CanzonaError(
        f"layout= gives {told!r} instead of (mesh, placements), a mesh, or None",
        at=name,
        hint="use (mesh, [Shard(0)]) if the rows of a linear layer are sharded, (mesh, [Shard(1)]) if its columns are",
    )


def check_layout_patterns(given: GivenLayout | None, names: Sequence[str]) -> None:
    """Raise CanzonaError if a pattern of `layout=` matches no parameter name."""
    check_patterns(() if given is None else given.patterns, names, WHERE)


def check_marked(given: GivenLayout | None, params: Iterable[Tensor]) -> None:
    """Raise CanzonaError if `layout=` is a mesh alone and no parameter has Megatron's attributes."""
    mesh_alone = given is not None and given.alone
    if mesh_alone and not any(getattr(param, "tensor_model_parallel", False) for param in params):
        raise CanzonaError(
            "layout= is only a mesh, but no parameter has the attribute tensor_model_parallel=True",
            at=WHERE,
            hint="copies of parameters lose their attributes: use patterns of names in layout=, or omit layout= if "
            "each rank holds whole parameters",
        )


def mesh_key(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks and the shape of a mesh, by which meshes are put in order; two meshes of equal keys are one."""
    return tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)


# -- what ranks tell each other -------------------------------------------------------------------


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
