"""Every promise from OWNED to EMITTED has a step here that breaks it, and the verifier says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.layout import Box
from canzona_compile.ir.program import Program
from canzona_compile.ir.step import Act, BlockSlice, Event, Exchange, Form, Item, Phase, Stacked, Step, Strategy, Wire
from canzona_compile.ir.verifier import owned, some_pairs, verify
from canzona_compile.passes import AssignOwners, Batching, FormMicroGroups, FuseCollectives, Place, Schedule
from tests.harness.samples import TOY_SHAPE, grid_of, muon_step, rows_layout, toy_module, toy_step
from tests.ir.breaking import Case, Change, cut, exchange, fires, group, task

# -- OWNED -------------------------------------------------------------------------------------

OWNED: list[Case] = [
    ("no owner", task("a", owner=None), "strategy is owner, but it has no owner", "a"),
    ("owner outside", task("a", owner=(2, 0)), "owner (2, 0) is outside of grid 2x2", "a"),
    ("negative owner", task("a", owner=(0, -1)), "owner (0, -1) is outside", "a"),
    ("replicated and owned", task("b", strategy=Strategy.REPLICATED), "yet (1, 1) owns it", "b"),
    ("local on a grid", task("a", strategy=Strategy.LOCAL), "local on a grid of 4", "a"),
    ("alone, but not local", task("c", strategy=Strategy.OWNER), "owner on a grid of 1", "c"),
    ("local elsewhere", task("c", owner=(0, 1)), "owner (0, 1) is outside", "c"),
]


@pytest.mark.parametrize("case", OWNED, ids=lambda case: case[0])
def test_owned(case: Case) -> None:
    fires(Form.OWNED, *case[1:])


def test_owned_without_elementwise_tasks() -> None:
    step = toy_step(Form.OWNED)
    pointwise = step.placed[0]
    for name in ("gather", "scatter", "resident"):
        object.__setattr__(pointwise, name, ())
    assert pointwise.elementwise
    with pytest.raises(InvalidStep, match="elementwise tasks have no place"):
        owned(step)


# -- GROUPED -----------------------------------------------------------------------------------

GROUPED: list[Case] = [
    ("in two groups", group(1, tasks=("c", "a")), "in group 0 and in group 1", "a"),
    ("twice in a group", group(0, tasks=("a", "b", "a")), "in group 0 and in group 0", "a"),
    ("in no group", group(0, tasks=("a",)), "in no group", "b"),
    ("a stranger", group(0, tasks=("a", "b", "d")), "no task 'd'", "group 0"),
    ("empty", group(0, tasks=()), "has no tasks", "group 0"),
    ("miscounted", group(1, index=7), "group 1 calls itself 7", "group 1"),
    (
        "two grids",
        lambda step: group(0, tasks=("a", "b", "c"))(replace(step, micro_groups=step.micro_groups[:1])),
        "not that of the others in group 0",
        "c",
    ),
]


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case[0])
def test_grouped(case: Case) -> None:
    fires(Form.GROUPED, *case[1:])


# -- ROUTED ------------------------------------------------------------------------------------


def items(phase: Phase, edit: Callable[[tuple[Item, ...]], tuple[Item, ...]]) -> Change:
    return exchange(phase, lambda found: replace(found, items=edit(found.items)))


def first_item(phase: Phase, **changes: object) -> Change:
    return items(phase, lambda found: (replace(found[0], **changes), *found[1:]))  # type: ignore[arg-type]


class Shifted(Exchange):
    """Its pieces all begin at the start of the block."""

    def block(self, source: tuple[int, int], target: tuple[int, int]) -> tuple[tuple[BlockSlice, ...], int]:
        pieces, size = Exchange.block(self, source, target)
        return tuple(replace(piece, offset=0) for piece in pieces), size


class Shortened(Exchange):
    """Its blocks are four bytes shorter than what is in them."""

    def block(self, source: tuple[int, int], target: tuple[int, int]) -> tuple[tuple[BlockSlice, ...], int]:
        pieces, size = Exchange.block(self, source, target)
        return pieces, size - 4


def everywhere(step: Step) -> Step:
    """Let every rank compute a and b."""
    for name in ("a", "b"):
        step = task(name, strategy=Strategy.REPLICATED, owner=None)(step)
    return step


to_all = items(Phase.GATHER, lambda found: tuple(replace(item, owner=None) for item in found))


HALVES = rows_layout(TOY_SHAPE, grid_of(2, 2)).boxes
OTHER = Wire("other", TOY_SHAPE, torch.float32)
ROUTED: list[Case] = [
    *((f"no {phase}", exchange(phase, lambda _: None), "is missing", f"{phase} of group 0") for phase in Phase),
    (
        "gather of what is whole",
        lambda step: group(1, gather=step.micro_groups[0].gather)(step),
        "nothing to carry",
        "gather of group 1",
    ),
    (
        "scatter of what every rank computes",
        lambda step: everywhere(to_all(step)),
        "nothing to carry",
        "scatter of group 0",
    ),
    (
        "phases mixed up",
        exchange(Phase.SCATTER, lambda found: replace(found, phase=Phase.EXCHANGE)),
        "says that it is a exchange",
        "scatter of group 0",
    ),
    ("wire twice", items(Phase.GATHER, lambda found: (*found, found[-1])), "wire low of b is in it 2 times", "gather"),
    ("wire missing", items(Phase.GATHER, lambda found: found[1:]), "wire new of a is in it 0 times", "gather"),
    (
        "a stranger",
        items(Phase.EXCHANGE, lambda found: (*found, replace(found[0], wire=OTHER))),
        "wire other of a should not be in it",
        "exchange",
    ),
    (
        "small elements first",
        items(Phase.GATHER, lambda found: found[::-1]),
        "a.new at byte 18 is not aligned to 4 bytes",
        "block from (0, 0) to (0, 0) in gather",
    ),
    (
        "to another rank",
        first_item(Phase.GATHER, owner=(0, 1)),
        "of a.new is missing",
        "block from (0, 0) to (0, 0) in gather",
    ),
    (
        "to every rank",
        first_item(Phase.GATHER, owner=None),
        "[0:3, 0:3] of a.new does not belong there",
        "block from (0, 0) to (0, 1) in gather",
    ),
    (
        "from another rank",
        first_item(Phase.SCATTER, owner=(0, 1)),
        "of a.update is missing",
        "block from (0, 0) to (0, 0) in scatter",
    ),
    (
        "from another replica",
        first_item(Phase.EXCHANGE, owner=(1, 0)),
        "of a.update is missing",
        "block from (0, 0) to (0, 0) in exchange",
    ),
    (
        "boxes exchanged",
        first_item(Phase.SCATTER, boxes=HALVES[::-1]),
        "[3:6, 0:3] of a.update does not belong there",
        "block from (0, 0) to (0, 0) in scatter",
    ),
    (
        "pieces overlap",
        exchange(Phase.GATHER, lambda found: Shifted(found.phase, found.items)),
        "a.low at byte 0 overlaps the piece before it",
        "gather",
    ),
    (
        "block too short",
        exchange(Phase.SCATTER, lambda found: Shortened(found.phase, found.items)),
        "a.update at byte 0 ends after its block of 32 bytes",
        "scatter",
    ),
]


def test_what_every_rank_computes_is_gathered_only() -> None:
    none = [exchange(phase, lambda _: None) for phase in (Phase.SCATTER, Phase.EXCHANGE)]
    verify(none[0](none[1](everywhere(to_all(toy_step(Form.ROUTED))))))


@pytest.mark.parametrize("case", ROUTED, ids=lambda case: case[0])
def test_routed(case: Case) -> None:
    fires(Form.ROUTED, *case[1:])


@pytest.mark.parametrize("phase", Phase)
def test_routed_on_many_ranks(phase: Phase) -> None:
    """Only some pairs are checked there; what goes wrong everywhere is found nevertheless."""
    step = toy_step(Form.ROUTED, 8, 8)
    verify(step)
    wrong = tuple(Box(b.start, (b.size[0], 2)) for b in step.task("a").layout.boxes)
    with pytest.raises(InvalidStep, match="does not belong there"):
        verify(items(phase, lambda found: tuple(replace(i, boxes=wrong) for i in found))(step))


def test_pairs_are_members_of_one_process_group() -> None:
    for phase in Phase:
        pairs = list(some_pairs(phase, grid_of(3, 2)))
        fixed = 1 if phase is Phase.EXCHANGE else 0
        assert all(a[fixed] == b[fixed] for a, b in pairs)
        assert len(set(pairs)) == len(pairs) == (18 if phase is Phase.EXCHANGE else 12)


def test_of_many_pairs_a_sample_is_looked_at() -> None:
    for phase in Phase:
        pairs = list(some_pairs(phase, grid_of(8, 64)))
        assert 100 <= len(pairs) == len(set(pairs)) <= 128
        assert len({b for _, b in pairs}) > 100, "different ranks"
        assert 6 <= len(list(some_pairs(phase, grid_of(8, 64), 8))) <= 8, "of each of thousands of exchanges"


def test_routes_that_a_pass_keeps_are_checked_once() -> None:
    """`verify` trusts the step before it, which was valid, and checks its routes again only if a pass changed some."""
    step = toy_step(Form.ROUTED)
    broken = exchange(Phase.GATHER, lambda found: Shifted(found.phase, found.items))(step)
    verify(broken, broken)
    verify(replace(broken, buffers=()), broken)
    for before in (step, replace(broken, form=Form.GROUPED), replace(broken, tasks=broken.tasks[::-1])):
        with pytest.raises(InvalidStep, match="overlaps"):
            verify(broken, before)


# -- BATCHED -----------------------------------------------------------------------------------


def batch(**changes: object) -> Change:
    """Change the batch of task a."""

    def change(step: Step) -> Step:
        first, *others = step.micro_groups[0].batches
        return group(0, batches=(replace(first, **changes), *others))(step)  # type: ignore[arg-type]

    return change


def stacked(results: tuple[bool, ...]) -> Change:
    """Let the compute graph serve as its stacked form."""

    def change(step: Step) -> Step:
        return cut(stacked=Stacked(step.placed[0].compute, ("new", "low"), results))(step)

    return change


BATCHED: list[Case] = [
    ("in no batch", group(0, batches=()), "in 0 batches of group 0", "a"),
    ("in two batches", batch(tasks=("a", "b")), "in 2 batches of group 0", "b"),
    ("twice in a batch", batch(tasks=("a", "a")), "in 2 batches of group 0", "a"),
    ("a stranger", batch(tasks=("a", "c")), "has a task of another", "c"),
    ("other owner", batch(owner=(1, 1)), "its owner is (0, 0), that of its batch (1, 1)", "a"),
    ("other cut", batch(placed="toy@whole"), "its cut is toy, that of its batch toy@whole", "a"),
    ("other group", batch(param_group=3), "its parameter group is 0, that of its batch 3", "a"),
    ("stacked result missing", stacked((True,)), "returns 2 values, not 1", "stacked compute of cut toy"),
    (
        "another stacked graph",
        lambda step: cut(stacked=Stacked(step.placed[0].prepare, (), (True,) * 3))(step),
        "returns 3 values, not 2",
        "stacked compute of cut toy",
    ),
    ("no lane", batch(lane=-1), "a batch of a is in lane -1", "group 0"),
    ("not stackable", batch(stacked=True), "cut toy has no stacked graph", "group 0"),
]


@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case[0])
def test_batched(case: Case) -> None:
    fires(Form.BATCHED, *case[1:])


def test_batches_may_be_stacked_where_there_is_a_graph() -> None:
    verify(batch(stacked=True)(stacked((True, True))(toy_step(Form.BATCHED))))


# -- SCHEDULED ---------------------------------------------------------------------------------


def events(edit: Callable[[tuple[Event, ...]], tuple[Event, ...]]) -> Change:
    return lambda step: replace(step, schedule=edit(step.schedule))


def without(act: Act) -> Change:
    return events(lambda found: tuple(e for e in found if e != Event(act, 0)))


def swapped(first: Act, second: Act) -> Change:
    """Exchange two events of group 0."""
    names = {first: second, second: first}

    def edit(found: tuple[Event, ...]) -> tuple[Event, ...]:
        return tuple(Event(names.get(e.act, e.act), 0) if e.micro_group == 0 else e for e in found)

    return events(edit)


def buffer(number: int, **changes: int) -> Change:
    def change(step: Step) -> Step:
        edited = [
            replace(b, **changes) if i == number else b  # type: ignore[arg-type]
            for i, b in enumerate(step.buffers)
        ]
        return replace(step, buffers=tuple(edited))

    return change


ORDER = [act for act in Act if act not in (Act.MEET, Act.FETCH, Act.STORE)]
SCHEDULED: list[Case] = [
    *((f"no {act}", without(act), f"{act} never happens", "group 0") for act in ORDER),
    *(
        (f"{late} too early", swapped(act, late), f"{late} comes before {act}", "group 0")
        for act, late in pairwise(ORDER)
    ),
    (
        "a meeting of ranks that exchange",
        events(lambda found: (Event(Act.MEET, 0), *found)),
        "meet of what does not exist",
        "group 0",
    ),
    ("twice", events(lambda found: (*found, found[0])), "happens twice", "event 12, prepare of"),
    ("a stranger", events(lambda found: (*found, Event(Act.APPLY, 5))), "no such group", "event 12, apply of group 5"),
    ("state of nobody", events(lambda found: (Event(Act.FETCH, 0), *found)), "fetch of what does not exist", "group 0"),
    (
        "a collective of nobody",
        events(lambda found: (*found, Event(Act.START_GATHER, 1))),
        "start gather of what does not exist",
        "group 1",
    ),
    ("one slot", buffer(1, slot=0), "'gather send' of group 0 and 'gather recv'", "slot 0"),
    ("touching", buffer(2, first=2), "'gather send' of group 0 and 'scatter send'", "slot 0"),
    ("dead before it lives", buffer(0, last=-1), "lives from event 0 to -1", "group 0"),
    ("lives for ever", buffer(0, last=99), "lives from event 0 to 99", "group 0"),
]


@pytest.mark.parametrize("case", SCHEDULED, ids=lambda case: case[0])
def test_scheduled(case: Case) -> None:
    fires(Form.SCHEDULED, *case[1:])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_ranks_without_collectives_meet(shards: int, late: bool) -> None:
    step = muon_step(grid_of(3, shards), (4, 6), (6, 4))
    passes = [Place(), AssignOwners(strategy="replicated"), FormMicroGroups(capacity=80), FuseCollectives()]
    for own in (*passes, Batching(), Schedule()):
        step = own(step)
    assert len(step.micro_groups) == 2
    assert [e for e in step.schedule if e.act is Act.MEET] == [step.schedule[0]] == [Event(Act.MEET, 0)]
    verify(step)
    with pytest.raises(
        InvalidStep, match="comes before meet" if late else "neither connected by exchanges nor meet"
    ) as caught:
        verify(replace(step, schedule=(*step.schedule[1:], *[step.schedule[0]] * late), buffers=()))
    assert caught.value.at == "group 0"


# -- EMITTED -----------------------------------------------------------------------------------


def test_emitted() -> None:
    broken = toy_module()
    nodes = {n.name: n for n in broken.graph.nodes}
    nodes["x"].prepend(nodes["y"])
    missing: Change = lambda step: replace(step, program=None)  # noqa: E731
    malformed: Change = lambda step: replace(step, program=Program(broken, {}, (), 0))  # noqa: E731
    fires(Form.EMITTED, missing, "has no program", "step @Toy")
    fires(Form.EMITTED, malformed, "rank program is malformed", "program")
