"""Tensors that no type describes: plain fragments, and what is known about the whole that they are fragments of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from canzona_compile.compat.torch_private import StridedShard
from canzona_compile.errors import CanzonaError, UnsupportedLayout
from canzona_compile.ir.canonical_names import canonical_name
from canzona_compile.ir.layout import Box, Layout, MeshCoordinate, Shape, coordinate_of, cutting_order, layout_of_boxes

MeshOrGroup: TypeAlias = DeviceMesh | ProcessGroup
Given: TypeAlias = MeshOrGroup | tuple[MeshOrGroup, Sequence[Placement]] | None
LayoutOption: TypeAlias = MeshOrGroup | Mapping[str, Given] | Callable[[str, Tensor], Given] | None


@dataclass(frozen=True, slots=True)
class GivenLayout:
    """What the user says of plain tensors that are fragments.

    What is said of a parameter is a mesh with its placements; or a mesh alone, which is then the tensor-parallel mesh
    for Megatron's attributes; or None, which means that each rank holds it whole. A process group is a mesh of one dim.

    Attributes:
        patterns: patterns of parameter names with what is said of the parameters that they match; the first one counts.
        function: says it by name and parameter; None if there are patterns or a mesh alone.
        mesh: the tensor-parallel mesh of parameters that no pattern matches; None if it is not known.
    """

    patterns: tuple[tuple[str, Given], ...] = ()
    function: Callable[[str, Tensor], Given] | None = None
    mesh: MeshOrGroup | None = None
    alone: bool = False

    @classmethod
    def of(cls, given: LayoutOption) -> GivenLayout | None:
        """Take the argument `layout=`."""
        if given is None:
            return None
        if isinstance(given, MeshOrGroup):
            return cls(mesh=given, alone=True)
        if isinstance(given, Mapping):
            meshes = {ranks for ranks in map(ranks_in, given.values()) if getattr(ranks, "ndim", 1) == 1} - {None}
            patterns = tuple((canonical_name(pattern), told) for pattern, told in given.items())
            return cls(patterns, mesh=meshes.pop() if len(meshes) == 1 else None)
        if callable(given):
            return cls(function=given)
        raise CanzonaError(
            f"layout= takes patterns of names, a function, a mesh or a process group, not a {type(given).__name__}",
            at="the option layout",
            hint='pass layout={"*.fc1.weight": (mesh, [Shard(0)]), "*.fc2.weight": (mesh, [Shard(1)])}',
        )

    def for_names(self, names: Iterable[str]) -> GivenLayout:
        """The same without the patterns that match none of some names."""
        known = list(names)
        kept = tuple(p for p in self.patterns if any(fnmatchcase(name, p[0]) for name in known))
        return replace(self, patterns=kept)

    def on(self, device: str) -> GivenLayout:
        """The same with meshes of a type of device in place of process groups."""
        patterns = tuple((pattern, with_mesh(given, device)) for pattern, given in self.patterns)
        return replace(self, patterns=patterns, mesh=with_mesh(self.mesh, device))

    def known_meshes(self) -> list[DeviceMesh]:
        """The meshes that are given whatever the parameters are."""
        found = [self.mesh, *(ranks_in(given) for _, given in self.patterns)]
        return [mesh for mesh in found if isinstance(mesh, DeviceMesh)]


def ranks_in(given: Any) -> MeshOrGroup | None:
    """The mesh or group in what is said of a parameter; None if there is none, or if what is said makes no sense."""
    first = given[0] if isinstance(given, tuple | list) and given else given
    return first if isinstance(first, MeshOrGroup) else None


def with_mesh(given: Any, device: str) -> Any:
    """What is said of a parameter, with a mesh in place of a process group."""
    ranks = ranks_in(given)
    if not isinstance(ranks, ProcessGroup):
        return given
    mesh = DeviceMesh.from_group(ranks, device)
    return mesh if ranks is given else (mesh, *given[1:])


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is divided among the ranks of a mesh.

    Attributes:
        placements: one per dim of the mesh.
        stride: into how many parts the tensor was divided before each of them was sharded; a fragment is this rank's
            share of every part.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    stride: int = 1

    @property
    def cutting_dims(self) -> tuple[int, ...]:
        """The mesh dims along which ranks hold different elements."""
        return tuple(i for i, placement in enumerate(self.placements) if placement.is_shard())

    def __str__(self) -> str:
        strided = f", each in {self.stride} parts" if self.stride > 1 else ""
        return f"({', '.join(map(str, self.placements))}){strided}"


@dataclass(frozen=True, eq=False, slots=True)
class Tiling:
    """A whole tensor as its fragments on all ranks of a mesh tell it.

    Attributes:
        boxes: what the rank at each coordinate of the mesh holds.
    """

    sharding: Sharding
    shape: Shape
    boxes: Mapping[MeshCoordinate, Box]

    @classmethod
    def of(cls, sharding: Sharding, sizes: Mapping[MeshCoordinate, Shape]) -> Tiling:
        """Put a tensor together from the sizes of its fragments, which may differ.

        Args:
            sizes: the shape of the fragment at each coordinate of the mesh.
        """
        mesh = tuple(sharding.mesh.mesh.shape)
        shape: list[int] = []
        starts: list[dict[MeshCoordinate, int]] = []
        order = cutting_order(mesh, sharding.placements)
        for dim in range(len(next(iter(sizes.values())))):
            cutting = [i for i in order if shard_dim(sharding.placements[i]) == dim]
            lengths: dict[MeshCoordinate, int] = {}
            for at, size in sizes.items():
                place = tuple(at[i] for i in cutting)
                if lengths.setdefault(place, size[dim]) != size[dim]:
                    raise UnsupportedLayout(
                        f"the fragments do not tile a tensor: of dim {dim} ranks hold {lengths[place]} and {size[dim]} "
                        f"entries that {sharding} says are the same; there are {sizes_by_rank(sizes)}",
                        hint="give a placement for every mesh dim that shards the tensor, with the dim that it shards",
                    )
            begin, length = {}, 0
            for place in product(*(range(mesh[i]) for i in cutting)):
                begin[place] = length
                length += lengths[place]
            shape.append(length)
            starts.append({at: begin[tuple(at[i] for i in cutting)] for at in sizes})
        boxes = {at: Box(tuple(start[at] for start in starts), size) for at, size in sizes.items()}
        return cls(sharding, tuple(shape), boxes)

    def layout(self, rank: int, *, batch_dims: int = 0) -> Layout:
        """The layout of the tensor; `batch_dims` is that of `dtensor_layout`."""
        mesh, placements = self.sharding.mesh.mesh, self.sharding.placements
        return layout_of_boxes(self.shape, mesh, placements, self.boxes, rank, batch_dims=batch_dims)

    def box(self, rank: int) -> Box:
        """The region of the tensor that a global rank holds."""
        return self.boxes[coordinate_of(self.sharding.mesh.mesh, rank)]

    def like(self, local: Tensor) -> DTensor:
        """A fragment as a DTensor of the whole shape, which shares the fragment's memory."""
        stride = torch.empty(self.shape, device="meta").stride()
        mesh, placements = self.sharding.mesh, self.sharding.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=stride)


def shard_dim(placement: Placement) -> int | None:
    """The dim of the tensor that a mesh dim cuts; None if it cuts none."""
    return placement.dim if isinstance(placement, Shard | StridedShard) else None


def sizes_by_rank(sizes: Mapping[MeshCoordinate, Sequence[int]], limit: int = 8) -> str:
    """The sizes of fragments in the order of the mesh, for an error message."""
    shown = " ".join(str(list(sizes[at])) for at in sorted(sizes)[:limit])
    return shown if len(sizes) <= limit else f"{shown} ..."
