"""The trace of a forecast: what viewers are promised."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from canzona_compile.simulation.engine import COMPUTE, NETWORK, NODE, Simulation, Span
from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.trace import MOST_ARROWS, MOST_NAMES, TITLES, micro, trace, tracks
from tests.tools.forecasts import forecast

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "chrome_trace.schema.json").read_text(encoding="utf-8"))
Event = dict[str, Any]


def events(made: dict[str, Any], phase: str) -> list[Event]:
    return [e for e in made["traceEvents"] if e["ph"] == phase]


def checker() -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks the format")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


def with_simulation(spans: tuple[Span, ...]) -> Forecast:
    found = forecast()
    shown = tuple(sorted({s.rank for s in spans}))
    return replace(found, simulation=Simulation(1.0, found.simulation.ranks, shown, spans, ()))


@pytest.fixture(scope="module", params=[(4, 3), (2, 1), (40, 6)], ids=lambda p: f"{p[0]}-ranks")
def found(request: pytest.FixtureRequest) -> Forecast:
    ranks, groups = request.param
    return forecast(ranks, groups)


def test_it_is_of_the_format(found: Forecast) -> None:
    made = json.loads(json.dumps(trace(found), allow_nan=False))
    assert [error.message for error in checker().iter_errors(made)] == []
    assert made["otherData"]["fingerprint"] == found.fingerprint
    assumed = made["otherData"]["assumed_rates"]
    assert assumed == list(found.hardware.assumed)
    assert "network" in assumed
    assert not {"products", "node"} & set(assumed)


def test_the_schema_notices_what_is_wrong() -> None:
    for change in ({"dur": -1.0}, {"ts": None}, {"bp": "e"}, {"args": {}}, {"ph": "B"}, {"extra": 1}):
        made = trace(forecast())
        events(made, "X")[0].update(change)
        assert not checker().is_valid(json.loads(json.dumps(made))), change


def test_every_span_is_there_and_inside_the_step(found: Forecast) -> None:
    made = events(trace(found), "X")
    assert len(made) == len(found.simulation.spans)
    end = micro(found.simulation.seconds)
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= end + 1e-6 for e in made)
    assert max(e["ts"] + e["dur"] for e in made) == pytest.approx(end)
    assert {name for e in made for name in e["args"].get("matrices", ())} <= {t.name for t in found.tasks}


def test_no_thread_does_two_things_at_once(found: Forecast) -> None:
    lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events(trace(found), "X"):
        lanes[event["pid"], event["tid"]].append(event)
    for own in lanes.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-5 for a, b in pairwise(own))


def test_events_come_in_order(found: Forecast) -> None:
    made = trace(found)["traceEvents"]
    phases = [e["ph"] for e in made]
    first = next(i for i, phase in enumerate(phases) if phase != "M")
    assert "M" not in phases[first:]
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(made[first:]))


def test_processes_and_threads_have_names(found: Forecast) -> None:
    made = trace(found)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(made, "M") if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events(made, "X")} == names.keys()
    assert set(names.values()) == {TITLES[span.stream] for span in found.simulation.spans}
    ranks = {e["pid"]: e["args"]["name"] for e in events(made, "M") if e["name"] == "process_name"}
    assert ranks == {rank: f"rank {rank}" for rank in found.simulation.shown}
    order = {e["pid"]: e["args"]["sort_index"] for e in events(made, "M") if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == list(found.simulation.shown)


def test_arrows_pair_up_and_lie_on_spans(found: Forecast) -> None:
    made = trace(found)
    tails, heads = events(made, "s"), events(made, "f")
    assert Counter(e["id"] for e in tails) == Counter(e["id"] for e in heads)
    assert max(Counter(e["id"] for e in tails).values()) == 1
    places = {(e["pid"], e["tid"], e["ts"]): e for e in events(made, "X")}
    ends = {e["id"]: e for e in heads}
    for tail in tails:
        head = ends[tail["id"]]
        assert tail["pid"] != head["pid"]
        assert tail["ts"] <= head["ts"]
        here, there = (places[e["pid"], e["tid"], e["ts"]] for e in (tail, head))
        assert here["args"]["collective"] == there["args"]["collective"]
        assert (tail["name"], here["cat"]) == (here["name"], "communication")
    linked = len(found.simulation.shown) - 1
    assert len(tails) == 2 * len(found.micro_groups) * min(linked, MOST_ARROWS)


def test_an_arrow_begins_where_the_collective_does() -> None:
    spans = (
        Span(0, NODE, "start gather", 0, 0.3, 0.6, bytes=8, flow=5),
        Span(1, NODE, "start gather", 0, 0.1, 0.6, bytes=8, flow=5),
        Span(2, NETWORK, "start gather", 0, 0.2, 0.6, bytes=8, flow=5),
        Span(2, NODE, "start gather", 0, 0.3, 0.6, bytes=8, flow=5),
        Span(3, NODE, "start gather", 0, 0.3, 0.3, flow=5),  # nothing to draw to
    )
    made = trace(with_simulation(spans))
    assert [(e["pid"], e["ts"]) for e in events(made, "s")] == [(1, 1e5), (1, 1e5)]
    assert [(e["pid"], e["ts"]) for e in events(made, "f")] == [(2, 2e5), (0, 3e5)]


def test_counters_begin_and_end_with_nothing(found: Forecast) -> None:
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events(trace(found), "C"):
        by_rank[event["pid"]].append(event)
    assert by_rank.keys() == set(found.simulation.shown)
    for own in by_rank.values():
        assert [own[0]["args"]["bytes"], own[-1]["args"]["bytes"]] == [0, 0]
        assert own[-1]["ts"] == micro(found.simulation.seconds)
    peak = max(e["args"]["bytes"] for own in by_rank.values() for e in own)
    assert peak == found.memory.buffers


def test_overlapping_spans_get_rows_of_their_own() -> None:
    times = [(0.0, 0.4), (0.1, 0.2), (0.2, 0.3), (0.4, 0.5), (0.1, 0.15)]
    spans = tuple(Span(0, NODE, "start gather", i, a, b, flow=i) for i, (a, b) in enumerate(times))
    assert tracks(spans) == [0, 2, 1, 0, 1]
    made = trace(with_simulation(spans))
    assert len({e["tid"] for e in events(made, "X")}) == 3
    assert sum(e["name"] == "thread_name" for e in events(made, "M")) == 3


def test_long_lists_of_matrices_are_cut() -> None:
    names = tuple(f"w{i}" for i in range(MOST_NAMES + 7))
    made = trace(with_simulation((Span(0, COMPUTE, "compute", 0, 0.0, 1.0, names),)))
    args = events(made, "X")[0]["args"]
    assert (len(args["matrices"]), args["more matrices"]) == (MOST_NAMES, 7)


def test_nothing_at_all() -> None:
    empty = replace(forecast(), simulation=Simulation(0.0, (), (), (), ()))
    made = trace(empty)
    assert made["traceEvents"] == []
    assert checker().is_valid(made)
