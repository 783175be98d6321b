"""`profile`: what it prints, and the trace that it writes."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canzona_compile.__main__ import main
from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.runtime.step_clock import ActSpan, MeasuredStep
from canzona_compile.simulation.engine import COMPUTE, NODE
from canzona_compile.tools.profile import RankProfile, StepProfile, profile, real_trace, spans_of
from tests.tools.test_trace import checker, events
from tests.tools.user_builds import muon, square_muon

RANKS = 3  # of which one owns nothing
SPANS = {"look", "agree", "prepare", "begin gather", "wait gather", "compute", "begin scatter", "wait scatter", "apply"}


@pytest.mark.ranks
@pytest.mark.usefixtures("forked")
def test_real_steps_of_ranks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found = profile(square_muon, ranks=RANKS, steps=2, options={"strategy": "owner"}, trace=trace)
    check_report(found)
    check_trace(json.loads(trace.read_text()), found)


def check_report(found: StepProfile) -> None:
    measured = found.report.measured
    assert measured is not None
    assert (measured.steps, measured.ranks) == (2, RANKS)
    assert sum(phase.mean for phase in measured.phases) == pytest.approx(measured.seconds)
    assert "measured step" in found.report.to_text()


def check_trace(made: dict[str, Any], found: StepProfile) -> None:
    assert [error.message for error in checker().iter_errors(made)] == []
    assert made["otherData"]["fingerprint"] == found.ranks[0].fingerprint
    names: dict[tuple[int, str], set[str]] = defaultdict(set)
    collectives: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events(made, "X"):
        names[event["pid"], event["cat"]].add(event["name"].rstrip(" 0123456789"))
        if "collective" in event["args"]:
            collectives[event["args"]["collective"]].append(event)
    for rank in range(RANKS):
        owns = any(task.owner == rank for task in found.report.tasks)
        assert names[rank, "computation"] >= SPANS - (set() if owns else {"compute"})
        assert names[rank, "communication"] == {"gather", "scatter"}
    assert len(collectives) == 2 * 2, "a gather and a scatter per step"
    for own in collectives.values():
        assert sorted(event["pid"] for event in own) == list(range(RANKS))
        # Ranks read one clock: no rank is through with a collective before the last one has begun it.
        assert max(e["ts"] for e in own) <= min(e["ts"] + e["dur"] for e in own)
    assert len(events(made, "s")) == len(collectives) * (RANKS - 1)


@pytest.mark.full
@pytest.mark.ranks
def test_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Steps are predicted with rates that were measured only, here as if they had been."""
    rates = tmp_path / "rates.json"
    known = named_hardware("cpu")
    rates.write_text(replace(known, measured=known.assumed).to_json())
    line = ["profile", "tests.tools.user_builds:muon", "--ranks", "2", "--steps", "2", "--quiet"]
    assert main(line) == 0
    out, err = capfd.readouterr()
    assert "── Measured ── 2 steps on 2 ranks" in out
    assert "measured step" not in err
    assert main([*line[:-1], "--json", "--hardware", str(rates)]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["measured"]["assumed"] == []
    assert "measured step" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps=0 measures nothing"),
        ({"layout": "zero1", "options": {"strategy": "owner"}}, "zero1 has no option strategy"),
        ({"trace": "/nowhere/at/all.json"}, "there is no such folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CanzonaError, match=said):
        profile(muon, **options)


# -- the trace ---------------------------------------------------------------------------------------


def test_a_collective_is_a_span_of_each_rank() -> None:
    transfer = {(0, "gather"): ((0, 1), 8)}
    spans = (
        ActSpan("start gather", 0, "compute", 5.0, 6.0),
        ActSpan("compute", 1, "compute", 6.0, 7.0),
        ActSpan("wait gather", 0, "compute", 7.0, 9.0),
    )

    def of(rank: int) -> RankProfile:
        step = MeasuredStep(4.0, spans)
        names = {0: ("a",), 1: ("b",)}
        return RankProfile(rank, (step,), (transfer,), (names,), None, "x")

    flows: dict[tuple[Any, ...], int] = {}
    first, second = (list(spans_of(of(rank), flows)) for rank in (0, 1))
    assert [(s.stream, s.act, s.start, s.end) for s in first] == [
        (COMPUTE, "begin gather", 5.0, 6.0),
        (COMPUTE, "compute", 6.0, 7.0),
        (COMPUTE, "wait gather", 7.0, 9.0),
        (NODE, "start gather", 5.0, 9.0),
    ]
    assert [(s.start, s.flow, s.bytes) for s in (first[-1], second[-1])] == [(5.0, 0, 8), (5.0, 0, 8)]
    assert first[1].tasks == ("b",)
    made = real_trace([of(0), of(1)], "m", "Muon", named_hardware("cpu"))
    assert checker().is_valid(made)
    assert min(e["ts"] for e in events(made, "X")) == 0
