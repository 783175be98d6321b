"""The report: exact figures, a stable schema, and a rendering for any terminal."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.layout import Grid, Shape
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Exchange, Form, MicroGroup, Step
from canzona_compile.machine.hardware import Machine, assumed_hardware, hardware_of
from canzona_compile.passes import lowering_passes, planning_passes
from canzona_compile.report.build import Facts, LocalTask, Report, headline, make_report
from canzona_compile.report.html import html
from canzona_compile.report.markdown import markdown
from canzona_compile.report.schema import ProfileReport
from canzona_compile.report.units import format_seconds
from canzona_compile.session.measuring import Measurement, RankTimes
from canzona_compile.simulation.engine import Span
from canzona_compile.simulation.simulate import simulate
from tests.conftest import Golden
from tests.harness.marks import crossed
from tests.harness.samples import CPU, grid_of, muon_step, toy_step

GPU = Machine("cuda", "nccl", 1)
FACTS = Facts(
    world_size=4,
    captures=2,
    local=(LocalTask("norm.weight", (32,), "elementwise"),),
    fallbacks={"b": "reads a tensor on the host"},
    suggestions=("pass replicate=",),
    variants=2,
    rank_programs=1,
)


def scheduled(
    grid: Grid, *shapes: Shape, strategy: Any = "owner", groups: int | None = None, machine: Machine = CPU
) -> Step:
    """Captured Muon, lowered by the passes."""
    options = Options(strategy=strategy, micro_groups=groups)
    step = replace(muon_step(grid, *shapes), machine=machine)
    return run(step, [*planning_passes(options), *lowering_passes(options)])[0]


def report_of(grid: Grid, *shapes: Shape, strategy: str = "owner") -> Report:
    step = scheduled(grid, *shapes, strategy=strategy)
    return make_report(step, Facts(world_size=grid.size))


def sent(exchange: Exchange | None, grid: Grid) -> int:
    """Bytes between different ranks, by asking for every block."""
    ranks = [(r, s) for r in range(grid.replicas) for s in range(grid.shards)]
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    return sum(exchange.block(a, b)[1] for a, b in pairs) if exchange else 0


def grid_behind(step: Step, group: MicroGroup) -> Grid:
    return step.task(group.tasks[0]).layout.grid


# -- Figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_even_shards_cost_four_bytes_per_element_that_moves(ranks: int) -> None:
    report = report_of(grid_of(1, ranks), *[(48, 64), (24, 8)] * 3)
    assert report.wire_bytes_per_element == 4 * (ranks - 1) / ranks
    assert report.collectives_per_step == 2 * len(report.micro_groups)


@pytest.mark.parametrize(
    ("grid", "strategy", "sent", "collectives"),
    [
        ((3, 1), "owner", 2 * (3 - 1), 1),  # replicas exchange fragments of the update
        ((2, 4), "owner", 4 * 3 / 4 + 2 * (2 - 1), 3),
        ((2, 4), "replicated", 2 * (4 - 1) * 2, 2),  # a gather in every replica, which meet
    ],
)
def test_bytes_per_element_of_replicas(grid: tuple[int, int], strategy: str, sent: float, collectives: int) -> None:
    report = report_of(grid_of(*grid), (64, 32), (64, 32), strategy=strategy)
    assert (report.wire_bytes_per_element, report.collectives_per_step) == (sent, collectives)
    if strategy == "replicated":
        assert (report.imbalance, len(report.loads), {t.owner for t in report.tasks}) == (1, 8, {None})


@pytest.mark.parametrize(("case", "shards", "replicas"), crossed(["owner", "replicated", "toy"], [1, 2, 4], [2, 3, 1]))
def test_bytes_are_those_of_all_blocks(replicas: int, shards: int, case: str) -> None:
    if case == "toy":  # its wires have two element sizes, so that blocks are padded
        step = toy_step(Form.SCHEDULED, replicas, max(2, shards))
    else:
        shapes = ((7, 5), (64, 32), (3, 9), (64, 32))
        step = scheduled(grid_of(replicas, shards), *shapes, strategy=case)
    report = make_report(step, FACTS)
    for group, figures in zip(step.micro_groups, report.micro_groups, strict=True):
        grid = grid_behind(step, group)
        assert figures.gather_bytes == sent(group.gather, grid)
        assert figures.scatter_bytes == sent(group.scatter, grid)
        assert figures.exchange_bytes == sent(group.exchange, grid)
        meets = case == "replicated" and replicas > 1 and group.index == 0
        assert figures.collectives == len(group.exchanges) + meets


def test_imbalance_is_the_busiest_rank_over_the_mean() -> None:
    report = report_of(grid_of(1, 2), (64, 64), (64, 64), (64, 64))
    assert report.imbalance == pytest.approx(2 / 1.5)
    assert [load.tasks for load in report.loads] == [2, 1]
    assert report_of(grid_of(1, 4), (64, 64)).imbalance == 4


def test_owners_are_global_ranks() -> None:
    report = report_of(Grid(((5, 7), (6, 3))), (64, 32), (64, 32), (64, 32), (64, 32))
    assert sorted(t.owner or 0 for t in report.tasks) == [3, 5, 6, 7]
    assert [load.rank for load in report.loads] == [3, 5, 6, 7]


def test_a_single_process_sends_nothing() -> None:
    report = report_of(grid_of(1, 1), (64, 32))
    assert (report.collectives_per_step, report.wire_bytes_per_element) == (0, 0)
    assert (report.imbalance, report.loads) == (1, ())
    assert report.predicted_seconds > 0
    assert report.tasks[0].owner == 0
    assert not report.templates[0].wires


def test_only_what_travels_is_a_wire() -> None:
    def ways(report: Report) -> set[str]:
        return {w.direction for t in report.templates for w in t.wires}

    assert ways(report_of(grid_of(1, 4), (64, 32))) == {"gather", "scatter"}
    assert ways(report_of(grid_of(4, 1), (64, 32))) == {"scatter"}
    assert ways(report_of(grid_of(1, 4), (64, 32), strategy="replicated")) == {"gather"}


def test_a_step_without_a_schedule_has_no_report() -> None:
    with pytest.raises(InvalidStep, match="no schedule"):
        make_report(toy_step(Form.BATCHED), FACTS)


# -- Predicted time ----------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "cuda"])
def test_the_predicted_step_is_the_simulated_one(machine: Machine) -> None:
    step = scheduled(grid_of(2, 2), *[(64, 64)] * 12, groups=3, machine=machine)
    report, simulation = make_report(step, FACTS), simulate(step, hardware_of(machine))
    assert report.predicted_seconds == simulation.seconds
    busiest = max(simulation.ranks, key=lambda one: one.compute).rank
    assert report.schedule == tuple(span for span in simulation.spans if span.rank == busiest)
    assert f"simulated: when rank {busiest}, which computes most, is busy" in report.to_text()


def test_there_is_one_prediction() -> None:
    step = scheduled(grid_of(1, 2), (64, 32), (48, 64))
    report = make_report(step, FACTS)
    predicted = format_seconds(report.predicted_seconds or 0.0)
    assert f"predicted step {predicted}, simulated with assumed" in report.to_text()
    rates = assumed_hardware("cpu")
    known = replace(rates, measured=rates.assumed)
    text = make_report(replace(step, machine=Machine("cpu", "gloo", 1, known)), FACTS).to_text()
    assert "simulated with measured rates" in text
    assert "assumed" not in text
    text = make_report(replace(step, machine=Machine("cpu", "gloo", 1, known)), measured_once(step)).to_text()
    assert text.count(", simulated ") == 1
    assert "worst 3 s" in text
    assert "predicted step" not in text


def measured_once(step: Step) -> Facts:
    """The facts of a run that measured one step of two ranks."""
    times = {rank: RankTimes((1.0,), (0.0,), ({"compute": 1.0},)) for rank in range(2)}
    profile = ProfileReport((1.0, 3.0), (2.0, 2.0), staggered=False)
    return replace(FACTS, measurement=Measurement("cpu", times, (step,), ()), profile=profile)


def test_no_prediction_stands_beside_a_measured_step_whose_rates_are_assumed() -> None:
    step = scheduled(grid_of(1, 2), (64, 32), (48, 64))
    report = make_report(step, measured_once(step))
    pages = [report.to_text(), markdown(report.page()), html(report.page())]
    assert headline(report).endswith("; measured step 1 s")
    for text in pages:
        assert not re.search("predicted|simulated|assumed|worst 3", text)
        assert " ".join(text.split()).count("canzona-compile calibrate -o mine.json") == 1
    found = json.loads(report.to_json())
    assert found["predicted_seconds"] is found["measured"]["predicted_seconds"] is found["measured"]["error"] is None
    assert found["schedule"] == [] == [one for one in found["measured"]["phases"] if one["predicted"] is not None]


# -- JSON and the log line ---------------------------------------------------------------------


def test_json_has_the_fields_of_schema_1() -> None:
    report = make_report(toy_step(Form.SCHEDULED), FACTS)
    found = json.loads(report.to_json())
    assert found == report.to_dict()
    assert found["schema"] == 1
    names = (
        "schema world_size optimizer machine numerics captures variants rank_programs capacity memory execution depth"
    )
    names += (
        " collectives_per_step wire_bytes_per_element imbalance predicted_seconds templates micro_groups tasks loads"
    )
    names += " local fallbacks bits suggestions schedule profile data_parallel measured state skipped_steps"
    assert set(found) == set(names.split())
    parts = {
        "tasks": "name shape template layout owner micro_group strategy flops reason",
        "micro_groups": "index grid tasks gather_bytes scatter_bytes exchange_bytes makespan_flops collectives",
        "templates": "name kind shape dtype tasks formula flops wires resident interpreted",
    }
    assert {name: set(found[name][0]) for name in parts} == {name: set(own.split()) for name, own in parts.items()}
    assert set(found["schedule"][0]) == {field.name for field in fields(Span)}
    assert found["templates"][0]["formula"] == "4*m*n**2"
    assert found["templates"][0]["resident"] == ["q"]
    assert found["local"] == [{"name": "norm.weight", "shape": [32], "why": "elementwise"}]
    assert found["fallbacks"] == {"b": "reads a tensor on the host"}
    assert [(t["name"], t["owner"], t["strategy"]) for t in found["tasks"]] == [
        ("a", 0, "owner"),
        ("b", 3, "owner"),
        ("c", 0, "local"),
    ]


def test_headlines() -> None:
    shapes = [(64, 64)] * 12
    assert headline(report_of(grid_of(1, 4), *shapes)) == (
        "canzona: 12 matrices -> 4 owners in 1 micro-group, 2 collectives, "
        "3.00 bytes sent per element, the busiest rank computes 1.00x the mean, 0 eager"
    )
    assert headline(make_report(toy_step(Form.SCHEDULED), FACTS)).startswith(
        "canzona: 3 matrices -> 2 owners, 1 local in 2 micro-groups, 3 collectives, "
    )
    assert headline(report_of(grid_of(1, 3), (64, 64), strategy="replicated")).startswith(
        "canzona: 1 matrix, on every rank in 1 micro-group, 1 collective, 4.00 bytes sent"
    )
    alone = report_of(grid_of(1, 1), (64, 64))
    assert headline(alone) == "canzona: 1 matrix, all local, no collectives, 0 eager"
    assert repr(alone) == f"<{headline(alone)}>"


def test_a_step_without_matrices() -> None:
    step = replace(scheduled(grid_of(1, 4), (64, 64)), tasks=(), micro_groups=(), schedule=(), buffers=())
    report = make_report(step, FACTS)
    assert headline(report) == ("canzona: no matrices to distribute, 1 parameter without communication, 1 eager")
    assert "norm.weight" in report.to_text()
    assert report.to_dict()["imbalance"] == 1


# -- Rendering ---------------------------------------------------------------------------------


def test_rendering(golden: Golden) -> None:
    golden(make_report(toy_step(Form.SCHEDULED), FACTS).to_text(80), "report.txt")


def test_many_ranks_and_matrices_are_summed_up() -> None:
    few, many = (make_report(scheduled(grid_of(1, n), *[(64, 64)] * 100), FACTS).to_text() for n in (2, 40))
    assert (few.count("and 31 more"), many.count("and 60 more")) == (2, 1)
    assert max(len(text.splitlines()) for text in (few, many)) < 105
