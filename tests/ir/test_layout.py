"""Boxes tile their tensor and are what DTensors really hold, even or not, empty or not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from canzona_compile.errors import InvalidStep, UnsupportedLayout
from canzona_compile.ir.layout import (
    Box,
    Grid,
    Layout,
    Shape,
    dtensor_layout,
    fragment,
    local_layout,
    replicated_layout,
)
from tests.harness.untimed import untimed

SHAPES = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)
MESHES = st.sampled_from([(2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2)])


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Shape, Shape, tuple[Placement, ...]]:
    """A shape, a mesh and placements of plain shards and replicas."""
    shape, mesh = draw(SHAPES), draw(MESHES)
    choices = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    return shape, mesh, tuple(draw(st.sampled_from(choices)) for _ in mesh)


@st.composite
def fsdp_on_tp(draw: st.DrawFn) -> tuple[Shape, Shape, tuple[Placement, ...]]:
    """What FSDP2 makes of a tensor that TP cut along the same dim: (_StridedShard, Shard)."""
    shape = draw(SHAPES)
    mesh = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 2)]))
    dim = draw(st.integers(0, len(shape) - 1))
    return shape, mesh, (_StridedShard(dim, split_factor=mesh[1]), Shard(dim))


def numbered(shape: Shape) -> Tensor:
    """Every element is its own number, so that a fragment says where it comes from."""
    return torch.arange(float(math.prod(shape))).view(shape)


@contextlib.contextmanager
def rank_of(mesh: Shape, rank: int) -> Iterator[DeviceMesh]:
    """A mesh as `rank` sees it, without the other ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh))
    try:
        yield init_device_mesh("cpu", mesh)
    finally:
        dist.destroy_process_group()


def seen_by(shape: Shape, mesh: Shape, placements: Sequence[Placement], rank: int) -> tuple[Tensor, Layout]:
    """What torch gives a rank of a numbered tensor, and the layout that is read off it."""
    with rank_of(mesh, rank) as device_mesh:
        tensor = distribute_tensor(numbered(shape), device_mesh, placements, src_data_rank=None)
        return tensor.to_local(), dtensor_layout(tensor, rank)


def tiles(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Is every element in exactly one box?"""
    count = torch.zeros(shape)
    for box in boxes:
        count[box.slices()] += 1
    return bool((count == 1).all())


# -- boxes -------------------------------------------------------------------------------------


@untimed()
@given(SHAPES, st.data())
def test_cuts_tile_a_box_as_chunk_does(shape: Shape, data: st.DataObject) -> None:
    dim, parts = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 6))
    boxes = [Box.whole(shape).cut(dim, parts, i) for i in range(parts)]
    assert tiles(shape, boxes)
    chunks = numbered(shape).chunk(parts, dim)
    for i, box in enumerate(boxes):
        part = numbered(shape)[box.slices()]
        assert torch.equal(part, chunks[i]) if i < len(chunks) else box.numel == 0


@untimed()
@given(SHAPES, st.data())
def test_a_cut_of_a_cut_stays_inside(shape: Shape, data: st.DataObject) -> None:
    box = Box.whole(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        dim, parts = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
        inner = [box.cut(dim, parts, i) for i in range(parts)]
        assert sum(b.numel for b in inner) == box.numel
        cut = data.draw(st.sampled_from(inner))
        for a, size, start, length in zip(cut.start, cut.size, box.start, box.size, strict=True):
            assert start <= a <= a + size <= start + length
        box = cut
    assert numbered(shape)[box.slices()].numel() == box.numel


@untimed()
@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 4), st.integers(0, 1), st.data())
def test_box_of_a_broadcast_tensor(shape: Shape, parts: int, dim: int, data: st.DataObject) -> None:
    """What a fragment needs of a row, a column or a scalar is what broadcasting would have given it."""
    box = Box.whole(shape).cut(dim, parts, data.draw(st.integers(0, parts - 1)))
    small = tuple(data.draw(st.sampled_from([n, 1])) for n in shape)
    part = numbered(small)[box.of(small).slices()]
    assert torch.equal(part.expand(box.size), numbered(small).expand(shape)[box.slices()])
    assert box.of(()) == Box.whole(())
    assert box.of(shape).size == box.size


def test_box_of_an_empty_fragment_is_empty() -> None:
    empty = Box.whole((2, 3)).cut(0, 4, 3)
    assert empty.size == (0, 3)
    assert empty.of((1, 3)) == Box((0, 0), (0, 3))
    assert empty.of((2, 1)) == Box((2, 0), (0, 1))


# -- against torch -----------------------------------------------------------------------------


@untimed(60)
@given(sharded())
def test_layouts_are_what_dtensors_hold(case: tuple[Shape, Shape, tuple[Placement, ...]]) -> None:
    shape, mesh, placements = case
    layouts = []
    for rank in range(math.prod(mesh)):
        held, layout = seen_by(shape, mesh, placements, rank)
        _, shard = layout.grid.find(rank)
        assert torch.equal(numbered(shape)[layout.boxes[shard].slices()], held)
        layouts.append(layout)
    assert len(set(layouts)) == 1  # every rank reads the same
    assert tiles(shape, layouts[0].boxes)
    assert layouts[0].grid.members() == tuple(range(math.prod(mesh)))
    assert layouts[0].grid.replicas == math.prod(n for n, p in zip(mesh, placements, strict=True) if p.is_replicate())


@untimed(60)
@given(fsdp_on_tp())
@example(((8, 6), (2, 2, 2), (_StridedShard(0, split_factor=2), Shard(1), Shard(0))))
def test_strided_shards_are_what_dtensors_hold(case: tuple[Shape, Shape, tuple[Placement, ...]]) -> None:
    """Where rows do not divide, `distribute_tensor` cuts otherwise than FSDP2: then a rank refuses."""
    shape, mesh, placements = case
    refusals = []
    boxes = [fragment(shape, mesh, placements, at) for at in product(*map(range, mesh))]
    assert tiles(shape, boxes)
    for rank in range(math.prod(mesh)):
        try:
            held, layout = seen_by(shape, mesh, placements, rank)
        except UnsupportedLayout as error:
            refusals.append(error.problem)
            continue
        assert torch.equal(numbered(shape)[layout.boxes[layout.grid.find(rank)[1]].slices()], held)
    dim = next(p.dim for p in placements if isinstance(p, Shard))
    assert all("the local tensor is" in problem for problem in refusals)
    assert not refusals or shape[dim] % math.prod(mesh)


@untimed(60)
@given(fsdp_on_tp())
def test_strided_shards_are_chunks_of_what_tp_holds(case: tuple[Shape, Shape, tuple[Placement, ...]]) -> None:
    shape, mesh, placements = case
    dim = next(p.dim for p in placements if isinstance(p, Shard))
    for dp, tp in product(*map(range, mesh)):
        held = part(part(numbered(shape), mesh[1], tp, dim), mesh[0], dp, dim)
        assert torch.equal(numbered(shape)[fragment(shape, mesh, placements, (dp, tp)).slices()], held)


def part(tensor: Tensor, parts: int, index: int, dim: int) -> Tensor:
    """Chunk `index`; where torch makes fewer chunks the rest is empty."""
    chunks = tensor.chunk(parts, dim) if tensor.shape[dim] else (tensor,)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize("rank", range(4))
def test_experts_on_different_ranks_are_different_matrices(rank: int) -> None:
    with rank_of((2, 2), rank) as mesh:
        tensor = distribute_tensor(numbered((5, 4, 3)), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        layout = dtensor_layout(tensor, rank, batch_dims=1)
    experts = 3 if rank < 2 else 2
    assert layout.shape == (experts, 4, 3)
    assert layout.grid == Grid(((0, 1),) if rank < 2 else ((2, 3),))
    assert layout.boxes == (Box((0, 0, 0), (experts, 2, 3)), Box((0, 2, 0), (experts, 2, 3)))


# -- what is refused ---------------------------------------------------------------------------


def test_partial_sums_are_refused() -> None:
    with rank_of((2,), 0) as mesh:
        tensor = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsupportedLayout, match="neither a shard nor a replica") as caught:
            dtensor_layout(tensor, 0)
    assert "redistribute" in str(caught.value)


def test_a_split_factor_without_a_reason_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="split factor that no later mesh dims explain"):
        fragment((8, 4), (2, 2), (_StridedShard(0, split_factor=4), Shard(0)), (0, 0))


def test_a_local_tensor_of_another_size_is_refused() -> None:
    with rank_of((2,), 0) as mesh:
        tensor = DTensor.from_local(
            torch.ones(3, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1)
        )
        with pytest.raises(UnsupportedLayout, match=r"the local tensor is \[3, 3\]"):
            dtensor_layout(tensor, 0)


def test_boxes_that_do_not_cover_the_tensor_are_refused() -> None:
    halves = tuple(Box.whole((4, 2)).cut(0, 2, i) for i in range(2))
    Layout((4, 2), Grid(((0, 1),)), halves, "S0")
    with pytest.raises(UnsupportedLayout, match="do not tile"):
        Layout((4, 2), Grid(((0, 1),)), (halves[0], Box((4, 0), (0, 2))), "S0")
    with pytest.raises(InvalidStep, match="1 boxes for 2 shards"):
        Layout((4, 2), Grid(((0, 1),)), halves[:1], "S0")


# -- grids -------------------------------------------------------------------------------------


@untimed()
@given(st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_grids_find_their_ranks(replicas: int, shards: int, random: object) -> None:
    ranks = list(range(replicas * shards))
    random.shuffle(ranks)  # type: ignore[attr-defined]
    grid = Grid(tuple(tuple(ranks[r * shards : (r + 1) * shards]) for r in range(replicas)))
    assert (grid.size, grid.members()) == (len(ranks), tuple(range(len(ranks))))
    for rank in ranks:
        r, s = grid.find(rank)
        assert grid.ranks[r][s] == rank
    for r in range(replicas):
        peers = [grid.ranks[r][s] for s in grid.shard_peers(r)]
        assert peers == sorted(grid.ranks[r])
    for s in range(shards):
        column = [grid.ranks[r][s] for r in grid.replica_peers(s)]
        assert column == sorted(row[s] for row in grid.ranks)


def test_a_rank_outside_of_the_grid() -> None:
    with pytest.raises(InvalidStep, match="rank 7 is not a member"):
        Grid(((0, 1),)).find(7)


def test_plain_tensors() -> None:
    alone, copies = local_layout((4, 2), 3), replicated_layout((4, 2), (1, 5))
    assert (alone.grid.ranks, alone.boxes) == (((3,),), (Box.whole((4, 2)),))
    assert (copies.grid.replicas, copies.grid.shards, copies.boxes) == (2, 1, alone.boxes)
