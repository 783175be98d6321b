"""Ownership, micro-groups, schedule, buffers and cost: the guarantees that their docstrings give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from canzona_compile.analysis.flops import bytes_of_wires, flops_of
from canzona_compile.analysis.step_time import GroupLoad, Rates, load_of, pipeline_seconds, rates_of
from canzona_compile.ir.layout import Grid, Layout, Shape
from canzona_compile.ir.step import Act, Buffer, BufferUse, Form, MicroGroup, Phase, Placed, Step, Strategy, Task, Wire
from canzona_compile.ir.storage import Storage
from canzona_compile.lowering.memory_plan import assign_slots
from canzona_compile.machine.hardware import Machine
from canzona_compile.passes import AssignOwners, FormMicroGroups, Place
from canzona_compile.passes.micro_group import COUNTS, TOLERANCE, live_bytes, makespan, pack
from canzona_compile.passes.schedule import pipelined, stages
from tests.harness.pairs import muon, parameters
from tests.harness.samples import CPU, TOY_SHAPE, grid_of, muon_step, rows_layout, toy_placed, toy_step, toy_template
from tests.harness.untimed import untimed

GPU = Machine("cuda", "nccl", 1)


@cache
def toy_cut(layout: Layout) -> Placed:
    return toy_placed("toy", toy_template(), layout)


def step_of(costs: Sequence[tuple[int, int]], grids: Sequence[Grid], machine: Machine = CPU) -> Step:
    """One task per (FLOPs, bytes to gather), task i on grid i modulo the number of grids."""
    tasks, cuts = [], []
    for i, (flops, size) in enumerate(costs):
        layout = rows_layout(TOY_SHAPE, grids[i % len(grids)])
        wire = Wire("bytes", (size,), torch.uint8)
        cuts.append(replace(toy_cut(layout), name=f"p{i}", flops=flops, gather=(wire,), scatter=(wire,)))
        tasks.append(Task(f"t{i}", i, 0, "toy", layout, f"p{i}"))
    return Step(Form.PLACED, "Toy", machine, (toy_template(),), tuple(tasks), tuple(cuts))


def loads(step: Step) -> dict[int, int]:
    """FLOPs by rank."""
    found: dict[int, int] = defaultdict(int)
    for task in step.tasks:
        assert task.owner is not None
        found[task.layout.grid.ranks[task.owner[0]][task.owner[1]]] += step.placed_of(task).flops
    return found


# -- owners ------------------------------------------------------------------------------------


def optimum(costs: Sequence[int], ranks: int) -> int:
    """The least possible load of the busiest rank, by trying everything."""
    best = sum(costs)

    def place(i: int, load: tuple[int, ...]) -> None:
        nonlocal best
        if max(load) >= best:
            return
        if i == len(costs):
            best = max(load)
            return
        for r in range(ranks):
            if load[r] not in load[:r]:  # ranks of equal load are alike
                place(i + 1, (*load[:r], load[r] + costs[i], *load[r + 1 :]))

    place(0, (0,) * ranks)
    return best


COSTS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@pytest.mark.full
@untimed(150)
@given(COSTS, st.sampled_from([(1, 2), (1, 3), (1, 4), (2, 2), (3, 1)]))
def test_largest_first_is_within_grahams_bound(costs: list[int], mesh: tuple[int, int]) -> None:
    step = AssignOwners(strategy="owner")(step_of([(c, 8) for c in costs], [grid_of(*mesh)]))
    ranks, load = mesh[0] * mesh[1], loads(step)
    assert sum(load.values()) == sum(costs)
    assert max(load.values()) * 3 * ranks <= (4 * ranks - 1) * optimum(costs, ranks)


@untimed(60)
@given(COSTS, st.randoms(use_true_random=False))
def test_owners_do_not_depend_on_the_order_of_tasks(costs: list[int], random: object) -> None:
    step = step_of([(c, 8) for c in costs], [grid_of(1, 3)])
    shuffled = list(step.tasks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    owners = [
        {t.name: t.owner for t in AssignOwners(strategy="owner")(replace(step, tasks=tuple(tasks))).tasks}
        for tasks in (step.tasks, shuffled)
    ]
    assert owners[0] == owners[1]


def test_ties_go_to_the_first_parameter_and_the_lowest_rank() -> None:
    step = AssignOwners(strategy="owner")(step_of([(5, 8)] * 5, [grid_of(1, 3)]))
    assert [t.owner for t in step.tasks] == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]


def test_grids_over_the_same_ranks_share_their_load() -> None:
    line, square = grid_of(1, 4), grid_of(2, 2)
    step = AssignOwners(strategy="owner")(step_of([(30, 8), (10, 8), (8, 8), (9, 8)], [line, square]))
    assert [t.layout.grid for t in step.tasks] == [line, square] * 2
    assert loads(step) == {0: 30, 1: 8, 2: 10, 3: 9}


def test_strategies() -> None:
    free, dear = step_of([(1, 8)] * 4, [grid_of(1, 4)]), step_of([(10**12, 8)] * 4, [grid_of(1, 4)])
    for step, strategy, expected in (
        (free, "replicated", Strategy.REPLICATED),
        (free, "owner", Strategy.OWNER),
        (free, "auto", Strategy.REPLICATED),  # the second collective costs more than the work
        (dear, "auto", Strategy.OWNER),
    ):
        tasks = AssignOwners(strategy=strategy)(step).tasks
        assert {t.strategy for t in tasks} == {expected}
        assert {t.owner is None for t in tasks} == {expected is Strategy.REPLICATED}
        assert all(t.reason for t in tasks)


def test_tasks_of_one_rank_are_local_whatever_was_asked_for() -> None:
    step = AssignOwners(strategy="replicated")(step_of([(9, 8)] * 2, [grid_of(1, 1)]))
    assert [(t.strategy, t.owner) for t in step.tasks] == [(Strategy.LOCAL, (0, 0))] * 2


# -- micro-groups ------------------------------------------------------------------------------

TASKS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), min_size=1, max_size=14)


@untimed(150)
@given(TASKS, st.integers(1, 4), st.integers(1, 120), st.integers(1, 60))
def test_packing_is_greedy_within_both_limits(
    costs: list[tuple[int, int]], ranks: int, flops: int, capacity: int
) -> None:
    step = AssignOwners(strategy="owner")(step_of(costs, [grid_of(1, ranks)]))
    placed = {p.name: p for p in step.placed}
    flops = max(flops, *(c for c, _ in costs))
    bins = pack(step.tasks, placed, flops, capacity)
    assert [t for own in bins for t in own] == list(step.tasks)

    def fits(tasks: Sequence[Task]) -> bool:
        return makespan(tasks, placed) <= flops and all(most <= capacity for most in sizes(tasks, placed).values())

    for own in bins:
        huge = [t for t in own if bytes_of_wires(placed[t.placed].gather) > capacity]
        assert fits([t for t in own if t not in huge]) if len(huge) < len(own) else huge
        for task in huge:  # alone on its owner
            assert [t for t in own if t.owner == task.owner] == [task]
    for own, after in pairwise(bins):
        assert not fits([*own, after[0]])


def sizes(tasks: Sequence[Task], placed: dict[str, Placed]) -> dict[object, int]:
    found: dict[object, int] = defaultdict(int)
    for task in tasks:
        found[task.owner] += bytes_of_wires(placed[task.placed].gather)
    return found


@untimed(60)
@given(TASKS, st.integers(1, 3), st.sampled_from([CPU, GPU]), st.integers(1, 3), st.integers(20, 200))
def test_micro_groups_cover_all_tasks_at_the_least_predicted_time(
    costs: list[tuple[int, int]], ranks: int, machine: Machine, depth: int, capacity: int
) -> None:
    scaled = [(flops * 10**9, size) for flops, size in costs]
    grids = [grid_of(1, ranks), Grid(((100,),))]
    owned = AssignOwners(strategy="owner")(step_of(scaled, grids, machine))
    step = FormMicroGroups(capacity, depth=depth)(owned)
    placed = {p.name: p for p in step.placed}
    assert sorted(name for g in step.micro_groups for name in g.tasks) == sorted(t.name for t in step.tasks)
    assert [g.index for g in step.micro_groups] == list(range(len(step.micro_groups)))
    for grid in {t.layout.grid for t in step.tasks}:
        bins = [tasks for g in step.micro_groups if (tasks := [step.task(n) for n in g.tasks])[0].layout.grid == grid]
        ordered = [t for own in bins for t in own]
        assert {t.layout.grid for t in ordered} == {grid}
        assert ordered == sorted(ordered, key=lambda t: (-placed[t.placed].flops, t.index))
        rates = rates_of(machine)

        def seconds(bins: list[list[Task]], grid: Grid = grid, rates: Rates = rates) -> float:
            return pipeline_seconds([load_of(own, grid, placed) for own in bins], rates, depth)

        largest = max(placed[t.placed].flops for t in ordered)
        for count in COUNTS:
            limit = max(-(-makespan(ordered, placed) // count), largest)
            slack = TOLERANCE if machine is GPU else 1e-9
            assert seconds(bins) <= seconds(pack(ordered, placed, limit, capacity)) * (1 + slack)


def test_groups_that_communicate_come_first() -> None:
    owned = AssignOwners(strategy="owner")(step_of([(9, 8)] * 4, [Grid(((0,),)), grid_of(1, 2)]))
    step = FormMicroGroups(10**6)(owned)
    assert [step.task(g.tasks[0]).layout.grid.size for g in step.micro_groups] == [2, 1]


def test_where_nothing_overlaps_one_group_is_fastest() -> None:
    owned = AssignOwners(strategy="owner")(step_of([(10**12, 10**7)] * 16, [grid_of(1, 4)]))
    assert len(FormMicroGroups(10**12)(owned).micro_groups) == 1
    assert len(FormMicroGroups(10**12)(replace(owned, machine=GPU)).micro_groups) > 1
    assert len(FormMicroGroups(10**12, groups=4)(owned).micro_groups) == 4
    assert len(FormMicroGroups(2 * 10**7)(owned).micro_groups) == 2


def test_of_plans_as_fast_the_one_that_holds_least() -> None:
    owned = AssignOwners(strategy="owner")(step_of([(10**13, 10**7)] * 64, [grid_of(1, 4)], GPU))
    step = FormMicroGroups(10**12)(owned)
    placed = {p.name: p for p in step.placed}
    bins = [[step.task(n) for n in g.tasks] for g in step.micro_groups]
    assert live_bytes(bins, placed, 2) == 2 * (2 + 2) * 10**7, "one matrix per owner in each of two groups"
    one = [[t for own in bins for t in own]]
    assert live_bytes(one, placed, 2) == 16 * (2 + 2) * 10**7


# -- predicted time ----------------------------------------------------------------------------

RATES = Rates(flops=10.0, wire=5.0, latency=0.25, overlap=True)
AMOUNT = st.integers(0, 40).map(float)
LOADS = st.lists(st.builds(GroupLoad, AMOUNT, AMOUNT, AMOUNT, st.integers(0, 3)), max_size=7)


def by_hand(groups: Sequence[GroupLoad]) -> tuple[float, float]:
    """Seconds on the wire and seconds of computing."""
    wire = sum(g.gather_bytes + g.scatter_bytes for g in groups) / RATES.wire
    for g in groups:
        halves = max(1, g.collectives)
        wire += RATES.latency * (halves - halves // 2) * (g.gather_bytes > 0)
        wire += RATES.latency * max(1, halves // 2) * (g.scatter_bytes > 0)
    return wire, sum(g.compute_flops for g in groups) / RATES.flops


@untimed()
@given(LOADS, st.integers(1, 4))
def test_without_overlap_everything_adds_up(groups: list[GroupLoad], depth: int) -> None:
    total = pytest.approx(sum(by_hand(groups)))
    assert pipeline_seconds(groups, replace(RATES, overlap=False), depth) == total
    assert pipeline_seconds(groups, RATES, 1) == total


@untimed()
@given(LOADS, st.integers(2, 4))
def test_overlap_is_between_the_busiest_resource_and_the_sum(groups: list[GroupLoad], depth: int) -> None:
    seconds, (wire, work) = pipeline_seconds(groups, RATES, depth), by_hand(groups)
    assert max(wire, work) * 0.999999 <= seconds <= (wire + work) * 1.000001


@untimed()
@given(LOADS.filter(bool), st.integers(2, 4))
def test_one_group_overlaps_with_nothing(groups: list[GroupLoad], depth: int) -> None:
    assert pipeline_seconds(groups[:1], RATES, depth) == pytest.approx(sum(by_hand(groups[:1])))


@untimed()
@given(LOADS.filter(bool), st.integers(1, 4), st.data())
def test_more_of_anything_never_takes_less(groups: list[GroupLoad], depth: int, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(groups) - 1))
    name = data.draw(st.sampled_from(["gather_bytes", "compute_flops", "scatter_bytes"]))
    more = [*groups]
    more[i] = replace(groups[i], **{name: getattr(groups[i], name) + 7.0})
    slower = replace(RATES, wire=RATES.wire / 2)
    for overlap in (True, False):
        rates = replace(RATES, overlap=overlap)
        seconds = pipeline_seconds(groups, rates, depth)
        assert pipeline_seconds(more, rates, depth) >= seconds
        assert pipeline_seconds(groups, replace(slower, overlap=overlap), depth) >= seconds


# -- schedule and buffers ----------------------------------------------------------------------


@untimed()
@given(st.integers(1, 6), st.integers(1, 4))
def test_the_pipeline_keeps_every_groups_order(count: int, depth: int) -> None:
    first = toy_step(Form.BATCHED).micro_groups[0]
    groups = tuple(replace(first, index=i) for i in range(count))
    alone = MicroGroup(count, ("c",))
    events = list(pipelined((*groups, alone), depth))
    assert len(events) == len(set(events))
    for group in (*groups, alone):
        acts = [e.act for e in events if e.micro_group == group.index]
        assert acts == [act for stage in stages(group) for act in stage]
    assert {e.micro_group for e in events[-3:]} == {count}  # what nobody waits for comes last
    in_flight = most = 0
    for event in events:
        in_flight += (event.act is Act.START_GATHER) - (event.act is Act.APPLY and event.micro_group != count)
        most = max(most, in_flight)
    assert (most > 1) == (depth > 1 and count > 1)


@untimed()
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), max_size=14))
def test_buffers_share_slots_as_well_as_can_be(spans: list[tuple[int, int]]) -> None:
    wanted = [
        Buffer(i, Phase.GATHER, BufferUse.SEND, first, first + length, -1) for i, (first, length) in enumerate(spans)
    ]
    buffers = list(assign_slots(wanted))
    assert sorted(replace(b, slot=-1).micro_group for b in buffers) == list(range(len(spans)))
    for i, a in enumerate(buffers):
        for b in buffers[:i]:
            assert a.slot != b.slot or a.last < b.first or b.last < a.first
    overlap = max((sum(b.first <= t <= b.last for b in wanted) for t in range(40)), default=0)
    assert len({b.slot for b in buffers}) == overlap
    assert {b.slot for b in buffers} == set(range(overlap))


# -- cost --------------------------------------------------------------------------------------


def muon_cost(shape: Shape) -> sympy.Expr:
    return Place()(muon_step(grid_of(1, 2), shape)).placed[0].cost


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)], ids=["wide", "tall"])
def test_the_cost_of_muon_is_that_of_newton_schulz(shape: Shape) -> None:
    m, n = (sympy.Symbol(name, positive=True, integer=True) for name in "mn")
    short, long = (m, n) if shape[0] <= shape[1] else (n, m)
    cost = muon_cost(shape)
    assert cost.free_symbols == {m, n}
    rest = sympy.expand(cost - 5 * (4 * long * short**2 + 2 * short**3))
    assert sympy.total_degree(rest, m, n) <= 2
    assert all(c > 0 for c in sympy.Poly(rest, m, n).coeffs())


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (40, 24), (16, 128)], ids=str)
def test_the_cost_of_muon_is_what_torch_counts(shape: Shape) -> None:
    """The formula of a small matrix, at other sizes, against a count of the products of a real step."""
    optimizer = muon(parameters([shape]))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(shape)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    cost = muon_cost((4, 6) if shape[0] <= shape[1] else (6, 4))
    m, n = sorted(cost.free_symbols, key=str)
    products = sum(term for term in cost.as_ordered_terms() if sympy.total_degree(term, m, n) == 3)
    assert int(products.subs({m: shape[0], n: shape[1]})) == counter.get_total_flops()
    elements = shape[0] * shape[1]
    assert 0 < flops_of(cost, shape) - counter.get_total_flops() <= 8 * elements


def test_every_task_costs_something() -> None:
    assert flops_of(sympy.Integer(0), (4, 6)) == 1


@pytest.mark.parametrize(("afar", "most"), [(False, 1), (True, 2)])
def test_open_state_of_one_micro_group_at_a_time(afar: bool, most: int) -> None:
    """What is fetched from the host comes earlier, so two are open."""
    groups = tuple(MicroGroup(i, (f"w{i}",)) for i in range(4))
    opened, seen = set[int](), []
    for event in pipelined(groups, 2, apart=True, fetched={i: [Storage("int8", afar)] for i in range(4)}):
        if event.act is Act.FETCH:
            opened.add(event.micro_group)
        if event.act is Act.STORE:
            opened.remove(event.micro_group)
        seen.append(len(opened))
    assert (max(seen), seen[-1]) == (most, 0)
