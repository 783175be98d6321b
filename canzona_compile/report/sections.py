"""Sections that the pages of runs and of plans have in common."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from canzona_compile.report.page import (
    Bar,
    Bars,
    Block,
    Detail,
    Fill,
    Listing,
    PageTable,
    Section,
    TimelineEvent,
    Words,
    note,
    rows_of,
)
from canzona_compile.report.schema import LoadReport, MeasuredReport
from canzona_compile.report.units import format_bytes, format_seconds, plural

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


def group_section(groups: Sequence[object], where: Sequence[tuple[str, int]]) -> Section:
    """Show what each micro-group moves and computes. The fill in its row is the legend of all charts.

    Args:
        groups: reports or forecasts of them, in the order of the step. A line sums up those after `MOST_ROWS`.
        where: for each of them, the ranks that share its tasks, and how many tasks it has.
    """
    sent = rows_of(groups, "gather_bytes", "scatter_bytes", "exchange_bytes")
    rows = tuple(
        (Fill(index), index, *own, *(size or None for size in sizes), flops)
        for (index, flops), own, sizes in zip(rows_of(groups, "index", "makespan_flops"), where, sent, strict=True)
    )
    headers = ("", "#:n", "grid", "matrices:n", "gather:B", "scatter:B", "exchange:B", "busiest owner:FLOP")
    parts: list[Block] = [PageTable(headers, rows[:MOST_ROWS], "Micro-groups")] if rows else []
    if hidden := len(rows[MOST_ROWS:]):
        every = Section(f"All {len(rows)} micro-groups", (PageTable(headers, rows, "All micro-groups"),), folded=True)
        size = format_bytes(sum(map(sum, sent[MOST_ROWS:])))
        parts += [note(f"and {hidden} more, {size}", "dim"), Detail((every,))]
    return Section("Micro-groups", tuple(parts), "sent together; grid: replicas x shards; bytes of all ranks")


def event(act: str, stream: str, number: int, begin: float, end: float) -> TimelineEvent:
    """Show an act of a rank or a link.

    Args:
        act: an act of the schedule: "compute", "start gather", "prepare", ...
        stream: "compute" for the work of a processor, else the name of a link.
        number: the index of its micro-group.
        begin, end: seconds from the begin of the step.
    """
    word = act.split()[-1]
    return TimelineEvent(begin, end, "elementwise" if stream == "compute" != word else word, number)


def classes_of(values: Sequence[float], most: int) -> tuple[list[int], list[tuple[float, float]]]:
    """Count values in `most` equal classes, or in one if all are equal but for rounding.

    Returns:
        How many values are in each class, and where each begins and ends.
    """
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


def rates_label(assumed: Sequence[str]) -> str:
    """Say in two words whether all rates of a prediction were measured."""
    return "assumed rates" if assumed else "measured rates"


def rates_text(assumed: Sequence[str]) -> str:
    """Say which rates predictions use."""
    if not assumed:
        return "predicted by simulation, with rates that were measured on this machine"
    return f"predicted by simulation with assumed rates, not measured on this machine: {', '.join(assumed)}"


def error_text(error: float | None) -> str:
    """An error in percent, with its sign."""
    return "-" if error is None else f"{error:+.0%}"
