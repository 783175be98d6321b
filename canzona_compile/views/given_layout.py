"""What is known of plain tensors that somebody else sharded: what `layout=` says, and Megatron's attributes.

Megatron marks a parameter that is sharded over the tensor-parallel ranks by `tensor_model_parallel`, the dim by
`partition_dim`, and a fragment that is a share of several parts, such as gate and up, by `partition_stride`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from canzona_compile.errors import CanzonaError, UnsupportedLayout
from canzona_compile.ir.given_layout import GivenLayout
from canzona_compile.ir.layout import cutting_order
from canzona_compile.ir.sharding import Sharding, shard_dim
from canzona_compile.ir.split import check_patterns

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
    return marked(name, param, told)


def asked(given: GivenLayout, name: str, param: Tensor) -> Any:
    """What the user's function says of a parameter."""
    assert given.function is not None
    try:
        return given.function(name, param)
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
