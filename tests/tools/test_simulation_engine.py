"""The discrete-event engine: small cases worked out by hand, and bounds that every run keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_compile.machine.hardware import Hardware, named_hardware
from canzona_compile.simulation.engine import (
    COMPUTE,
    NETWORK,
    NODE,
    Collective,
    CollectiveShare,
    ComputeOp,
    Engine,
    SimulatedOp,
    Start,
    Wait,
)
from tests.harness.untimed import untimed


def work(seconds: float) -> ComputeOp:
    return ComputeOp("compute", 0, seconds)


def among(*members: int, node: float = 0.0, network: float = 0.0, latency: float = 0.0) -> Collective:
    """A collective that asks the same of all members."""
    return Collective("gather", 0, members, tuple(CollectiveShare(node, network, 8) for _ in members), latency)


def play(
    operations: Sequence[Sequence[SimulatedOp]],
    collectives: Sequence[Collective] = (),
    processors: int = 8,
    ranks_per_node: int = 8,
    alone: bool = False,
) -> Engine:
    return Engine(
        operations, collectives, machine(processors, ranks_per_node, alone), frozenset(range(len(operations)))
    ).run()


def machine(processors: int = 8, ranks_per_node: int = 8, alone: bool = False) -> Hardware:
    own = {"processors": processors, "ranks_per_node": ranks_per_node, "overlap": not alone}
    return replace(named_hardware("cpu"), **own)


def accounts(found: Engine) -> list[tuple[float, float, float]]:
    return [tuple(map(float, rank)) for rank in zip(found.compute, found.exposed, found.bubble, strict=True)]


# -- processors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "processors", "ranks_per_node", "finish"),
    [
        ([[3], [1, 1]], 2, 2, [3, 2]),  # processors of their own
        ([[3], [3]], 1, 2, [6, 6]),
        ([[1], [3]], 1, 2, [2, 4]),  # at half speed until 2, then alone
        ([[2], [2], [4]], 2, 4, [3, 3, 5]),  # two thirds
        ([[3], [3], [3]], 1, 2, [6, 6, 3]),  # nodes do not share
    ],
)
def test_processors_are_shared_while_several_want_them(
    jobs: list[list[float]], processors: int, ranks_per_node: int, finish: list[float]
) -> None:
    found = play([list(map(work, own)) for own in jobs], (), processors, ranks_per_node)
    assert found.finish == pytest.approx(finish)
    assert found.seconds == max(found.finish)
    busy = [sum(own) if len(jobs) <= processors else end for own, end in zip(jobs, finish, strict=True)]
    assert accounts(found) == [pytest.approx((own, 0, found.seconds - own)) for own in busy]


def test_work_of_no_time_takes_none() -> None:
    found = play([[work(0), work(2), work(0)], []], processors=1, ranks_per_node=2)
    assert found.finish == [2, 0]
    assert found.moments == {0: [(0, 0), (0, 2), (2, 2)], 1: []}


# -- collectives -------------------------------------------------------------------------------


def test_a_collective_begins_when_the_last_member_starts_it() -> None:
    found = play([[work(1), Start(0), Wait(0)], [work(3), Start(0), Wait(0)]], [among(0, 1, node=2, latency=0.5)])
    assert found.finish == [5.5, 5.5]
    assert accounts(found) == [(1, 2.5, 2), (3, 2.5, 0)]  # rank 0 waits for rank 1, then both for the bytes
    assert {(s.rank, s.start, s.end) for s in found.spans if s.stream == NODE} == {(0, 3, 5.5), (1, 3, 5.5)}


def test_members_wait_for_their_own_part_only() -> None:
    uneven = Collective("scatter", 0, (0, 1), (CollectiveShare(1, 0), CollectiveShare(4, 0)), 0)
    found = play([[Start(0), Wait(0), work(1)], [Start(0), Wait(0), work(1)]], [uneven])
    assert found.finish == [2, 5]
    assert accounts(found) == [(1, 1, 3), (1, 4, 0)]


def test_a_transfer_beside_computation_is_hidden() -> None:
    own = [Start(0), work(3), Wait(0)]
    found = play([own, own], [among(0, 1, node=2)])
    assert accounts(found) == [(3, 0, 0), (3, 0, 0)]
    longer = play([own, own], [among(0, 1, node=5)])
    assert accounts(longer) == [(3, 2, 0), (3, 2, 0)]


def test_links_of_both_classes_work_at_the_same_time() -> None:
    own = [Start(0), Wait(0)]
    found = play([own, own], [among(0, 1, node=2, network=3)])
    assert found.seconds == 3
    assert {s.stream for s in found.spans} == {NODE, NETWORK}


def test_transfers_take_turns_on_a_link() -> None:
    own = [Start(0), Start(1), Wait(0), Wait(1)]
    assert play([own, own], [among(0, 1, node=2), among(0, 1, node=3)]).seconds == 5
    assert play([own, own], [among(0, 1, node=2), among(0, 1, network=3)]).seconds == 3
    found = play([own, own], [among(0, 1, node=2, latency=1), among(0, 1, node=3, latency=1)])
    assert found.seconds == 7


def test_a_processor_that_moves_the_bytes_itself_computes_meanwhile_at_half_speed() -> None:
    own = [Start(0), work(3), Wait(0)]
    beside, alone = (play([own, own], [among(0, 1, node=3)], 2, 2, alone=kind) for kind in (False, True))
    assert beside.seconds == 3
    assert alone.seconds == 6
    assert accounts(alone) == [(6, 0, 0), (6, 0, 0)]
    plenty = play([own, own], [among(0, 1, node=3)], 4, 4, alone=True)
    assert plenty.seconds == 3  # other processors of the node move them


def test_latency_passes_by_itself_on_links_and_is_work_of_processors() -> None:
    own = [Start(0), work(2), Wait(0)]
    beside, alone = (play([own, own], [among(0, 1, node=1, latency=2)], 2, 2, alone=kind) for kind in (False, True))
    assert accounts(beside) == [(2, 1, 0), (2, 1, 0)]
    assert accounts(alone) == [(4, 1, 0), (4, 1, 0)]  # four jobs on two processors, until the works are done


def test_groups_of_other_ranks_are_independent() -> None:
    pairs = [among(0, 1, node=1), among(2, 3, node=1)]
    own = [[Start(0), Wait(0)], [Start(0), Wait(0)], [work(5), Start(1), Wait(1)], [Start(1), Wait(1)]]
    found = play(own, pairs)
    assert found.finish == [1, 1, 6, 6]
    assert accounts(found)[3] == (0, 1, 5)
    assert accounts(found)[0] == (0, 1, 5)  # the end of the step is waited for as well


def test_only_shown_ranks_have_spans() -> None:
    own = [work(1), Start(0), Wait(0)]
    found = Engine([own, own], [among(0, 1, node=1)], machine(), frozenset({1})).run()
    assert {(s.rank, s.stream) for s in found.spans} == {(1, COMPUTE), (1, NODE)}
    assert found.moments.keys() == {1}


@pytest.mark.parametrize("alone", [False, True])
def test_a_deadlock_is_found(alone: bool) -> None:
    crossed = [[Start(0), Wait(0), Start(1), Wait(1)], [Start(1), Wait(1), Start(0), Wait(0)]]
    for own in (crossed, [[Start(0), Wait(0)], [work(1)]]):
        with pytest.raises(AssertionError, match="wait for a collective that some of its members never start"):
            play(own, [among(0, 1), among(0, 1)], alone=alone)


# -- bounds ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Ranks that cannot deadlock: all of them meet the same collectives in one order."""

    operations: list[list[SimulatedOp]]
    collectives: list[Collective]
    processors: int
    ranks_per_node: int


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(1, 5))
    seconds = st.integers(0, 6).map(float)
    operations: list[list[SimulatedOp]] = [[] for _ in range(ranks)]
    collectives: list[Collective] = []
    for number in range(draw(st.integers(0, 4))):
        members = tuple(sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1))))
        parts = tuple(CollectiveShare(draw(seconds), draw(seconds)) for _ in members)
        collectives.append(Collective("gather", 0, members, parts, draw(seconds)))
        for rank in range(ranks):
            operations[rank].append(work(draw(seconds)))
        for rank in members:
            operations[rank] += [Start(number), work(draw(seconds)), Wait(number)]
    for rank in range(ranks):
        operations[rank].append(work(draw(seconds)))
    return Program(operations, collectives, draw(st.integers(1, 4)), draw(st.integers(1, 5)))


def load(own: Sequence[SimulatedOp]) -> float:
    return sum(o.seconds for o in own if isinstance(o, ComputeOp))


@pytest.mark.full
@untimed(300)
@given(programs(), st.booleans())
def test_no_run_is_faster_than_its_work_allows(program: Program, alone: bool) -> None:
    found = play(program.operations, program.collectives, program.processors, program.ranks_per_node, alone)
    loads = [load(own) for own in program.operations]
    moved = [0.0] * len(loads)
    for collective in program.collectives:
        for rank, part in zip(collective.members, collective.parts, strict=True):
            moved[rank] += part.node + part.network + alone * collective.latency
            assert found.seconds >= collective.latency + max(part.node, part.network) - 1e-9
    assert found.seconds >= max(loads) - 1e-9
    if alone or program.processors < program.ranks_per_node:
        for first in range(0, len(loads), program.ranks_per_node):
            node = slice(first, first + program.ranks_per_node)
            total = sum(loads[node]) + alone * sum(moved[node])
            assert found.seconds >= total / program.processors - 1e-9
    serial = sum(loads) + sum(moved) + sum(c.latency for c in program.collectives if not alone)
    assert found.seconds <= serial + 1e-9


@untimed(200)
@given(programs(), st.booleans())
def test_every_second_of_every_rank_is_accounted_for(program: Program, alone: bool) -> None:
    found = play(program.operations, program.collectives, program.processors, program.ranks_per_node, alone)
    for rank, parts in enumerate(accounts(found)):
        assert min(parts) >= -1e-9
        assert sum(parts) == pytest.approx(found.seconds)
        assert found.finish[rank] <= found.seconds + 1e-9


@untimed(100)
@given(programs())
def test_with_processors_of_their_own_ranks_compute_as_long_as_they_have_to(program: Program) -> None:
    found = play(program.operations, program.collectives, len(program.operations), 1)
    assert found.compute == pytest.approx([load(own) for own in program.operations])
    again = play(program.operations, program.collectives, len(program.operations), 1)
    assert (again.finish, again.spans) == (found.finish, found.spans)
