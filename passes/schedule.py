"""The order of all events of a step; `lowering.memory_plan` then decides which buffers share memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.ir.step import Act, Event, Form, MicroGroup, Step
from canzona_compile.lowering.memory_plan import plan_buffers


@dataclass(frozen=True, slots=True)
class Schedule:
    """Software-pipeline the micro-groups, `depth` of them in flight.

    At depth 2 the gather of group k+1 is under way while k computes, and the scatter of k-1 as well.
    Nothing of a group is written before its last collective has arrived, so a collective that fails
    leaves every group that it belongs to, and all later ones, untouched.

    Ranks that share tasks but are not connected by exchanges, because all replicas compute everything, meet
    first: one that cannot run the step must not find the others updated.

    Attributes:
        depth: micro-groups in flight at once, from 1 on.
    """

    depth: int = 2

    name: ClassVar[str] = "schedule"
    requires: ClassVar[Form] = Form.BATCHED
    ensures: ClassVar[Form] = Form.SCHEDULED

    def __call__(self, step: Step) -> Step:
        meetings = (Event(Act.MEET, group.index) for group in silent(step))
        apart = step.machine.device != "cpu" and self.depth > 1
        events = (*meetings, *pipelined(step.micro_groups, self.depth, apart))
        buffers = plan_buffers(step, events, apart)
        return replace(step, form=Form.SCHEDULED, schedule=events, buffers=buffers, depth=self.depth)


def silent(step: Step) -> Iterator[MicroGroup]:
    """One group for each set of ranks that share tasks and that no exchanges connect."""
    grids = {group.index: step.task(group.tasks[0]).layout.grid for group in step.micro_groups}
    met = {grids[group.index].members() for group in step.micro_groups if group.joins(grids[group.index])}
    for group in step.micro_groups:
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
