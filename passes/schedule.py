"""The order of all events of a step; `lowering.memory_plan` then decides which buffers share memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import ClassVar

from canzona_compile.analysis.lanes import batch_times, divided
from canzona_compile.analysis.roofline import graph_time
from canzona_compile.ir.step import Act, Batch, Event, Form, MicroGroup, Step
from canzona_compile.ir.storage import Storage
from canzona_compile.lowering.memory_plan import plan_buffers
from canzona_compile.machine.hardware import hardware_of


@dataclass(frozen=True, slots=True)
class Schedule:
    """Software-pipeline the micro-groups, `depth` of them in flight.

    At depth 2 the gather of micro-group k+1 and the scatter of micro-group k-1 are under way while micro-group k
    computes. Parameters and state of a micro-group are written only after its last collective has arrived. A
    collective that fails therefore leaves its own micro-group and all later ones untouched.

    Some ranks share tasks but no exchange connects them, because all replicas compute everything. They meet first,
    so that no rank updates its parameters if another one cannot run the step.

    On CUDA the batches of a micro-group that are too small for the GPU are divided among lanes, which compute side by
    side (`analysis.lanes`).

    Attributes:
        depth: how many micro-groups are in flight at once; at least 1, with which nothing runs beside anything else.
    """

    depth: int = 2

    name: ClassVar[str] = "schedule"
    requires: ClassVar[Form] = Form.BATCHED
    ensures: ClassVar[Form] = Form.SCHEDULED

    def __call__(self, step: Step) -> Step:
        meetings = (Event(Act.MEET, group.index) for group in silent(step))
        apart = step.machine.device != "cpu" and self.depth > 1
        fetched = {group.index: step.fetched(group) for group in step.micro_groups}
        events = (*meetings, *pipelined(step.micro_groups, self.depth, apart, fetched))
        buffers = plan_buffers(step, events, apart)
        groups = in_lanes(step) if apart else step.micro_groups
        return replace(
            step, form=Form.SCHEDULED, micro_groups=groups, schedule=events, buffers=buffers, depth=self.depth
        )


def in_lanes(step: Step) -> tuple[MicroGroup, ...]:
    """The micro-groups of a step, with the batches of each owner in lanes."""
    hardware = hardware_of(step.machine)
    compute = {p.name: graph_time(p.compute, hardware, p.kind.matrices) for p in step.placed}

    def with_lanes(group: MicroGroup) -> MicroGroup:
        found: list[Batch] = []
        for _, own in groupby(group.batches, key=lambda batch: batch.owner):
            batches = tuple(own)
            lanes = divided(batch_times(batches, compute, hardware), hardware)
            found += [replace(batch, lane=lane) for batch, lane in zip(batches, lanes, strict=True)]
        return replace(group, batches=tuple(found))

    return tuple(map(with_lanes, step.micro_groups))


def silent(step: Step) -> Iterator[MicroGroup]:
    """One micro-group for each set of ranks that share tasks and that no exchanges connect."""
    grids = {group.index: step.grid_of(group) for group in step.micro_groups}
    met = {grids[group.index].members() for group in step.micro_groups if group.joins(grids[group.index])}
    for group in step.micro_groups:
        members = grids[group.index].members()
        if len(members) > 1 and members not in met:
            met.add(members)
            yield group


Fetched = Mapping[int, Sequence[Storage]]  # by micro-group: how the state is stored that it fetches
NOTHING: Fetched = MappingProxyType({})


def early(group: MicroGroup, apart: bool, fetched: Fetched) -> bool:
    """Whether a micro-group fetches state before its turn: from the host, on a stream of its own.

    Links to the host are slow. State on the device would only be open for longer.
    """
    return apart and any(storage.host for storage in fetched.get(group.index, ()))


def stages(group: MicroGroup, apart: bool = False, fetched: Fetched = NOTHING) -> list[list[Act]]:
    """The events of a micro-group, cut into stages where it may wait for a collective.

    Args:
        apart: whether apply runs on another stream than compute. That stream would wait before it unpacks the next
            micro-group.
    """
    fetches, ahead = bool(fetched.get(group.index)), early(group, apart, fetched)
    found: list[list[Act]] = [[Act.FETCH]] if fetches else [[]]
    if ahead:
        found.append([])
    found[-1].append(Act.PREPARE)
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
    if apart and group.gather and len(found) == 2 + ahead:
        found.append([])
    found[-1].append(Act.APPLY)
    if fetches:
        found[-1].append(Act.STORE)
    return found


def pipelined(
    groups: tuple[MicroGroup, ...], depth: int, apart: bool = False, fetched: Fetched = NOTHING
) -> Iterator[Event]:
    """Order the events of all micro-groups: stage j of the i-th micro-group runs at time i + j * (depth - 1).

    At equal times, early stages of late micro-groups come first. The next gather thus starts before the computation
    with which it overlaps. Micro-groups without collectives come last, so that they are not written if a peer failed.
    """
    lag = depth - 1
    remote = [g for g in groups if g.exchanges]
    timed = [
        (i + j * lag, j if lag else i, i, j, group.index, stage)
        for i, group in enumerate(remote)
        for j, stage in enumerate(stages(group, apart, fetched))
    ]
    for *_, index, stage in sorted(timed, key=lambda t: t[:4]):
        yield from (Event(act, index) for act in stage)
    alone = []
    for i, group in enumerate(g for g in groups if not g.exchanges):
        ahead = early(group, apart, fetched)  # while the micro-group before it computes
        for act in (act for stage in stages(group, False, fetched) for act in stage):
            alone.append((i - (ahead and act is Act.FETCH), act is not Act.FETCH, Event(act, group.index)))
    yield from (event for *_, event in sorted(alone, key=lambda t: t[:2]))
