"""Layouts of a mesh in words are those that torch's own parallelisms make, and their fragments tile every weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from canzona_compile import plan
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Layout, Shape, dtensor_layout
from canzona_compile.tools.planning.mesh import DIMS, WeightSharding, check, parse_mesh
from canzona_compile.tools.planning.weights import Model, ModelWeight, from_shapes
from tests.harness.layouts import mesh_of
from tests.harness.marks import full
from tests.harness.ranks import run
from tests.harness.untimed import untimed

SHAPES: tuple[Shape, ...] = ((8, 12), (7, 5), (10, 3), (3, 9), (1, 4))
Cuts = Sequence[int | None]


def offline(mesh: str, weight: ModelWeight, layers: int = 1) -> tuple[Layout, ...]:
    return WeightSharding(parse_mesh(mesh), layers).layouts(weight)


# -- what torch makes of a mesh --------------------------------------------------------------------


def laid(mesh: str, weights: list[ModelWeight]) -> list[Layout]:
    """On a rank: the layouts that weights have once they are parallelized."""
    sizes = dict(parse_mesh(mesh).dims)
    whole = mesh_of(tuple(sizes.values()), tuple(sizes))
    found = []
    for weight in weights:
        value: Any = torch.zeros(weight.shape)
        if weight.experts and "ep" in sizes:
            value = distribute_tensor(value, whole["ep"], [Shard(0)])
        elif "tp" in sizes:
            cut = Replicate() if weight.tensor_dim is None else Shard(weight.tensor_dim)
            value = distribute_tensor(value, whole["tp"], [cut])
        module = nn.Module()
        module.weight = nn.Parameter(value)
        if shards := tuple(name for name in sizes if name in ("hsdp", "fsdp", "ep")):
            data = whole[shards]
            if "ep" in shards:
                data = whole["fsdp"] if weight.experts else data._flatten("data")
            enough = sizes.get("ep", 1) * sizes.get("fsdp", 1) <= weight.shape[0]
            along = Shard(0 if enough or not weight.experts else 1)
            fully_shard(module, mesh=data, shard_placement_fn=lambda _, along=along: along)
        assert isinstance(module.weight, DTensor)
        found.append(dtensor_layout(module.weight, dist.get_rank(), batch_dims=int(weight.experts)))
    return found


@pytest.mark.parametrize(
    ("mesh", "cuts"),
    [
        ("fsdp=4", [None]),
        ("hsdp=2,fsdp=2", [None]),
        full("hsdp=4,fsdp=1", [None]),
        full("tp=4", [0, 1, None]),
        ("fsdp=2,tp=2", [0, 1, None]),
        full("tp=2,fsdp=2", [0, 1, None]),
        full("fsdp=4,tp=1", [0, 1]),
        full("hsdp=2,fsdp=1,tp=2", [0, 1]),
        full("hsdp=2,fsdp=2,tp=2", [0, 1, None]),
        ("fsdp=2,ep=2", [None]),
        full("ep=2,fsdp=2", [None]),
    ],
)
def test_layouts_are_those_of_torch(mesh: str, cuts: Cuts) -> None:
    weights = [ModelWeight("w", shape, 0, cut) for cut in cuts for shape in SHAPES]
    expected = [list(offline(mesh, weight)) for weight in weights]
    for real in run(parse_mesh(mesh).ranks, laid, mesh, weights):
        assert [[layout] for layout in real] == expected


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        ("fsdp=2,ep=2", (6, 4, 5)),  # three entries on a coordinate of ep, of which FSDP deals out two and one
        ("ep=2,fsdp=2", (6, 4, 5)),
        ("fsdp=2,ep=2", (2, 4, 5)),  # too few entries: FSDP cuts their rows
        ("ep=2,fsdp=2", (2, 4, 5)),
        ("fsdp=4", (5, 4, 5)),  # two, two, one and none
    ],
)
def test_stacks_of_experts_are_dealt_out_as_torch_does_it(mesh: str, shape: Shape) -> None:
    weight = ModelWeight("w", shape, experts=True)
    parts = {rank: part for part in offline(mesh, weight) for rank in part.grid.members()}
    real = [layout for (layout,) in run(4, laid, mesh, [weight])]
    assert [parts.get(rank) for rank in range(4)] == [layout if math.prod(layout.shape) else None for layout in real]


# -- expert and pipeline parallelism ---------------------------------------------------------------


def test_a_stack_lies_on_the_coordinates_of_ep_and_dense_weights_on_all_ranks() -> None:
    (dense,) = offline("fsdp=2,ep=4", ModelWeight("w", (8, 8)))
    assert (dense.grid.replicas, set(dense.grid.members())) == (1, set(range(8)))
    parts = offline("fsdp=2,ep=4", ModelWeight("w", (4, 8, 8), experts=True))  # too few entries for FSDP
    assert [set(part.grid.members()) for part in parts] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert {part.shape for part in parts} == {(1, 8, 8)}


def test_each_entry_of_a_stack_lies_where_the_stack_does() -> None:
    sharding, weight = WeightSharding(parse_mesh("fsdp=2,ep=2,tp=2"), 1), ModelWeight("w", (2, 8, 12), 0, 2, True)
    stacks, entries = sharding.layouts(weight), sharding.entries(weight)
    assert [own.grid for own in stacks] == [own.grid for own in entries]
    for stack, entry in zip(stacks, entries, strict=True):
        assert (stack.shape, entry.shape) == ((1, 8, 12), (8, 12))
        assert [box.size[1:] for box in stack.boxes] == [box.size for box in entry.boxes] == [(4, 6)] * 4
    assert sharding.entries(weight) is entries, "all weights alike share their layouts"


def test_without_fsdp_experts_have_replicas_over_dp_alone() -> None:
    (dense,) = offline("dp=2,ep=4", ModelWeight("w", (8, 8)))
    own = offline("dp=2,ep=4", ModelWeight("w", (8, 8, 8), experts=True))[3]
    assert (dense.grid.replicas, dense.grid.shards) == (8, 1)
    assert own.grid.ranks == ((3,), (7,))


def test_stages_are_runs_of_layers_on_ranks_of_their_own() -> None:
    sharding = WeightSharding(parse_mesh("pp=3,fsdp=2"), layers=8)
    weights = [ModelWeight(f"layers.{i}.w", (8, 8), layer=i) for i in range(8)]
    assert [sharding.stage(weight) for weight in weights] == [0, 0, 0, 1, 1, 1, 2, 2]
    ranks = [sharding.layouts(weight)[0].grid.ranks for weight in weights]
    assert ranks == [((0, 1),)] * 3 + [((2, 3),)] * 3 + [((4, 5),)] * 2


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ("hsdp=2,fsdp=3", ((0, 1, 2), (3, 4, 5))),
        ("fsdp=3,hsdp=2", ((0, 2, 4), (1, 3, 5))),
        ("fsdp=2,tp=3", ((0, 1, 2, 3, 4, 5),)),
        ("tp=3,fsdp=2", ((0, 2, 4, 1, 3, 5),)),
        ("dp=2,tp=3", ((0, 1, 2), (3, 4, 5))),
        ("tp=3,dp=2", ((0, 2, 4), (1, 3, 5))),
        ("hsdp=2,dp=2,fsdp=1", ((0,), (2,), (1,), (3,))),
    ],
)
def test_the_last_dim_varies_fastest_from_rank_to_rank(mesh: str, ranks: tuple[tuple[int, ...], ...]) -> None:
    (layout,) = offline(mesh, ModelWeight("w", (12, 12), tensor_dim=1))
    assert layout.grid.ranks == ranks


# -- every weight is tiled -------------------------------------------------------------------------

MESHES = st.permutations(sorted(DIMS)).flatmap(
    lambda names: st.lists(st.integers(1, 3), min_size=len(names), max_size=len(names)).map(
        lambda sizes: dict(zip(names, sizes, strict=True))
    )
)
SIZES = st.integers(1, 9)


@untimed(150)
@given(
    MESHES,
    st.lists(st.integers(0, 5), max_size=5),
    st.tuples(SIZES, SIZES) | st.tuples(SIZES, SIZES, SIZES),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_fragments_tile_every_weight(
    sizes: dict[str, int], left_out: list[int], shape: Shape, dim: int, layer: int
) -> None:
    for i in left_out:
        sizes.pop(sorted(DIMS)[i], None)
    mesh = parse_mesh(sizes)
    stack = len(shape) > 2
    cut = None if dim < stack or dim >= len(shape) else dim
    weight = ModelWeight("w", shape, layer, cut, experts=stack)
    sharding = WeightSharding(mesh, 4)
    parts = sharding.layouts(weight)
    seen = [rank for part in parts for rank in part.grid.members()]
    stage = mesh.ranks // mesh.size("pp")
    assert len(seen) == len(set(seen)) <= stage
    if not stack:
        assert len(seen) == stage
    assert sum(part.shape[0] for part in parts) == shape[0]
    for part in parts:
        assert part.shape[1:] == shape[1:]
        held = torch.zeros(part.shape, dtype=torch.int64)
        for box in part.boxes:
            held[box.slices()] += 1
        assert bool((held == 1).all())


def test_ranges_of_a_stack_that_is_cut_between_its_matrices_lie_on_the_ranks_that_hold_these() -> None:
    step = plan({"stack": [24, 64, 96]}, mesh="fsdp=4", alternatives=False).step
    held = [[rank for rank, box in enumerate(task.layout.boxes) if box.numel] for task in step.tasks]
    assert held == [[rank] for rank in range(4) for _ in range(4)]


# -- meshes that cannot be -------------------------------------------------------------------------

W = (ModelWeight("w", (8, 8)),)
DENSE = Model("qwen3-0.6b", W, 28, 16, 8)
ROUTED = Model("qwen3-30b-a3b", W, 48, 32, 4, 128)
STACKS = from_shapes(
    {"a": {"shape": [4, 8, 8], "experts": True}, "b": {"shape": [6, 8, 8], "experts": True}}, "stacks", "shapes"
)


@pytest.mark.parametrize(
    ("mesh", "model", "says", "hint"),
    [
        ("", DENSE, "no mesh dim ''", "dp, hsdp, fsdp, ep, tp, pp"),
        ("sp=2", DENSE, "no mesh dim 'sp'", "dp, hsdp, fsdp, ep, tp, pp"),
        ("fsdp=2,,tp=2", DENSE, "no mesh dim ''", "dp, hsdp"),
        ("fsdp=2,tp=2,fsdp=4", DENSE, "fsdp is given twice", "the product"),
        ("fsdp", DENSE, "fsdp is '', not a positive integer", "as in dp=32,tp=8"),
        ("fsdp=0", DENSE, "fsdp is 0, not a positive integer", "as in"),
        ("fsdp=-4", DENSE, "fsdp is '-4', not a positive integer", "as in"),
        ("fsdp=2.5", DENSE, "fsdp is '2.5', not a positive integer", "as in"),
        ("fsdp=²", DENSE, "fsdp is '²', not a positive integer", "as in"),
        ({"tp": True}, DENSE, "tp is True, not a positive integer", "as in"),
        ({"tp": 2.0}, DENSE, "tp is 2.0, not a positive integer", "as in"),
        ("dp=1024,tp=2048", DENSE, "2097152 ranks are more than 1048576", "fewer"),
        ("tp=3", DENSE, "tp=3 does not divide the 16 attention heads of qwen3-0.6b", "tp can be 1, 2, 4, 8, 16"),
        ("tp=16", DENSE, "tp=16 does not divide the 8 key-value heads", "tp can be 1, 2, 4, 8"),
        ("fsdp=2,ep=48", ROUTED, "ep=48 does not divide the 128 experts", "ep can be 1, 2, 4, 8"),
        ("ep=4", STACKS, "ep=4 does not divide the 2 experts", "ep can be 1, 2"),
        ("ep=2", DENSE, "qwen3-0.6b has no experts for ep=2", "leave ep out"),
        ("pp=29", DENSE, "pp=29 stages are more than the 28 layers", "pp can be 1 to 28"),
    ],
)
def test_meshes_that_cannot_be(mesh: Any, model: Model, says: str, hint: str) -> None:
    with pytest.raises(CanzonaError) as caught:
        check(parse_mesh(mesh), model)
    assert says in caught.value.problem
    assert caught.value.at == "mesh"
    assert hint in (caught.value.hint or "")


def test_a_mesh_is_read_from_words_and_from_a_mapping() -> None:
    found = parse_mesh(" dp = 4 , tp = 2 ")
    assert found == parse_mesh({"dp": 4, "tp": 2})
    assert (str(found), found.ranks, found.size("tp"), found.size("pp")) == ("dp=4,tp=2", 8, 2, 1)
    assert [found.rank({"dp": 3, "tp": t}) for t in range(2)] == [6, 7]
