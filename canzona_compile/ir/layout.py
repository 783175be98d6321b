"""Where the fragments of a parameter live: boxes of a global tensor, spread over a grid of ranks.

A mesh's dims fall in *replicate dims* R, along which every rank holds the same, and *shard dims* S,
along which the tensor is cut. Flattened they make a grid of R rows (replicas) and S columns. Rank
(r, s) holds box s. Every layout that this package knows is such a grid and S boxes:

    FSDP2 on 4 ranks         1 x 4        TP on 2, DDP on 3 over it    3 x 2
    DDP on 4 ranks           4 x 1        a tensor of one rank alone   1 x 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from canzona_compile.compat.torch_private import StridedShard
from canzona_compile.errors import InvalidStep, UnsupportedLayout

Shape = tuple[int, ...]
MeshCoordinate = tuple[int, ...]  # of a rank in a mesh
Ranks = tuple[int, ...]  # global ranks, ascending
WHOLE_VECTORS = 64  # elements: a multiple of the step of every CPU vector loop, so that no scalar tail is left


@dataclass(frozen=True, slots=True)
class Box:
    """A slice per dim of a tensor: elements [start, start + size) in each. Sizes may be zero."""

    start: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def cut(self, dim: int, parts: int, index: int) -> Box:
        """Part `index` of `parts` along `dim`, as torch.chunk cuts: equal parts, the last ones short or empty."""
        length = -(-self.size[dim] // parts)
        begin = min(index * length, self.size[dim])
        end = min(begin + length, self.size[dim])
        start, size = list(self.start), list(self.size)
        start[dim] += begin
        size[dim] = end - begin
        return Box(tuple(start), tuple(size))

    def of(self, shape: Shape) -> Box:
        """The part of a tensor of `shape` that broadcasts to this box. Its dims of size 1 are whole."""
        if len(shape) != len(self.size):
            return Box.whole(shape)
        if 1 not in shape:
            return self
        pairs = zip(self.start, self.size, shape, strict=True)
        start_size = [(0, min(size, 1)) if length == 1 else (start, size) for start, size, length in pairs]
        return Box(tuple(s for s, _ in start_size), tuple(n for _, n in start_size))

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Grid:
    """Global ranks by (replica, shard): `ranks[r][s]`."""

    ranks: tuple[tuple[int, ...], ...]
    _members: Ranks = field(init=False, repr=False, compare=False)  # thousands of ranks are sorted once

    def __post_init__(self) -> None:
        object.__setattr__(self, "_members", tuple(sorted(rank for row in self.ranks for rank in row)))

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def shards(self) -> int:
        return len(self.ranks[0])

    @property
    def size(self) -> int:
        return self.replicas * self.shards

    def members(self) -> Ranks:
        """Every rank once, ascending."""
        return self._members

    def find(self, rank: int) -> tuple[int, int]:
        """The coordinate (r, s) of a global rank."""
        for r, row in enumerate(self.ranks):
            if rank in row:
                return r, row.index(rank)
        raise InvalidStep(f"rank {rank} is not a member of grid {self}")

    def shard_peers(self, r: int) -> tuple[int, ...]:
        """Shard coordinates of replica r in ascending order of rank: the order of a process group."""
        return tuple(sorted(range(self.shards), key=lambda s: self.ranks[r][s]))

    def replica_peers(self, s: int) -> tuple[int, ...]:
        """Replica coordinates of shard s in ascending order of rank."""
        return tuple(sorted(range(self.replicas), key=lambda r: self.ranks[r][s]))

    def __str__(self) -> str:
        return f"{self.replicas}x{self.shards}{{{','.join(map(str, self.members()))}}}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How one logical matrix (or stack of matrices) of `shape` lies on a grid: box s on every rank (., s)."""

    shape: Shape
    grid: Grid
    boxes: tuple[Box, ...]
    placements: str

    def __post_init__(self) -> None:
        if len(self.boxes) != self.grid.shards:
            raise InvalidStep(f"{len(self.boxes)} boxes for {self.grid.shards} shards")
        if sum(box.numel for box in self.boxes) != math.prod(self.shape):
            raise UnsupportedLayout(
                f"the fragments {self.placements} do not tile the tensor {list(self.shape)}",
                hint="use Shard or the placements of FSDP2, whose fragments are disjoint and cover the tensor",
            )


@dataclass(frozen=True, slots=True)
class LayoutKind:
    """The properties of a layout that decide where a graph is cut."""

    sharded: bool
    replicated: bool
    aligned: bool  # whole matrix and fragments are multiples of `WHOLE_VECTORS`
    lead: Shape = ()  # the first dims of a stack, which count its matrices

    @classmethod
    def of(cls, layout: Layout, ndim: int) -> LayoutKind:
        """The kind of a layout of matrices that have `ndim` dims each."""
        lead = layout.shape[: len(layout.shape) - ndim]
        sizes = [math.prod(layout.shape), math.prod(layout.shape[len(lead) :]), *(box.numel for box in layout.boxes)]
        aligned = all(n % WHOLE_VECTORS == 0 for n in sizes)
        return cls(layout.grid.shards > 1, layout.grid.replicas > 1, aligned, lead)

    @property
    def matrices(self) -> int:
        """How many matrices a task has."""
        return math.prod(self.lead)

    def __str__(self) -> str:
        stack = [f"stack{'x'.join(map(str, self.lead))}"] if self.lead else []
        return "+".join([*stack, *(n for n in ("sharded", "replicated", "aligned") if getattr(self, n))]) or "whole"


def local_layout(shape: Sequence[int], rank: int) -> Layout:
    """A tensor that one rank holds whole and shares with nobody."""
    return Layout(tuple(shape), Grid(((rank,),)), (Box.whole(shape),), "local")


def replicated_layout(shape: Sequence[int], ranks: Sequence[int]) -> Layout:
    """A tensor that every one of `ranks` holds whole (DDP)."""
    grid = Grid(tuple((rank,) for rank in ranks))
    return Layout(tuple(shape), grid, (Box.whole(shape),), "replicated")


def fragment(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], at: Sequence[int]) -> Box:
    """The box of a tensor of `shape` at mesh coordinate `at`.

    Mesh dims cut from left to right, except that a `StridedShard` of split factor f cuts after the
    dims to its right whose sizes multiply to f: this is how FSDP2 shards what TP had sharded before.
    """
    box = Box.whole(shape)
    for i in cutting_order(mesh, placements):
        placement = placements[i]
        assert isinstance(placement, Shard | StridedShard)
        box = box.cut(placement.dim, mesh[i], at[i])
    return box


def cutting_order(mesh: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Mesh dims in the order in which they cut the tensor; replicating dims are left out."""
    order: list[int] = []
    for i, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, StridedShard):
            place, factor = 0, 1
            while factor < placement.split_factor and place < len(order):
                other = placements[order[place]]
                assert isinstance(other, Shard | StridedShard)
                factor *= mesh[order[place]] if other.dim == placement.dim else 1
                place += 1
            if factor != placement.split_factor:
                raise UnsupportedLayout(
                    f"{placement} on mesh dim {i} has a split factor that no later mesh dims explain",
                    hint="call parallelize_module first and fully_shard second, over one mesh",
                )
            order.insert(place, i)
        elif isinstance(placement, Shard):
            order.insert(0, i)
        elif not isinstance(placement, Replicate):
            raise UnsupportedLayout(
                f"placement {placement} is neither a shard nor a replica",
                hint="redistribute the parameter to Shard or Replicate placements",
            )
    return order


def dtensor_layout(tensor: DTensor, rank: int, *, batch_dims: int = 0) -> Layout:
    """The layout of a DTensor parameter.

    Args:
        batch_dims: leading dims that index independent matrices (1 for a stack of experts). Ranks
            that hold other entries of these dims share nothing with this one and are left out.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes = tuple(mesh.mesh.shape)
    own = coordinate_of(mesh.mesh, rank)
    box = {at: fragment(tensor.shape, sizes, placements, at) for at in product(*map(range, sizes))}
    if tuple(box[own].size) != tuple(tensor.to_local().shape):
        raise UnsupportedLayout(
            f"the local tensor is {list(tensor.to_local().shape)}, but {placements} gives {list(box[own].size)}"
        )
    return layout_of_boxes(tensor.shape, mesh.mesh, placements, box, rank, batch_dims=batch_dims)


def coordinate_of(mesh: torch.Tensor, rank: int) -> MeshCoordinate:
    """The coordinate of a global rank in the tensor of a mesh's ranks."""
    return tuple(int(i) for i in (mesh == rank).nonzero()[0])


def layout_of_boxes(
    shape: Sequence[int],
    mesh: torch.Tensor,
    placements: Sequence[Placement],
    box: Mapping[MeshCoordinate, Box],
    rank: int,
    *,
    batch_dims: int = 0,
) -> Layout:
    """The layout of a tensor whose box is known at every coordinate of a mesh.

    Args:
        placements: one per mesh dim; they say which mesh dims cut and which replicate.
    """
    own, sizes = coordinate_of(mesh, rank), tuple(mesh.shape)
    mine = box[own]
    batch = range(batch_dims)
    fixed = [i for i, p in enumerate(placements) if isinstance(p, Shard | StridedShard) and p.dim in batch]
    shards = [i for i, p in enumerate(placements) if isinstance(p, Shard | StridedShard) and i not in fixed]
    rows = [i for i in range(len(sizes)) if i not in fixed and i not in shards]

    def coordinates(dims: list[int]) -> list[dict[int, int]]:
        return [dict(zip(dims, at, strict=True)) for at in product(*(range(sizes[i]) for i in dims))]

    def at(row: dict[int, int], column: dict[int, int]) -> MeshCoordinate:
        return tuple((row | column).get(i, own[i]) for i in range(len(sizes)))

    grid = Grid(tuple(tuple(int(mesh[at(r, s)]) for s in coordinates(shards)) for r in coordinates(rows)))
    boxes = tuple(
        Box(tuple(0 if i in batch else a for i, a in enumerate(b.start)), b.size)
        for b in (box[at({}, s)] for s in coordinates(shards))
    )
    whole = tuple(mine.size[i] if i in batch else n for i, n in enumerate(shape))
    return Layout(whole, grid, boxes, ",".join(map(short, placements)))


def short(placement: Placement) -> str:
    """R, S0, or SS0x2 (strided, split factor 2)."""
    if isinstance(placement, StridedShard):
        return f"SS{placement.dim}x{placement.split_factor}"
    return f"S{placement.dim}" if isinstance(placement, Shard) else "R"


def laid_out_like(
    local: torch.Tensor, model: torch.Tensor, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """A fragment as a DTensor that is laid out like another tensor, if that is one. It shares the fragment's memory.

    Args:
        shape: of the whole tensor; None for that of `model`. With another shape, where the fragment lies is not what
            the placements say, so no DTensor operation may run on the result but elementwise ones.
        stride: of the whole tensor; None for that of `model`, or contiguous if it has another shape.
    """
    if not isinstance(model, DTensor):
        return local
    whole = model.shape if shape is None else torch.Size(shape)
    if stride is None:
        stride = model.stride() if whole == model.shape else torch.empty(whole, device="meta").stride()
    mesh, placements = model.device_mesh, model.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole, stride=tuple(stride))


def laid_out_by_entries(local: torch.Tensor, stack: torch.Tensor) -> DTensor:
    """What this rank has for its entries of a stack, as a DTensor that is cut along the entries as the stack is.

    Args:
        local: [entries of this rank, ...], whole for each of them.
        stack: [entries, ...], a DTensor in any layout.
    """
    assert isinstance(stack, DTensor)
    cut = [isinstance(p, Shard | StridedShard) and p.dim == 0 for p in stack.placements]
    placements = [p if own else Replicate() for p, own in zip(stack.placements, cut, strict=True)]
    shape = torch.Size((stack.shape[0], *local.shape[1:]))
    stride = (math.prod(local.shape[1:]), *local.stride()[1:])
    return DTensor.from_local(local, stack.device_mesh, placements, run_check=False, shape=shape, stride=stride)
