"""Simulated steps: bytes as the exchanges carry them, buffers as programs allocate them, times as rates imply."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from canzona_compile.analysis.roofline import graph_time, placed_time
from canzona_compile.errors import InvalidStep
from canzona_compile.ir.layout import Grid, Shape
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Exchange, Form, Phase, Step, Strategy
from canzona_compile.machine.hardware import Curve, Hardware, named_hardware
from canzona_compile.passes import Emit, lowering_passes, planning_passes
from canzona_compile.report.measured import predict
from canzona_compile.simulation.simulate import simulate, teams
from canzona_compile.simulation.traffic import Boxes, GroupTraffic, traffic
from tests.harness.marks import also, crossed
from tests.harness.samples import grid_of, muon_step, toy_step

EVEN = ((64, 32), (32, 64), (64, 64), (64, 32), (128, 64), (32, 32))
UNEVEN = ((33, 32), (17, 48), (5, 64), (33, 32), (3, 16))
GRIDS = [(1, 2), (1, 3), (1, 4), (3, 1), (2, 2), (2, 3), (4, 2)]
SETTINGS = crossed(GRIDS, [EVEN, UNEVEN], ["owner", "replicated"])
NAMES = {EVEN: "even", UNEVEN: "uneven"}


def label(value: Any) -> str:
    return value if isinstance(value, str) else NAMES.get(value) or "x".join(map(str, value))


each_setting = pytest.mark.parametrize(("grid", "shapes", "strategy"), SETTINGS, ids=label)


@cache
def scheduled(
    grid: tuple[int, int], shapes: tuple[Shape, ...] = EVEN, strategy: str = "owner", groups: int = 2, depth: int = 2
) -> Step:
    """Captured Muon, lowered by the passes."""
    options = Options(strategy=strategy, micro_groups=groups, depth=depth)  # type: ignore[arg-type]
    return run(muon_step(grid_of(*grid), *shapes), [*planning_passes(options), *lowering_passes(options)])[0]


def nodes_of(ranks: int, name: str = "h100") -> Hardware:
    return replace(named_hardware(name), ranks_per_node=ranks, processors=ranks)


def traffics(step: Step, hardware: Hardware) -> Iterator[tuple[GroupTraffic, dict[Phase, Exchange]]]:
    times = {p.name: placed_time(p, hardware) for p in step.placed}
    boxes = Boxes()
    for group in step.micro_groups:
        yield traffic(step, group, times, hardware, boxes), {e.phase: e for e in group.exchanges}


# -- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_node", [*also([1]), 2, *also([8])])
@each_setting
def test_bytes_are_those_of_all_blocks(
    grid: tuple[int, int], shapes: tuple[Shape, ...], strategy: str, per_node: int
) -> None:
    step = scheduled(grid, shapes, strategy)
    for own, exchanges in traffics(step, nodes_of(per_node)):
        assert own.ends.keys() == exchanges.keys()
        for phase, exchange in exchanges.items():
            expected = counted(exchange, own.grid, phase, per_node)
            ends = own.ends[phase]
            for name, values in expected.items():
                np.testing.assert_array_equal(getattr(ends, name), values, err_msg=f"{phase} {name}")


def counted(exchange: Exchange, grid: Grid, phase: Phase, per_node: int) -> dict[str, np.ndarray]:
    """The fields of `Ends`, block by block."""
    found: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((grid.replicas, grid.shards)))
    for members in teams(grid, phase):
        for source in members:
            for target in members:
                _, size = exchange.block(source, target)
                found["send_buffer"][source] += size
                found["receive_buffer"][target] += size
                one, other = grid.ranks[source[0]][source[1]], grid.ranks[target[0]][target[1]]
                link = "node" if one // per_node == other // per_node else "network"
                found[f"sent_{link}"][source] += size * (one != other)
                found[f"received_{link}"][target] += size * (one != other)
    return found


@each_setting
def test_buffers_are_those_of_the_programs(grid: tuple[int, int], shapes: tuple[Shape, ...], strategy: str) -> None:
    step = scheduled(grid, shapes, strategy)
    peaks = [rank.peak for rank in simulate(step, nodes_of(2)).ranks]
    programs = [sum(Emit(rank)(step).program.slots) for rank in range(len(peaks))]
    if shapes is EVEN:  # whole values of other sizes are padded, so that each begins at a multiple of 64 bytes
        assert peaks == programs
    slack = 64 * len(shapes)
    assert all(peak <= program <= peak + slack for peak, program in zip(peaks, programs, strict=True))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("grid", [(1, 4), (2, 2)])
def test_live_bytes_stay_within_the_slots(grid: tuple[int, int], depth: int) -> None:
    step = scheduled(grid, groups=3, depth=depth)
    found = simulate(step, nodes_of(2))
    for rank in found.ranks:
        own = [moment for moment in found.memory if moment.rank == rank.rank]
        assert own
        assert [m.at for m in own] == sorted(m.at for m in own)
        assert 0 < max(m.bytes for m in own) <= rank.peak
        assert own[-1].bytes == 0


# -- times -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h100", "cpu"])
@pytest.mark.parametrize("grid", [(1, 4), (2, 2), (4, 1)])
def test_every_rank_accounts_for_the_whole_step(grid: tuple[int, int], name: str) -> None:
    step = scheduled(grid)
    found = simulate(step, named_hardware(name))
    assert len(found.ranks) == 4
    for rank in found.ranks:
        assert rank.compute + rank.exposed + rank.bubble == pytest.approx(found.seconds)
        assert rank.finish <= found.seconds
    assert max(rank.finish for rank in found.ranks) == found.seconds


def test_every_matrix_is_computed_by_its_owner() -> None:
    step = scheduled((2, 2))
    seen: dict[str, set[int]] = defaultdict(set)
    for span in simulate(step, nodes_of(4)).spans:
        for task in span.tasks:
            seen[task].add(span.rank)
    for task in step.tasks:
        assert task.owner is not None
        assert seen[task.name] == {task.layout.grid.ranks[task.owner[0]][task.owner[1]]}
    everywhere = scheduled((2, 2), strategy="replicated")
    assert {t.strategy for t in everywhere.tasks} == {Strategy.REPLICATED}
    for span in simulate(everywhere, nodes_of(4)).spans:
        assert span.act != "compute" or span.tasks


@pytest.mark.full
@pytest.mark.parametrize("grid", [(1, 4), (1, 8), (2, 4)])
def test_a_pipeline_is_no_slower_where_links_work_beside_processors(grid: tuple[int, int]) -> None:
    shapes = ((1024, 1024), (1024, 512), (512, 1024), (1024, 1024)) * 4
    one, two = (simulate(scheduled(grid, shapes, groups=4, depth=d), named_hardware("h100")) for d in (1, 2))
    assert two.seconds <= one.seconds * (1 + 1e-9)
    assert two.seconds < one.seconds  # something of so much communication is hidden
    assert sum(r.exposed for r in two.ranks) < sum(r.exposed for r in one.ranks)


def test_faster_machines_take_no_longer() -> None:
    step, slow = scheduled((1, 4)), named_hardware("h100")
    base = simulate(step, slow).seconds
    fast = {
        "bandwidth": slow.bandwidth * 2,
        "launch": slow.launch / 2,
        "node": replace(slow.node, latency=slow.node.latency / 2),
        "products": tuple((d, Curve(tuple((s, 2 * r) for s, r in c.points))) for d, c in slow.products),
    }
    for name, value in fast.items():
        assert simulate(step, replace(slow, **{name: value})).seconds <= base, name


def test_a_step_takes_as_long_as_the_host_has_books_to_keep() -> None:
    step, gpu = scheduled((1, 4)), named_hardware("h100")
    free, matrices = simulate(step, replace(gpu, host=0.0)), len(step.tasks)
    hidden, bound = (simulate(step, replace(gpu, host=s / matrices)) for s in (free.seconds / 2, 2 * free.seconds))
    assert hidden == free
    assert bound == replace(free, seconds=pytest.approx(2 * free.seconds))
    assert predict(step, replace(gpu, host=1e-3)).phases["look"] == pytest.approx(1e-3 * matrices)
    before, after = (simulate(step, replace(named_hardware("cpu"), host=s)).seconds for s in (0.0, 1e-3))
    assert after >= before + 1e-3 * matrices


def test_ranks_that_share_processors_take_longer() -> None:
    step, roomy = scheduled((1, 4)), replace(named_hardware("cpu"), processors=4)
    found = [simulate(step, replace(roomy, processors=n)).seconds for n in (4, 2, 1)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_a_step_without_a_schedule_is_refused() -> None:
    with pytest.raises(InvalidStep, match="has no schedule"):
        simulate(toy_step(Form.BATCHED), named_hardware("h100"))


def test_of_many_ranks_some_are_shown() -> None:
    step = scheduled((1, 24), ((64, 32),) * 8)
    found = simulate(step, named_hardware("h100"), shown=(5,))
    assert len(found.ranks) == 24
    assert 5 in found.shown
    assert len(found.shown) <= 17
    assert {s.rank for s in found.spans} <= set(found.shown)


# -- graphs ------------------------------------------------------------------------------------


def test_the_time_of_a_graph() -> None:
    """Muon on 64 x 32: five rounds of three products, two of which have an addend."""
    placed = scheduled((1, 2), ((64, 32),), groups=1).placed[0]
    flat = Curve(((64.0, 1e12),))
    hardware = replace(
        named_hardware("cpu"),
        products=(("bfloat16", flat),),
        product_calls=(("bfloat16", 1e-5),),
        transposed=flat,
        bandwidth=1e30,
        launch=1e-6,
    )
    found = graph_time(placed.compute, hardware)
    m, n = 32, 64
    assert found.seconds == pytest.approx(5 * (2 * m * m * n * 2 + 2 * m**3) / 1e12)
    assert found.products == (("bfloat16", 15),)
    assert found.product_calls(hardware) == pytest.approx(15e-5)
    assert found.total(hardware) == pytest.approx(found.seconds + 15e-5 + found.calls * 1e-6)
    on_gpu = graph_time(placed.compute, replace(hardware, device="cuda"))
    assert on_gpu.calls < found.calls  # views cost nothing there


def test_memory_bounds_elementwise_work() -> None:
    placed = scheduled((1, 2), ((64, 32),), groups=1).placed[0]
    hardware = named_hardware("cpu")
    slow, fast = (graph_time(placed.prepare, replace(hardware, bandwidth=rate)).seconds for rate in (1e9, 2e9))
    assert slow == pytest.approx(2 * fast)
    elements = 64 * 32
    lerps, cast = 2 * 3 * 4 * elements, 6 * elements
    assert slow == pytest.approx((lerps + cast) / 1e9)


def test_what_crosses() -> None:
    placed = scheduled((1, 2), ((64, 32),), groups=1).placed[0]
    found = placed_time(placed, named_hardware("cpu"))
    assert (found.gathered, found.scattered) == (2 * 64 * 32, 2 * 64 * 32)
    assert found.packed == 0  # the cast to 16 bits writes where the message is
    assert found.kept == 4 * 64 * 32  # momentum
    assert found.turned > 0  # a tall matrix is iterated on as its transpose
    assert placed_time(scheduled((1, 2), ((32, 64),), groups=1).placed[0], named_hardware("cpu")).turned == 0
