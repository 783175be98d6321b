"""Figures of plans for ZeRO-1: buckets, padding, bytes, and an iteration's three phases."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.bucket import Bucket, BucketSlice
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.simulation.model_passes import (
    BucketLoad,
    Transfer,
    backward_pass,
    forward_pass,
    gathering,
    reduction,
)
from canzona_compile.tools.planning.plan import model_of
from canzona_compile.tools.planning.weights import from_shapes

H100 = named_hardware("h100")
RANKS = (0, 8, 16, 24)
VOCABULARY, WIDTH, HIDDEN = 1000, 64, 96
SHAPES: dict[str, Any] = {"embed": {"shape": [VOCABULARY, WIDTH], "tp": 0, "elementwise": True}}
for layer in range(3):
    SHAPES[f"layers.{layer}.up"] = {"shape": [HIDDEN, WIDTH], "tp": 0}
    SHAPES[f"layers.{layer}.down"] = {"shape": [WIDTH, HIDDEN], "tp": 1}
    SHAPES[f"layers.{layer}.norm"] = {"shape": [WIDTH], "elementwise": True}
SHAPES["head"] = {"shape": [VOCABULARY, WIDTH], "tp": 0, "elementwise": True}
ELEMENTS = 2 * VOCABULARY * WIDTH + 3 * (2 * HIDDEN * WIDTH + WIDTH)


def planned(mesh: str = "dp=4", **options: Any) -> canzona_compile.OfflinePlan:
    return canzona_compile.plan(
        SHAPES, mesh=mesh, **{"updates": "zero1", "alternatives": False, "bucket_bytes": 50_000, **options}
    )


@pytest.fixture(scope="module")
def made() -> canzona_compile.OfflinePlan:
    """With alternatives."""
    return planned("dp=2,tp=2", alternatives=True)


@pytest.mark.full
def test_buckets_hold_all_parameters(made: canzona_compile.OfflinePlan) -> None:
    zero1 = made.forecast.zero1
    assert zero1 is not None
    names = {name for bucket in made.step.buckets for name in bucket.names}
    assert names == set(SHAPES)
    norms = 3 * WIDTH
    elements, padding = (sum(getattr(b, what) for b in made.step.buckets) for what in ("elements", "padding"))
    assert elements == (ELEMENTS - norms) // 2 + norms  # a half on each of two tensor-parallel ranks
    assert zero1.padding_share == padding / elements
    assert made.forecast.data_parallel is not None
    assert sum(b.parameters for b in made.forecast.data_parallel.buckets) == len(SHAPES)
    assert zero1.makespan == max(load.flops for load in made.forecast.loads)
    assert len(made.forecast.loads) == 4


def test_bytes_of_the_phases(made: canzona_compile.OfflinePlan) -> None:
    zero1 = made.forecast.zero1
    assert zero1 is not None
    # float32, to the other replica, in two groups
    sent = 4 * sum(b.elements + b.padding for b in made.step.buckets) * (2 - 1) * 2
    assert [(p.name, p.sent) for p in zero1.phases] == [("backward", sent), ("step", 0), ("forward", sent)]
    assert zero1.phases[0].collectives == zero1.phases[2].collectives >= len(made.step.buckets)
    assert zero1.phases[1].seconds == made.forecast.simulation.seconds
    assert all(p.seconds >= p.exposed >= 0 for p in zero1.phases)


def test_sums_over_replicas_are_priced() -> None:
    one, four = planned("dp=4"), planned("hsdp=4,dp=4")
    assert one.forecast.fingerprint == four.forecast.fingerprint  # each replica has the plan of one
    before, after = one.forecast.zero1, four.forecast.zero1
    assert before is not None
    assert after is not None
    shards = sum(4 * max(bucket.shard_lengths) for bucket in four.step.buckets)
    assert after.phases[0].exposed - before.phases[0].exposed > 0.5 * 2 * shards * 3 / 4 / H100.network.bandwidth
    assert after.phases[1:] == before.phases[1:]
    with pytest.raises(CanzonaError, match="cannot have the mesh dim 'hsdp'"):
        planned("dp=4,hsdp=4")


def test_planners_are_compared(made: canzona_compile.OfflinePlan) -> None:
    found = {one.name: one for one in made.forecast.alternatives}
    assert set(found) == {"alpha 0", "alpha 0.5", "alpha 1", "lpt", "lpt-swap", "replicated"}
    assert found["lpt-swap"].chosen
    assert found["lpt-swap"].zero1 == made.forecast.zero1
    assert found["replicated"].zero1 is None
    for name, one in found.items():
        if one.zero1 is not None:
            assert one.zero1.makespan >= found["lpt-swap"].zero1.makespan, name  # type: ignore[union-attr]
            assert one.zero1.phases[0].spans == () or name == "lpt-swap"


def test_all_formats_have_the_figures(made: canzona_compile.OfflinePlan) -> None:
    for text in (made.to_text(), made.to_markdown()):
        assert all(words in text for words in ("alpha 0.5", "padding", "backward", "forward", "collectives"))
    found = json.loads(made.to_json())["forecast"]["zero1"]
    assert [phase["name"] for phase in found["phases"]] == ["backward", "step", "forward"]


def test_without_dp_nothing_travels() -> None:
    zero1 = planned("tp=2").forecast.zero1
    assert zero1 is not None
    assert (zero1.sent, zero1.phases[0].collectives, zero1.phases[0].exposed > 0) == (0, 0, True)  # copies remain


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        ("fsdp=4", {}, "a ZeRO-1 plan cannot have the mesh dim 'fsdp'"),
        ("dp=2,pp=2", {}, "the mesh dim 'pp'"),
        ("dp=4", {"strategy": "replicated"}, "every matrix has an owner"),
        ("dp=4", {"bucket_bytes": 0}, "bucket_bytes=0 is not a positive integer"),
        ("dp=4", {"tokens": -1}, "tokens=-1 is not a positive integer"),
        ("dp=4", {"gather": "later"}, "gather='later' is neither"),
    ],
)
def test_what_is_refused(mesh: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(CanzonaError) as caught:
        planned(mesh, **options)
    assert words in caught.value.problem


# -- the parameters of a model -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tables"), [("qwen3-1.7b", 1), ("qwen3-8b", 2)])
def test_a_tied_embedding_counts_once(name: str, tables: int) -> None:
    model = model_of(name)
    assert sum(w.shape[0] == 151936 for w in model.everything) == tables
    assert tuple(w for w in model.everything if not w.elementwise) == model.weights
    assert model.everything[0].lookup


def test_the_parameters_that_an_optimizer_holds_are_its_matrices() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    module = nn.Sequential(first, second)
    held = torch.optim.Muon([second.weight])
    model = model_of(module, "none", held, "zero1")
    assert [w.name for w in model.weights] == ["1.weight"]
    assert [w.name for w in model.everything] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    stranger = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))])
    assert [w.name for w in model_of(module, "none", stranger, "zero1").weights] == ["0.weight", "1.weight"]


def test_matrices_have_the_groups_of_their_optimizer() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    groups = [{"params": [second.weight]}, {"params": [first.weight], "nesterov": False}]
    made = canzona_compile.plan(
        nn.Sequential(first, second), mesh="dp=2", optimizer=torch.optim.Muon(groups), updates="zero1"
    )
    assert [(t.name, t.param_group) for t in made.step.tasks] == [("0.weight", 0), ("1.weight", 1)]
    assert len({t.template for t in made.step.tasks}) == 2


def test_elementwise_shapes() -> None:
    model = from_shapes(SHAPES, "mine", "shapes")
    assert [w.name for w in model.everything] == list(SHAPES)
    assert len(model.weights) == 6
    assert sum(w.elements for w in model.everything) == ELEMENTS
    with pytest.raises(CanzonaError, match="neither true nor false"):
        from_shapes({"a": {"shape": [8, 8], "elementwise": 1}}, "mine", "shapes")


# -- passes -------------------------------------------------------------------------------------------


def load(compute: float, moved: float) -> BucketLoad:
    return BucketLoad(compute, 2 * compute, 0.0, *[Transfer(moved, 0.0, 1)] * 2)


@pytest.mark.parametrize(("moved", "seconds"), [(0.5, 8.5), (5.0, 2 + 4 * 5.0)])
def test_the_last_of_short_transfers_is_exposed_and_long_ones_decide(moved: float, seconds: float) -> None:
    found = backward_pass([load(1.0, moved)] * 4, RANKS, H100)
    assert (found.seconds, found.exposed) == pytest.approx((seconds, seconds - 8))


def test_gathers_before_or_under_the_forward_pass() -> None:
    loads = [load(1.0, 0.25)] * 4
    before, under = (forward_pass(loads, RANKS, H100, overlapped) for overlapped in (False, True))
    assert (before.seconds, under.seconds) == pytest.approx((5.0, 4.25))
    assert before.compute == under.compute == pytest.approx(4.0)


def test_a_head_that_is_tied_comes_first_in_backward() -> None:
    assert backward_pass([load(1.0, 0.5)], RANKS, H100, 3.0).seconds == pytest.approx(3 + 2 + 0.5)
    assert forward_pass([load(1.0, 0.5)], RANKS, H100, True, 3.0).seconds == pytest.approx(0.5 + 1 + 3)


def test_on_processors_that_move_bytes_nothing_hides() -> None:
    cpu = named_hardware("cpu")
    found = backward_pass([load(1.0, 0.5)] * 3, (0, 1), cpu)
    assert found.seconds >= 6 + 0.5


@pytest.mark.parametrize("uniform", [True, False])
def test_what_the_collectives_of_a_bucket_send(uniform: bool) -> None:
    """A ring sends all but one shard; gloo's reduction is an all-reduce, which goes around twice."""
    slices = tuple(BucketSlice(f"w{i}", 0, 640, i, 0) for i in range(4))
    bucket = Bucket(0, torch.float32, slices, (640,) * 4, uniform, (0, 1, 2, 3))
    once = 4 * 640 * 3
    assert [own(bucket, H100).sent for own in (reduction, gathering)] == [once, once]
    cpu = named_hardware("cpu")
    assert [own(bucket, cpu).sent for own in (reduction, gathering)] == [2 * once, once]
    assert reduction(bucket, cpu).latency > gathering(bucket, cpu).latency > 0
    assert reduction(bucket, cpu).moved > 2 * once / cpu.node.bandwidth


def test_a_rank_alone_sends_nothing() -> None:
    bucket = Bucket(0, torch.float32, (BucketSlice("w", 0, 64, 0, 0),), (64,), True, (0,))
    assert reduction(bucket, named_hardware("cpu")) == gathering(bucket, named_hardware("cpu")) == Transfer(0.0, 0.0, 0)
