"""The figures of a plan: for people (rich prints them) and for machines (`to_json`).

`figures_of` computes what the reports of runs and offline plans have in common, from a step. It counts the FLOPs of the
graphs that run; it counts symmetric products in full, and no padding.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from canzona_compile.analysis.step_time import load_of
from canzona_compile.errors import InvalidStep
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.layout import Box, Grid
from canzona_compile.ir.step import (
    Act,
    Event,
    Exchange,
    Form,
    MicroGroup,
    Phase,
    Placed,
    Step,
    Strategy,
    Task,
)
from canzona_compile.machine.hardware import hardware_of
from canzona_compile.report.measured import measured_report, predict
from canzona_compile.report.page import PageModel
from canzona_compile.report.printable import Printable
from canzona_compile.report.run_page import run_page
from canzona_compile.report.schema import (
    BucketReport,
    DataParallelReport,
    Facts,
    GridReport,
    GroupReport,
    LoadReport,
    LocalTask,
    RunFigures,
    RunReport,
    TaskReport,
    TemplateReport,
    WireReport,
)
from canzona_compile.report.sections import measured_remark
from canzona_compile.report.units import plural

__all__ = ["SCHEMA", "Facts", "LocalTask", "Report", "headline", "make_report"]

SCHEMA = 1


@dataclass(frozen=True, repr=False, kw_only=True)
class Report(RunReport, Printable):
    """The figures of a plan. Print it, show it in a notebook, or save its `to_json()`."""

    def to_json(self) -> str:
        """Return all figures as JSON, with the number of the schema; times in seconds, sizes in bytes."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def to_dict(self) -> dict[str, Any]:
        """The content of `to_json` as plain lists, dicts, strings and numbers."""
        found: dict[str, Any] = json.loads(self.to_json())
        return found

    def page(self) -> PageModel:
        return run_page(self)

    def __repr__(self) -> str:
        return f"<{headline(self)}>"


def make_report(step: Step, facts: Facts) -> Report:
    """Work out the figures of a step."""
    if step.form < Form.SCHEDULED:
        raise InvalidStep(f"a step of form {step.form.name} has no schedule to report")
    measured = measured_report(facts.measurement, step)
    alone = measured is not None and measured.predicted_seconds is None
    prediction = None if alone else predict(step, hardware_of(step.machine))
    return Report(
        **{field.name: getattr(facts, field.name) for field in fields(RunFigures)},
        **figures_of(step, step),
        machine=step.machine,
        predicted_seconds=None if prediction is None else prediction.seconds,
        schedule=() if prediction is None else prediction.spans,
        measured=measured,
    )


def figures_of(step: Step, owned: Step) -> dict[str, Any]:
    """The fields of `Figures` but the measured ones.

    Args:
        owned: the same step with the tasks of all ranks: under ZeRO-1 a scheduled step has those of one replica.
    """
    placed = {p.name: p for p in step.placed}
    group_of = {name: group.index for group in step.micro_groups for name in group.tasks}
    groups = tuple(report_group(step, group, placed) for group in step.micro_groups)
    loads = rank_loads(owned, group_of)
    shared = [t for t in step.tasks if t.layout.grid.size > 1]
    elements = sum(Box.whole(t.shape).numel for t in shared)
    sent = sum(g.gather_bytes + g.scatter_bytes + g.exchange_bytes for g in groups)
    taken = {t.placed for t in step.tasks}
    return {
        "optimizer": step.optimizer,
        "depth": step.depth,
        "collectives_per_step": sum(g.collectives for g in groups),
        "wire_bytes_per_element": sent / elements if elements else 0.0,
        "imbalance": imbalance(loads),
        "templates": tuple(report_template(p, step.tasks) for p in step.placed if p.name in taken),
        "micro_groups": groups,
        "tasks": tuple(report_task(t, placed[t.placed], group_of[t.name]) for t in step.tasks),
        "loads": loads,
        "data_parallel": data_parallel_report(step.buckets),
    }


def headline(report: Report) -> str:
    """The plan in one line, for the log, and what was measured of it."""
    return "; ".join(filter(None, (plan_line(report), measured_remark(report.measured))))


def plan_line(report: Report) -> str:
    """The plan in one line."""
    count = plural(len(report.tasks), "matrix", "matrices")
    eager = f"{len(report.fallbacks)} eager"
    if not report.tasks:
        alone = plural(len(report.local), "parameter")
        return f"canzona: no matrices to distribute, {alone} without communication, {eager}"
    if not report.collectives_per_step:
        return f"canzona: {count}, all local, no collectives, {eager}"
    owners = {t.owner for t in report.tasks if t.strategy == Strategy.OWNER}
    where = [f"{count} -> {plural(len(owners), 'owner')}" if owners else count]
    for strategy, words in ((Strategy.REPLICATED, "on every rank"), (Strategy.LOCAL, "local")):
        if found := sum(t.strategy == strategy for t in report.tasks):
            where.append(f"{found} {words}" if found < len(report.tasks) else words)
    return (
        f"canzona: {', '.join(where)} in {plural(len(report.micro_groups), 'micro-group')}, "
        f"{plural(report.collectives_per_step, 'collective')}, "
        f"{report.wire_bytes_per_element:.2f} bytes sent per element, "
        f"the busiest rank computes {report.imbalance:.2f}x the mean, {eager}"
    )


def report_template(placed: Placed, tasks: Sequence[Task]) -> TemplateReport:
    users = [t for t in tasks if t.placed == placed.name]
    owned = any(t.owner is not None for t in users)
    moves = {
        "gather": placed.kind.sharded,
        "scatter": owned and (placed.kind.sharded or placed.kind.replicated),
    }
    wires = tuple(
        WireReport(way, w.name, w.shape, name_of(w.dtype), Box.whole(w.shape).numel * w.itemsize)
        for way, found in (("gather", placed.gather), ("scatter", placed.scatter))
        for w in found
        if moves[way]
    )
    return TemplateReport(
        name=placed.name,
        kind=str(placed.kind),
        shape=placed.template.shape,
        dtype=name_of(placed.template.dtype),
        tasks=len(users),
        formula=str(placed.cost),
        flops=placed.flops,
        wires=wires,
        resident=placed.resident,
        interpreted=placed.template.interpreted,
    )


def name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def report_task(task: Task, placed: Placed, group: int) -> TaskReport:
    return TaskReport(
        name=task.name,
        shape=task.shape,
        template=task.placed,
        layout=task.layout.placements,
        owner=None if task.owner is None else task.ranks[0],
        micro_group=group,
        strategy=str(task.strategy),
        flops=placed.flops,
        reason=task.reason,
    )


def report_group(step: Step, group: MicroGroup, placed: Mapping[str, Placed]) -> GroupReport:
    tasks, grid = [step.task(name) for name in group.tasks], step.grid_of(group)
    sent = {e.phase: wire_bytes(e, grid) for e in group.exchanges}
    return GroupReport(
        index=group.index,
        grid=GridReport(grid.replicas, grid.shards, grid.ranks),
        tasks=group.tasks,
        gather_bytes=sent.get(Phase.GATHER, 0),
        scatter_bytes=sent.get(Phase.SCATTER, 0),
        exchange_bytes=sent.get(Phase.EXCHANGE, 0),
        makespan_flops=round(load_of(tasks, grid, placed).compute_flops),
        collectives=len(group.exchanges) + (Event(Act.MEET, group.index) in step.schedule),
    )


def wire_bytes(exchange: Exchange, grid: Grid) -> int:
    """Count the bytes that ranks send to other ranks in an exchange.

    The result is the sum of `Exchange.block` over all pairs of different ranks. Most blocks are empty; this finds the
    others from the owners and does not visit each pair.
    """
    alike: dict[Any, int] = defaultdict(int)  # items with one end, wire and set of fragments
    boxes = {id(item.boxes): item.boxes for item in exchange.items}
    for item in exchange.items:
        # The bytes that one rank sends to one other rank: keyed by owner, or by source replica in an exchange.
        end = item.owner[0] if exchange.phase is Phase.EXCHANGE and item.owner else item.owner
        alike[end, item.wire, id(item.boxes)] += 1
    sizes = {
        (wire, key): np.array([wire.box(box).numel * wire.itemsize for box in boxes[key]], dtype=np.int64)
        for wire, key in {key[1:] for key in alike}
    }
    blocks: dict[Any, Any] = defaultdict(int)  # by end, an array over shards
    for (end, wire, key), count in alike.items():
        blocks[end] = blocks[end] + count * sizes[wire, key]
    total, unit = 0, exchange.alignment
    for end, by_shard in blocks.items():
        padded = -(-by_shard // unit) * unit
        if exchange.phase is Phase.EXCHANGE:
            total += (grid.replicas - 1) * int(padded.sum())
        elif end is None:
            total += (grid.shards - 1) * grid.replicas * int(padded.sum())
        else:
            total += int(padded.sum() - padded[end[1]])
    return total


def rank_loads(step: Step, group_of: Mapping[str, int]) -> tuple[LoadReport, ...]:
    """Return the load of each rank that is in a grid of two or more ranks, sorted by rank."""
    grids = {id(t.layout.grid): t.layout.grid for t in step.tasks if t.layout.grid.size > 1}
    flops: dict[int, dict[int, int]] = {rank: defaultdict(int) for grid in grids.values() for rank in grid.members()}
    tasks: dict[int, int] = defaultdict(int)
    work: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)  # FLOPs of tasks by ranks and micro-group
    for task in step.tasks:
        if id(task.layout.grid) in grids:
            work[task.ranks, group_of[task.name]].append(step.placed_of(task).flops)
    for (ranks, group), costs in work.items():
        total = sum(costs)
        for rank in ranks:
            flops[rank][group] += total
            tasks[rank] += len(costs)
    return tuple(
        LoadReport(rank, tasks[rank], sum(found.values()), dict(sorted(found.items())))
        for rank, found in sorted(flops.items())
    )


def imbalance(loads: Sequence[LoadReport]) -> float:
    """FLOPs of the busiest rank over those of the mean rank; 1 if no rank computes anything."""
    total = sum(load.flops for load in loads)
    return max(load.flops for load in loads) * len(loads) / total if total else 1.0


def data_parallel_report(buckets: Sequence[Bucket]) -> DataParallelReport | None:
    """Work out the figures of the buckets of a step.

    Args:
        buckets: all buckets; their gradients travel in their own dtype.

    Returns:
        The figures; None if there are no buckets.
    """
    if not buckets:
        return None
    owners = len(buckets[0].lengths)
    found = tuple(
        BucketReport(
            b.index,
            name_of(b.dtype),
            len(b.names),
            b.elements,
            b.padding,
            b.uniform,
            b.lengths,
        )
        for b in buckets
    )
    moved = sum(b.starts[-1] * b.dtype.itemsize for b in buckets) * (owners - 1) // owners
    return DataParallelReport(owners, found, moved, 0, moved)
