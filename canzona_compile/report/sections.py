"""The sections that the pages of runs and of offline plans have in common."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from canzona_compile.errors import some
from canzona_compile.machine.hardware import Hardware, Link
from canzona_compile.report.page import (
    Bar,
    Bars,
    Block,
    Cell,
    Detail,
    Fill,
    Lane,
    Listing,
    PageTable,
    Section,
    TimelineEvent,
    Words,
    note,
    rows_of,
)
from canzona_compile.report.schema import (
    DataParallelReport,
    GridReport,
    GroupReport,
    LoadReport,
    MeasuredReport,
    StateFigure,
    TaskReport,
    TemplateReport,
)
from canzona_compile.report.units import (
    format_bytes,
    format_dtype,
    format_flops,
    format_seconds,
    format_shape,
    plural,
)
from canzona_compile.simulation.engine import COMPUTE, STREAMS, Span

MOST_ROWS = 40  # of a table; more are summed up
CALIBRATE = (
    "To compare this with predictions, measure the rates of this machine: canzona-compile calibrate -o mine.json, then "
    'wrap(..., hardware="mine.json").'
)
SMALL = 0.002  # of a step: phases that take less are left out if nothing predicts them


def names_by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Collect the names that share a reason, from pairs of a name and its reason, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, reason in pairs:
        found[reason].append(name)
    return found


def formula_text(formula: str) -> str:
    """Write a sympy expression as people write it: "4 m n^2" for "4*m*n**2"."""
    return formula.replace("**", "^").replace("*", " ")


def bullets(sentences: Sequence[str]) -> tuple[Block, ...]:
    """List sentences, each with a bullet; nothing if there are none."""
    return (Listing(tuple(("", sentence) for sentence in sentences)),) if sentences else ()


def load_section(loads: Sequence[LoadReport], *more: Block) -> Section:
    """Show the FLOPs of every rank by micro-group, and more below."""
    groups = sorted({group for load in loads for group in load.by_group})
    values = [tuple(load.by_group.get(group, 0) for group in groups) for load in loads]
    counts = [plural(load.tasks, "matrix", "matrices") for load in loads]
    found = tuple(Bar(load.rank, own, (said,)) for load, own, said in zip(loads, values, counts, strict=True))
    drawn = Bars("Work per rank", "FLOP", tuple((f"micro-group {g}", g) for g in groups), found, of="rank")
    return Section(
        "Load",
        (*([drawn] if loads else []), *more),
        "FLOPs of each rank per step, compared with the mean",
    )


def group_section(groups: Sequence[GroupReport]) -> Section:
    """Show what each micro-group moves and computes; a line sums up those after `MOST_ROWS`.

    The fill in its row is the legend of all charts.
    """
    sent = rows_of(groups, "gather_bytes", "scatter_bytes", "exchange_bytes")
    rows = tuple(
        (Fill(g.index), g.index, grid_name(g.grid), len(g.tasks), *(size or None for size in sizes), g.makespan_flops)
        for g, sizes in zip(groups, sent, strict=True)
    )
    headers = ("", "#:n", "grid", "matrices:n", "gather:B", "scatter:B", "exchange:B", "busiest owner:FLOP")
    parts: list[Block] = [PageTable(headers, rows[:MOST_ROWS], "Micro-groups")] if rows else []
    if hidden := len(rows[MOST_ROWS:]):
        every = Section(f"All {len(rows)} micro-groups", (PageTable(headers, rows, "All micro-groups"),), folded=True)
        size = format_bytes(sum(map(sum, sent[MOST_ROWS:])))
        parts += [note(f"and {hidden} more, {size}", "dim"), Detail((every,))]
    return Section("Micro-groups", tuple(parts), "sent together; grid: replicas x shards; bytes of all ranks")


def lanes(
    of: str, spans: Sequence[Span], draw: Callable[[Span], TimelineEvent], detail: bool = False
) -> Iterator[Lane]:
    """A lane for each stream that is busy."""
    for stream in STREAMS:
        if own := tuple(draw(span) for span in spans if span.stream == stream):
            yield Lane(of, stream, own, detail)


def event(span: Span) -> TimelineEvent:
    """Show an act of a rank or a link."""
    word = span.act.split()[-1]
    kind = "elementwise" if span.stream == COMPUTE != word else word
    return TimelineEvent(span.start, span.end, kind, span.group)


def classes_of(values: Sequence[float], most: int) -> tuple[list[int], list[tuple[float, float]]]:
    """Count values in `most` equal classes, or in one if all are equal but for rounding."""
    low, high = min(values), max(values)
    if math.isclose(low, high, rel_tol=1e-9):
        return [len(values)], [(high, high)]
    counts, ends = np.histogram(values, most, (low, high))
    return counts.tolist(), list(pairwise(ends.tolist()))


def rows_without_overlap(stretches: Sequence[tuple[float, float]]) -> list[int]:
    """The lowest row for each stretch, from its begin to its end, in which it overlaps no other one."""
    found, free = [0] * len(stretches), list[float]()  # when each row is free again
    for i in sorted(range(len(stretches)), key=stretches.__getitem__):
        begin, end = stretches[i]
        found[i] = next((row for row, until in enumerate(free) if until <= begin), len(free))
        free[found[i] : found[i] + 1] = [end]
    return found


def bucket_section(own: DataParallelReport | None) -> Section:
    """Show what each bucket holds and how even its shards are; nothing without ZeRO-1."""
    caption = "reduced together; what each data-parallel rank owns"
    return Section("Buckets", () if own is None else tuple(buckets(own)), caption)


def buckets(own: DataParallelReport) -> Iterator[Block]:
    rows = []
    for row in own.buckets[:MOST_ROWS]:
        dtype: torch.dtype = getattr(torch, row.dtype)
        size, *ends = (n * dtype.itemsize for n in (row.elements, min(row.shards), max(row.shards)))
        padding = f"{row.padding / max(1, row.elements):.1%}"
        rows.append((row.index, row.dtype, row.parameters, size, padding, "equal" if row.uniform else "uneven", *ends))
    headers = ("#:n", "dtype", "parameters:n", "size:B", "padding:>", "shards", "shortest:B", "longest:B")
    yield PageTable(headers, tuple(rows), "Buckets")
    if hidden := own.buckets[MOST_ROWS:]:
        yield note(f"and {len(hidden)} more", "dim")
    elements, padding_of_all = (sum(getattr(b, what) for b in own.buckets) for what in ("elements", "padding"))
    yield note(
        f"each of {plural(own.owners, 'owner')} sends {format_bytes(own.backward_bytes)} in backward, "
        f"{own.step_bytes} B in the step, {format_bytes(own.forward_bytes)} after it; "
        f"padding {padding_of_all / max(1, elements):.1%}"
    )


def grid_name(grid: GridReport) -> str:
    """Name a grid by its replicas x shards and their ranks: "2x4: 0-7"."""
    return f"{grid.replicas}x{grid.shards}: {spans([r for row in grid.ranks for r in row])}"


def spans(ranks: Sequence[int], most: int = 2) -> str:
    """Write ranks as spans, "0-3,8"; those after the first few spans are counted."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in found]
    more = sum(map(len, found[most:]))
    return ",".join(texts[:most]) + (f",+{more}" if more else "")


def task_section(tasks: Sequence[TaskReport]) -> Section:
    """List the matrices, and below them why they have their strategies; where there is room, all of them to search."""
    every = tuple(
        (t.name, format_shape(t.shape), t.strategy, owner_of(t), t.micro_group, t.flops, t.template, t.layout)
        for t in tasks
    )
    headers = ("matrix", "shape:>", "strategy", "owner", "micro-group:n", "FLOPs:FLOP", "template", "layout")
    table = PageTable(headers, every, "Matrices", search="part of a name, a template, rank 3 ...")
    folded = Section("Matrices", (table,), plural(len(every), "matrix", "matrices"), folded=True)
    more = (Detail((folded,)),) if tasks else ()
    return Section("Tasks", (*task_rows(tasks), *more), "the matrices that each rank updates, largest first")


def owner_of(task: TaskReport) -> str:
    return "every rank" if task.owner is None else f"rank {task.owner}"


def task_rows(tasks: Sequence[TaskReport]) -> Iterator[Block]:
    counts = Counter((task.strategy, task.reason) for task in tasks)
    labels = {
        (strategy, reason): f"{strategy} {mark(i)}" if len(counts) > 1 else strategy
        for i, (strategy, reason) in enumerate(counts)
    }
    rows: list[tuple[Cell, ...]] = []
    for shown, hidden in by_owner(tasks):
        for i, task in enumerate(shown):
            owner = "" if i else owner_of(task)
            label = labels[task.strategy, task.reason]
            shape = format_shape(task.shape)
            rows.append((Words(owner, "bold"), task.name, shape, task.micro_group, task.flops, label))
        if hidden:
            flops = format_flops(sum(task.flops for task in hidden))
            rows.append(("", Words(f"  and {len(hidden)} more, {flops}", "dim")))
    if rows:
        headers = ("owner", "matrix", "shape:>", "micro-group:n", "FLOPs:FLOP", "strategy")
        yield PageTable(headers, tuple(rows), "Tasks", names=1)
    for (strategy, reason), count in counts.items():
        yield note(f"{labels[strategy, reason]} ({count}): {reason or 'no reason given'}", "dim")


def by_owner(tasks: Sequence[TaskReport]) -> Iterator[tuple[Sequence[TaskReport], Sequence[TaskReport]]]:
    """Group matrices by owner, largest first, in about MOST_ROWS rows.

    Yields:
        For each owner, the matrices to show and those to sum up. Without room for two rows per owner, this yields each
        of the largest matrices alone, then the rest.
    """
    order = sorted(tasks, key=lambda task: -task.flops)
    owned: dict[int, list[TaskReport]] = defaultdict(list)
    for task in order:
        owned[-1 if task.owner is None else task.owner].append(task)
    if len(tasks) <= MOST_ROWS:
        yield from ((found, ()) for _, found in sorted(owned.items()))
    elif 2 * len(owned) > MOST_ROWS:
        yield from (([task], ()) for task in order[:MOST_ROWS])
        yield (), order[MOST_ROWS:]
    else:
        most = MOST_ROWS // len(owned) - 1
        for _, found in sorted(owned.items()):
            shown = len(found) if len(found) == most + 1 else most  # summing up takes a row, too
            yield found[:shown], found[shown:]


def mark(i: int) -> str:
    """Number things by letters: a, b, ..., z, a2, ..."""
    return chr(ord("a") + i % 26) + (str(i // 26 + 1) if i >= 26 else "")


def cost_section(found: Sequence[TemplateReport], more: Mapping[str, Sequence[float]] | None = None) -> Section:
    """List templates, and the formulas that they share."""
    if not found:
        return Section("Cost", ())
    formulas = list(dict.fromkeys(map(formula, found)))
    letters = [Words(mark(formulas.index(formula(t))), "bold") for t in found]
    rows = rows_of(found, "name", "tasks", "flops")
    moved = [(wires(t, "gather"), wires(t, "scatter")) for t in found]
    further = more or {}
    headers = ("", "template", "matrices:n", "FLOPs each:FLOP", "gather", "scatter", *further)
    every = zip(letters, rows, moved, *further.values(), strict=True)
    cells = tuple((letter, *row, *own, *numbers) for letter, row, own, *numbers in every)
    homes = names_by_reason((t.name, ", ".join(t.resident)) for t in found if t.resident)
    return Section(
        "Cost",
        (
            PageTable(headers, cells, "Templates", names=1),
            Listing(tuple((Words(f"{mark(i)} =", "bold"), Words(own, "formula")) for i, own in enumerate(formulas))),
            *(note(f"state that only the owner keeps: {own} of {some(names)}", "dim") for own, names in homes.items()),
        ),
        "FLOPs of one m x n matrix, and the bytes sent for it",
    )


def state_section(found: Sequence[StateFigure]) -> Section:
    """List the leaves of the state on this rank, with how they are stored and what that takes."""
    if not found:
        return Section("State", ())
    rows = tuple(
        (own.leaf, format_dtype(own.dtype), own.stored or "-", own.tensors, own.bytes, own.plain_bytes) for own in found
    )
    headers = ("leaf", "dtype", "stored as", "tensors:n", "bytes:B", "in its own dtype:B")
    saved = sum(own.bytes for own in found), sum(own.plain_bytes for own in found)
    words = f"on this rank: {format_bytes(saved[0])} in place of {format_bytes(saved[1])}"
    return Section("State", (PageTable(headers, rows),), words)


def formula(template: TemplateReport) -> str:
    """Write a template's FLOPs as "10 m^3 + 20 m^2 n", or say that there is no graph to count."""
    if template.interpreted:
        return f"eager, elements counted: {template.interpreted}"
    return formula_text(template.formula)


def wires(template: TemplateReport, direction: str) -> str:
    """Name the values of one matrix that travel in a direction, and their sizes: "bf16 8 KiB"."""
    found = [wire for wire in template.wires if wire.direction == direction]
    dtypes = dict.fromkeys(format_dtype(wire.dtype) for wire in found)
    return f"{'+'.join(dtypes)} {format_bytes(sum(wire.bytes for wire in found))}" if found else "-"


# -- measured steps ----------------------------------------------------------------------------


def measured_section(report: MeasuredReport | None) -> Section:
    """Show measured steps: a row per phase, the whole step below, predictions beside if there are some."""
    if report is None:
        return Section("Measured", ())
    caption = f"{plural(report.steps, 'step')} on {plural(report.ranks, 'rank')}, by {report.clock}"
    return Section("Measured", tuple(measured_parts(report)), caption)


def measured_parts(report: MeasuredReport) -> Iterator[Block]:
    whole, columns = report.predicted_seconds, 5 if report.predicted_seconds is None else 7
    rows = [
        (
            *(Words(p.name, about=p.about), p.mean, p.worst, f"{format_seconds(p.slowest)} ({p.slowest_rank})"),
            *(p.skew, p.predicted, error_text(p.error)),
        )[:columns]
        for p in report.phases
        if p.mean >= SMALL * report.seconds or p.predicted
    ]
    seconds = [format_seconds(s) for s in (report.seconds, report.worst_seconds, whole or 0.0)]
    total = [Words(own, "bold") for own in ("step", *seconds[:2], "", "", seconds[2], error_text(report.error))]
    headers = ("phase", "mean:s", "longest step:s", "slowest rank:>", "skew:n", "predicted:s", "error:>")
    yield PageTable(headers[:columns], (*rows, tuple(total[:columns])), "Measured phases")
    yield note(
        f"computing waited {format_seconds(report.exposed)} for communication, "
        f"{format_seconds(report.exposed_worst)} on the rank that waited longest"
    )
    if report.overlapped:
        yield note(f"{format_seconds(report.overlapped)} of it at the same time on several streams", "dim")
    yield note(CALIBRATE if whole is None else rates_text(()), "dim")


def measured_remark(report: MeasuredReport | None) -> str:
    """The measured step and its prediction, if it has one, for the headline; empty if nothing was measured."""
    if report is None:
        return ""
    measured = f"measured step {format_seconds(report.seconds)}"
    if report.predicted_seconds is None:
        return measured
    return f"{measured}, simulated {format_seconds(report.predicted_seconds)} ({error_text(report.error)})"


def rates_label(hardware: Hardware) -> str:
    """Say in a few words whether the rates of a prediction were measured."""
    if hardware.here:
        return "rates that ranks measured before this plan"
    return "assumed rates" if hardware.assumed else "measured rates"


def links_text(hardware: Hardware) -> str:
    """Say what links ranks measured."""
    own = hardware.node
    if hardware.network != own:
        return f"links measured: {link_text(own)} within a node, {link_text(hardware.network)} between nodes"
    return f"links measured: {link_text(own)}; {hardware.overlap:.0%} of an exchange runs beside computation"


def link_text(link: Link) -> str:
    return f"{format_bytes(link.bandwidth)}/s, {format_seconds(link.latency)}"


def rates_text(assumed: Sequence[str]) -> str:
    """Say which rates predictions use."""
    if not assumed:
        return "predicted by simulation, with rates that were measured on this machine"
    return f"predicted by simulation with assumed rates, not measured on this machine: {', '.join(assumed)}"


def error_text(error: float | None) -> str:
    """An error in percent, with its sign."""
    return "-" if error is None else f"{error:+.0%}"
