"""The report: exact figures, a stable schema, and a rendering for any terminal."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.layout import Grid, Shape
from canzona_compile.ir.step import Exchange, Form, MicroGroup, Step
from canzona_compile.machine.hardware import Machine, assumed_hardware, hardware_of
from canzona_compile.passes import (
    AssignOwners,
    Batching,
    Canonicalize,
    FormMicroGroups,
    FuseCollectives,
    Place,
    Schedule,
)
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
from tests.harness.samples import grid_of, muon_step, toy_step

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
    grid: Grid,
    *shapes: Shape,
    strategy: str = "owner",
    groups: int | None = None,
    machine: Machine | None = None,
) -> Step:
    """Captured Muon, lowered by the passes."""
    step = muon_step(grid, *shapes)
    step = replace(step, machine=machine or step.machine)
    for lower in (
        Canonicalize(),
        Place(),
        AssignOwners(strategy),
        FormMicroGroups(2**30, groups),
        FuseCollectives(),
        Batching(),
        Schedule(),
    ):
        step = lower(step)
    return step


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


@pytest.mark.parametrize(("shape", "ranks"), crossed([(10, 7), (1, 5), (5, 33)], [2, 3, 4]))
def test_uneven_shards_cost_the_same_when_every_rank_owns_as_much(ranks: int, shape: Shape) -> None:
    report = report_of(grid_of(1, ranks), *[shape] * ranks)
    assert {t.owner for t in report.tasks} == set(range(ranks))
    assert report.wire_bytes_per_element == 4 * (ranks - 1) / ranks


def test_an_owner_keeps_its_own_fragment() -> None:
    report = report_of(grid_of(1, 4), (10, 7))  # rows 3, 3, 3, 1; rank 0 owns it
    assert report.wire_bytes_per_element == 4 * (10 - 3) / 10


def test_replicas_exchange_fragments_of_the_update() -> None:
    assert report_of(grid_of(3, 1), (64, 32)).wire_bytes_per_element == 2 * (3 - 1)
    hybrid = report_of(grid_of(2, 4), (64, 32), (64, 32))
    assert hybrid.wire_bytes_per_element == 4 * 3 / 4 + 2 * (2 - 1)
    assert hybrid.collectives_per_step == 3


def test_computing_everywhere_gathers_in_every_replica() -> None:
    report = report_of(grid_of(2, 4), (64, 32), strategy="replicated")
    assert report.wire_bytes_per_element == 2 * (4 - 1) * 2
    assert report.imbalance == 1
    assert [t.owner for t in report.tasks] == [None]
    assert len(report.loads) == 8


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


@pytest.mark.parametrize("machine", [Machine("cpu", "gloo", 1), GPU], ids=["cpu", "cuda"])
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
    assert set(found) == {
        *("schema", "world_size", "optimizer", "machine", "numerics", "captures", "variants"),
        *(
            "rank_programs",
            "capacity",
            "memory",
            "execution",
            "depth",
            "collectives_per_step",
            "wire_bytes_per_element",
        ),
        *("imbalance", "predicted_seconds", "templates", "micro_groups", "tasks", "loads"),
        *("local", "fallbacks", "suggestions", "schedule", "profile", "data_parallel", "measured"),
    }
    assert set(found["tasks"][0]) == {
        *("name", "shape", "template", "layout", "owner", "micro_group", "strategy"),
        *("flops", "reason"),
    }
    assert set(found["micro_groups"][0]) == {
        *("index", "grid", "tasks", "gather_bytes", "scatter_bytes", "exchange_bytes"),
        *("makespan_flops", "collectives"),
    }
    assert set(found["templates"][0]) == {
        *("name", "kind", "shape", "dtype", "tasks", "formula", "flops", "wires", "resident"),
        "interpreted",
    }
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


def test_everything_is_mentioned() -> None:
    report = make_report(scheduled(grid_of(1, 4), *[(64, 64)] * 6, (65, 33)), FACTS)
    text = report.to_text()
    for task in report.tasks:
        assert task.name in text
    for rank in range(4):
        assert len(re.findall(rf"^  rank {rank} ", text, re.MULTILINE)) == 2  # a bar and a heading
    for word in (
        "10 m^3 + 20 m^2 n",
        "bf16 8 KiB",
        "the planner lpt-swap chose the owner",
        "reads a tensor",
        "replicate=",
    ):
        assert word in text
    assert str(report) == text


@pytest.mark.parametrize("width", [20, 80, 300])
@pytest.mark.parametrize("ranks", [3, 40])
def test_no_line_is_wider_than_the_console(width: int, ranks: int) -> None:
    step = scheduled(grid_of(1, ranks), *[(64, 64)] * 50, groups=5, machine=GPU)
    lines = make_report(step, FACTS).to_text(width).splitlines()
    assert max(map(len, lines)) <= min(width, 120)


def test_many_ranks_and_matrices_are_summed_up() -> None:
    report = make_report(scheduled(grid_of(1, 40), *[(64, 64)] * 100), FACTS)
    text = report.to_text()
    assert "40 ranks" in text or "20 ranks" in text
    assert "and 60 more" in text
    few = make_report(scheduled(grid_of(1, 2), *[(64, 64)] * 100), FACTS).to_text()
    assert few.count("and 31 more") == 2
    assert len(text.splitlines()) < 105
    assert len(few.splitlines()) < 100


def test_long_names_lose_what_they_share() -> None:
    step = scheduled(grid_of(1, 2), (64, 64), (64, 64))
    parts = {"layers.0.weight": "up", "layers.1.weight": "down"}
    names = {name: f"model.decoder.{'x' * 30}.1.{part}.weight" for name, part in parts.items()}
    report = make_report(step, FACTS)
    tasks = tuple(replace(t, name=names[t.name]) for t in report.tasks)
    text = replace(report, tasks=tasks).to_text()
    assert re.search(r"^  rank 1  down +64x64", text, re.MULTILINE)
    assert f"names in full: model.decoder.{'x' * 30}.1.….weight" in text
    assert names["layers.1.weight"] in replace(report, tasks=tasks).to_text(120)


def test_long_class_names_are_whole_in_the_table_of_costs() -> None:
    name = "DistributedShampooWithAVeryLongNameOfItsOwn_64x32_f32"
    report = make_report(scheduled(grid_of(1, 4), (64, 32)), FACTS)
    text = replace(report, templates=(replace(report.templates[0], name=name),)).to_text(80)
    rows = text[text.index("  a  Distributed") + 5 : text.index("  a = ")]
    assert "".join(line.split()[0] for line in rows.splitlines()) == name
