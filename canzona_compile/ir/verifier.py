"""What each form promises, checked after every pass: one function per form.

A violation is a bug in a pass, never of the user. The error names the promise that is broken and
the node, task or micro-group that breaks it. The checks look at the step as it is and ask no pass.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NoReturn

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.fx_utils import outputs
from canzona_compile.ir.graph_checks import bucketed, captured, placed, returns, sound
from canzona_compile.ir.layout import Box, Grid
from canzona_compile.ir.step import (
    Act,
    Batch,
    BlockSlice,
    Exchange,
    Form,
    MicroGroup,
    Phase,
    Placed,
    Step,
    Strategy,
    Task,
    Wire,
)

GridPosition = tuple[int, int]
ALL_PAIRS_RANKS = 16  # of larger grids only some pairs of ranks are checked
SAMPLED_PAIRS = 128  # of one exchange
MOST_PAIRS, FEWEST_PAIRS = 1 << 14, 8  # of all exchanges together, and of each


def verify(step: Step, before: Step | None = None) -> None:
    """Check the promises of the step's form, of all forms before it, and of its buckets.

    Args:
        step: of any form.
        before: a valid step from which a pass made `step`. Routes that both share are not checked again: exchanges
            are values that nothing can change, and to check them takes most of the time on large grids.

    Raises:
        InvalidStep: a promise is broken.
    """
    for form, check in CHECKS.items():
        if form <= step.form and not (form is Form.ROUTED and before is not None and same_routes(step, before)):
            check(step)
    if before is None or before.buckets is not step.buckets or before.tasks is not step.tasks:
        bucketed(step)


def same_routes(step: Step, before: Step) -> bool:
    """Do two steps carry the same wires of the same tasks in the same exchanges?"""
    if (
        before.form < Form.ROUTED
        or step.tasks is not before.tasks
        or len(step.micro_groups) != len(before.micro_groups)
    ):
        return False
    wires, known = ([(p.name, p.gather, p.scatter) for p in one.placed] for one in (step, before))
    return wires == known and all(
        (a.index, a.tasks) == (b.index, b.tasks)
        and a.gather is b.gather
        and a.scatter is b.scatter
        and a.exchange is b.exchange
        for a, b in zip(step.micro_groups, before.micro_groups, strict=True)
    )


# -- OWNED -------------------------------------------------------------------------------------


def owned(step: Step) -> None:
    without_work = {p.name for p, variants in step.variants().items() if all(cut.elementwise for cut in variants)}
    for task in step.tasks:
        grid, owner = task.layout.grid, task.owner
        if task.placed in without_work:
            raise InvalidStep("elementwise tasks have no place in a step with owners", at=task.name)
        if (grid.size == 1) != (task.strategy is Strategy.LOCAL):
            raise InvalidStep(f"its strategy is {task.strategy} on a grid of {grid.size}", at=task.name)
        if task.strategy is Strategy.REPLICATED:
            if owner is not None:
                raise InvalidStep(f"every rank computes it, yet {owner} owns it", at=task.name)
        elif owner is None:
            raise InvalidStep(f"its strategy is {task.strategy}, but it has no owner", at=task.name)
        elif not (0 <= owner[0] < grid.replicas and 0 <= owner[1] < grid.shards):
            raise InvalidStep(f"its owner {owner} is outside of grid {grid}", at=task.name)


# -- GROUPED -----------------------------------------------------------------------------------


def grouped(step: Step) -> None:
    known, home = {t.name for t in step.tasks}, dict[str, int]()
    for i, group in enumerate(step.micro_groups):
        if group.index != i:
            raise InvalidStep(f"group {i} calls itself {group.index}", at=f"group {i}")
        if not group.tasks:
            raise InvalidStep("it has no tasks", at=f"group {i}")
        first: Grid | None = None
        for name in group.tasks:
            if name not in known:
                raise InvalidStep(f"there is no task {name!r}", at=f"group {i}")
            if name in home:
                raise InvalidStep(f"it is in group {home[name]} and in group {i}", at=name)
            home[name] = i
            own = step.task(name).layout.grid
            first = first or own
            if own is not first and own != first:  # to compare grids of thousands of ranks takes long
                raise InvalidStep(f"its grid is not that of the others in group {i}", at=name)
    for task in step.tasks:
        if task.name not in home:
            raise InvalidStep("it is in no group", at=task.name)


# -- ROUTED ------------------------------------------------------------------------------------


def routed(step: Step) -> None:
    cuts = {p.name: p for p in step.placed}
    exchanges = sum(len(group.exchanges) for group in step.micro_groups)
    sample = max(FEWEST_PAIRS, min(SAMPLED_PAIRS, MOST_PAIRS // max(1, exchanges)))
    for group in step.micro_groups:
        tasks, grid = [step.task(name) for name in group.tasks], step.grid_of(group)
        for phase, exchange in (
            (Phase.GATHER, group.gather),
            (Phase.SCATTER, group.scatter),
            (Phase.EXCHANGE, group.exchange),
        ):
            routes = wanted(phase, tasks, grid, cuts)
            where = f"{phase} of group {group.index}"
            if (exchange is not None) != bool(routes):
                raise InvalidStep("it exists, but has nothing to carry" if exchange else "it is missing", at=where)
            if exchange is not None:
                fused(exchange, phase, routes, grid, where, sample)


def wanted(phase: Phase, tasks: Iterable[Task], grid: Grid, cuts: dict[str, Placed]) -> list[tuple[Task, Wire]]:
    """The wires that have to travel in a phase, with their tasks."""
    if phase is Phase.GATHER:
        return [(t, w) for t in tasks for w in cuts[t.placed].gather if grid.shards > 1]
    needed = grid.shards > 1 if phase is Phase.SCATTER else grid.replicas > 1
    return [(t, w) for t in tasks for w in cuts[t.placed].scatter if needed and t.owner is not None]


def fused(
    exchange: Exchange, phase: Phase, routes: list[tuple[Task, Wire]], grid: Grid, where: str, sample: int
) -> None:
    if exchange.phase is not phase:
        raise InvalidStep(f"it says that it is a {exchange.phase}", at=where)
    counts = Counter((item.task, item.wire) for item in exchange.items)
    for task, wire in routes:
        if (times := counts.pop((task.name, wire), 0)) != 1:
            raise InvalidStep(f"wire {wire.name} of {task.name} is in it {times} times", at=where)
    if counts:
        task_name, wire = next(iter(counts))
        raise InvalidStep(f"wire {wire.name} of {task_name} should not be in it", at=where)
    pairs = some_pairs(phase, grid, sample)

    @cache
    def box_of(route: int, shard: int) -> Box:
        task, wire = routes[route]
        return wire.box(task.layout.boxes[shard])

    number = {(task.name, wire.name): i for i, (task, wire) in enumerate(routes)}
    by_home: dict[GridPosition | int | None, list[int]] = defaultdict(list)  # None: to everywhere
    for i, (task, _) in enumerate(routes):
        by_home[home(phase, task)].append(i)
    for source, target in pairs:
        pieces, size = exchange.block(source, target)
        at = f"block from {source} to {target} in {where}"
        aligned(pieces, size, at)
        shard = source[1] if phase is Phase.GATHER else target[1]
        end = target if phase is Phase.GATHER else source
        own = end[0] if phase is Phase.EXCHANGE else end
        missing = {i for i in (*by_home[own], *by_home[None]) if box_of(i, shard).numel}
        for piece in pieces:
            found = number.get((piece.task, piece.wire.name), -1)
            if found not in missing or piece.box != box_of(found, shard):
                raise InvalidStep(f"{piece.box} of {piece.task}.{piece.wire.name} does not belong there", at=at)
            missing.remove(found)
        if missing:
            task, wire = routes[first := min(missing)]
            raise InvalidStep(f"{box_of(first, shard)} of {task.name}.{wire.name} is missing", at=at)


def some_pairs(phase: Phase, grid: Grid, sample: int = SAMPLED_PAIRS) -> Iterator[tuple[GridPosition, GridPosition]]:
    """Pairs (source, target) of ranks that exchange blocks in a phase: all pairs, or a sample on large grids."""
    teams, size = (grid.shards, grid.replicas) if phase is Phase.EXCHANGE else (grid.replicas, grid.shards)
    total = teams * size * size
    stride = 1
    if grid.size > ALL_PAIRS_RANKS:
        stride = total // sample + 1
        while math.gcd(stride, grid.size) > 1:  # otherwise the same target would come up again and again
            stride += 1
    for i in range(0, total, stride):
        team, pair = divmod(i, size * size)
        source, target = divmod(pair, size)
        yield ((source, team), (target, team)) if phase is Phase.EXCHANGE else ((team, source), (team, target))


def home(phase: Phase, task: Task) -> GridPosition | int | None:
    """Where the values of a task go to or come from: the owner rank or, in an exchange, the owner's replica."""
    return task.owner[0] if phase is Phase.EXCHANGE and task.owner else task.owner


def aligned(pieces: Sequence[BlockSlice], size: int, where: str) -> None:
    """The pieces of a block follow one another without overlap, and each is aligned to its element size."""

    def fail(piece: BlockSlice, problem: str) -> NoReturn:
        raise InvalidStep(f"{piece.task}.{piece.wire.name} at byte {piece.offset} {problem}", at=where)

    end = 0
    for piece in sorted(pieces, key=lambda p: p.offset):
        if piece.offset % piece.wire.itemsize:
            fail(piece, f"is not aligned to {piece.wire.itemsize} bytes")
        if piece.offset < end:
            fail(piece, "overlaps the piece before it")
        end = piece.offset + piece.box.numel * piece.wire.itemsize
        if end > size:
            fail(piece, f"ends after its block of {size} bytes")


# -- BATCHED -----------------------------------------------------------------------------------


def batched(step: Step) -> None:
    cuts = {p.name: p for p in step.placed}
    for cut in step.placed:
        if cut.stacked is not None:
            where = f"stacked compute of cut {cut.name}"
            sound(cut.stacked.graph, where)
            returns(cut.stacked.graph, len(outputs(cut.compute)), where)
            returns(cut.stacked.graph, len(cut.stacked.outputs), where)
    for group in step.micro_groups:
        counts = Counter(name for batch in group.batches for name in batch.tasks)
        members = set(group.tasks)
        for name in (*group.tasks, *counts):
            if name not in members:
                raise InvalidStep(f"a batch of group {group.index} has a task of another", at=name)
            if counts[name] != 1:
                raise InvalidStep(f"it is in {counts[name]} batches of group {group.index}", at=name)
        for batch in group.batches:
            for name in batch.tasks:
                check_equal(batch, step.task(name))
            if batch.lane < 0 or (batch.lane and step.machine.device == "cpu"):
                raise InvalidStep(f"a batch of {batch.tasks[0]} is in lane {batch.lane}", at=f"group {group.index}")
            if batch.stacked and cuts[batch.placed].stacked is None:
                raise InvalidStep(
                    f"a batch is stacked, but cut {batch.placed} has no stacked graph",
                    at=f"group {group.index}",
                )


def check_equal(batch: Batch, task: Task) -> None:
    for what, own, expected in (
        ("owner", task.owner, batch.owner),
        ("cut", task.placed, batch.placed),
        ("parameter group", task.param_group, batch.param_group),
    ):
        if own != expected:
            raise InvalidStep(f"its {what} is {own}, that of its batch {expected}", at=task.name)


# -- SCHEDULED ---------------------------------------------------------------------------------


def scheduled(step: Step) -> None:
    at: dict[int, dict[Act, int]] = {group.index: {} for group in step.micro_groups}
    for i, event in enumerate(step.schedule):
        where = f"event {i}, {event.act} of group {event.micro_group}"
        if event.micro_group not in at:
            raise InvalidStep("there is no such group", at=where)
        if event.act in at[event.micro_group]:
            raise InvalidStep("it happens twice", at=where)
        at[event.micro_group][event.act] = i
    for group in step.micro_groups:
        found, expected = at[group.index], list(acts(group, bool(step.fetched(group))))
        if Act.MEET in found and not group.joins(step.grid_of(group)):
            expected.insert(0, Act.MEET)
        for act in expected:
            if act not in found:
                raise InvalidStep(f"{act} never happens", at=f"group {group.index}")
        for act in found:
            if act not in expected:
                raise InvalidStep(f"{act} of what does not exist", at=f"group {group.index}")
        for before, after in pairwise(expected):
            if found[before] > found[after]:
                raise InvalidStep(f"{after} comes before {before}", at=f"group {group.index}")
    meetings(step)
    slots(step)


def meetings(step: Step) -> None:
    """Exchanges connect all ranks that share tasks, or these ranks meet before any of them writes."""
    grids = {g.index: step.grid_of(g) for g in step.micro_groups}
    met = {grids[g.index].members() for g in step.micro_groups if g.joins(grids[g.index])}
    for event in step.schedule:
        ranks = grids[event.micro_group].members()
        if event.act is Act.MEET:
            met.add(ranks)
        elif event.act is Act.APPLY and len(ranks) > 1 and ranks not in met:
            raise InvalidStep(
                "its ranks are neither connected by exchanges nor meet before", at=f"group {event.micro_group}"
            )


def acts(group: MicroGroup, fetches: bool) -> Iterator[Act]:
    """The events of a micro-group, in order."""
    if fetches:
        yield Act.FETCH
    yield Act.PREPARE
    if group.gather:
        yield from (Act.START_GATHER, Act.WAIT_GATHER)
    yield Act.COMPUTE
    if group.scatter:
        yield from (Act.START_SCATTER, Act.WAIT_SCATTER)
    if group.exchange:
        yield from (Act.START_EXCHANGE, Act.WAIT_EXCHANGE)
    yield Act.APPLY
    if fetches:
        yield Act.STORE


def slots(step: Step) -> None:
    """No two buffers of a slot are in use at one event."""
    for buffer in step.buffers:
        if not 0 <= buffer.first <= buffer.last < len(step.schedule):
            raise InvalidStep(
                f"buffer {buffer.title!r} lives from event {buffer.first} to {buffer.last}",
                at=f"group {buffer.micro_group}",
            )
    order = sorted(step.buffers, key=lambda b: (b.slot, b.first))
    for a, b in pairwise(order):
        if a.slot == b.slot and b.first <= a.last:
            raise InvalidStep(
                f"{a.title!r} of group {a.micro_group} and {b.title!r} of group {b.micro_group} overlap",
                at=f"slot {a.slot}",
            )


# -- EMITTED -----------------------------------------------------------------------------------


def emitted(step: Step) -> None:
    if step.program is None:
        raise InvalidStep("it has no program", at=f"step @{step.optimizer}")
    try:
        step.program.module.graph.lint()
    except RuntimeError as error:
        raise InvalidStep(f"the rank program is malformed: {error}", at="program") from error


CHECKS: dict[Form, Callable[[Step], None]] = {
    Form.CAPTURED: captured,
    Form.PLACED: placed,
    Form.OWNED: owned,
    Form.GROUPED: grouped,
    Form.ROUTED: routed,
    Form.BATCHED: batched,
    Form.SCHEDULED: scheduled,
    Form.EMITTED: emitted,
}
