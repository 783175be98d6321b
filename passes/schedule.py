"""The order of everything, and which buffers may share memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from canzona_compile.ir.step import Act, Buffer, Event, Form, MicroGroup, Step


@dataclass(frozen=True, slots=True)
class Schedule:
    """Software-pipeline the micro-groups, `depth` of them in flight.

    At depth 2 the gather of group k+1 is under way while k computes, and the scatter of k-1 as well.
    Nothing of a group is written before its last collective has arrived, so a collective that fails
    leaves every group that it belongs to, and all later ones, untouched.

    Ranks that share tasks but are not connected by exchanges, because all replicas compute everything, meet
    first: one that cannot run the step must not find the others updated.

    Buffers get slots by their lives in that order, as a linear-scan register allocator gives registers.
    """

    depth: int = 2

    name: ClassVar[str] = "schedule"
    requires: ClassVar[Form] = Form.BATCHED
    ensures: ClassVar[Form] = Form.SCHEDULED

    def __call__(self, step: Step) -> Step:
        meetings = (Event(Act.MEET, group.index) for group in silent(step))
        apart = step.machine.device != "cpu" and self.depth > 1
        events = (*meetings, *pipelined(step.groups, self.depth, apart))
        buffers = tuple(color(lives(step, events, apart)))
        return replace(step, form=Form.SCHEDULED, schedule=events, buffers=buffers, depth=self.depth)


def silent(step: Step) -> Iterator[MicroGroup]:
    """One group for each set of ranks that share tasks and that no exchanges connect."""
    grids = {group.index: step.task(group.tasks[0]).layout.grid for group in step.groups}
    met = {grids[group.index].members() for group in step.groups if group.joins(grids[group.index])}
    for group in step.groups:
        members = grids[group.index].members()
        if len(members) > 1 and members not in met:
            met.add(members)
            yield group


def stages(group: MicroGroup, apart: bool = False) -> list[list[Act]]:
    """A group's events, cut where it may wait for a collective.

    Args:
        apart: does another stream apply than the one that computes? It would wait before it unpacks the next group.
    """
    found: list[list[Act]] = [[Act.PREPARE]]
    if group.gather:
        found[-1].append(Act.START_GATHER)
        found.append([Act.WAIT_GATHER])
    found[-1].append(Act.COMPUTE)
    for wanted, start, wait in (
        (group.scatter, Act.START_SCATTER, Act.WAIT_SCATTER),
        (group.exchange, Act.START_EXCHANGE, Act.WAIT_EXCHANGE),
    ):
        if wanted:
            found[-1].append(start)
            found.append([wait])
    if apart and group.gather and len(found) == 2:
        found.append([])
    found[-1].append(Act.APPLY)
    return found


def pipelined(groups: tuple[MicroGroup, ...], depth: int, apart: bool = False) -> Iterator[Event]:
    """Stage j of the i-th group at time i + j * (depth - 1); at one time, early stages of late groups first.

    Starting the next gather before computing is what overlaps them. Groups without collectives come
    last: a peer that failed must not find them written.
    """
    lag = depth - 1
    remote = [g for g in groups if g.exchanges]
    timed = [
        (i + j * lag, j if lag else i, i, j, group.index, stage)
        for i, group in enumerate(remote)
        for j, stage in enumerate(stages(group, apart))
    ]
    for *_, index, stage in sorted(timed, key=lambda t: t[:4]):
        yield from (Event(act, index) for act in stage)
    for group in groups:
        if not group.exchanges:
            yield from (Event(act, group.index) for stage in stages(group) for act in stage)


def lives(step: Step, events: tuple[Event, ...], apart: bool) -> Iterator[Buffer]:
    """Every buffer from the first event that writes it to the last that reads it; slots still open.

    Computed values may be views of what was gathered; where they are used at apply (tasks without a scatter, or
    new resident state) the gathered values live until then. Where a stream of its own unpacks the next group while
    this one computes, both have gathered values.
    """
    at = {event: i for i, event in enumerate(events)}
    following = dict(successors(step, events)) if apart else {}

    def life(group: MicroGroup, use: str, first: Act, last: Act) -> Buffer:
        return Buffer(group.index, use, at[Event(first, group.index)], at[Event(last, group.index)], -1)

    resident = {p.name for p in step.placed if p.resident}
    for group in step.groups:
        tasks = [step.task(name) for name in group.tasks]
        late = not group.scatter or any(t.owner is None or t.placed in resident for t in tasks)
        if group.gather:
            yield life(group, "gather send", Act.PREPARE, Act.WAIT_GATHER)
            yield life(group, "gather recv", Act.START_GATHER, Act.COMPUTE)
            own = life(group, "gathered", Act.COMPUTE, Act.APPLY if late else Act.COMPUTE)
            after = at[Event(Act.COMPUTE, following.get(group.index, group.index))]
            yield replace(own, last=max(own.last, after))
        if group.scatter:
            yield life(group, "scatter send", Act.COMPUTE, Act.WAIT_SCATTER)
            last = Act.START_EXCHANGE if group.exchange else Act.APPLY
            yield life(group, "scatter recv", Act.START_SCATTER, last)
        if group.exchange:
            first = Act.START_EXCHANGE if group.scatter else Act.COMPUTE
            yield life(group, "exchange send", first, Act.WAIT_EXCHANGE)
            yield life(group, "exchange recv", Act.START_EXCHANGE, Act.APPLY)


def successors(step: Step, events: tuple[Event, ...]) -> Iterator[tuple[int, int]]:
    """Groups, and those that the same ranks compute next."""
    grids = {group.index: step.task(group.tasks[0]).layout.grid for group in step.groups}
    order = [event.group for event in events if event.act is Act.COMPUTE]
    for grid in dict.fromkeys(grids.values()):
        yield from pairwise(index for index in order if grids[index] == grid)


def color(buffers: Iterator[Buffer]) -> Iterator[Buffer]:
    """The lowest slot that is free for a buffer's whole life, in order of first use."""
    busy_until: list[int] = []
    for buffer in sorted(buffers, key=lambda b: (b.first, b.group, b.use)):
        slot = next((i for i, last in enumerate(busy_until) if last < buffer.first), len(busy_until))
        if slot == len(busy_until):
            busy_until.append(-1)
        busy_until[slot] = buffer.last
        yield replace(buffer, slot=slot)
