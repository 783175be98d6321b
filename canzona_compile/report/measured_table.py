"""Shows measured steps as a table: a row per phase, the whole step below, predictions beside."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from canzona_compile.report.schema import MeasuredReport
from canzona_compile.report.sections import columns
from canzona_compile.report.units import format_seconds, plural

SMALL = 0.002  # of a step: phases that take less are left out if nothing predicts them


def measured_table(report: MeasuredReport | None) -> list[RenderableType]:
    """Show what was measured; nothing if nothing was."""
    if report is None:
        return []
    table = columns("phase", ">mean", ">longest step", ">slowest rank", ">skew", ">predicted", ">error")
    for row in report.phases:
        if row.mean < SMALL * report.seconds and not row.predicted:
            continue
        table.add_row(
            Text(row.name),
            Text(format_seconds(row.mean)),
            Text(format_seconds(row.worst)),
            Text(f"{format_seconds(row.slowest)} ({row.slowest_rank})"),
            Text(f"{row.skew:.2f}"),
            Text("-" if row.predicted is None else format_seconds(row.predicted)),
            Text(error_text(row.error)),
        )
    table.add_row(
        Text("step", "bold"),
        Text(format_seconds(report.seconds), "bold"),
        Text(format_seconds(report.worst_seconds), "bold"),
        "",
        "",
        Text(format_seconds(report.predicted_seconds), "bold"),
        Text(error_text(report.error), "bold"),
    )
    waits = (
        f"computing waited {format_seconds(report.exposed)} for communication, "
        f"{format_seconds(report.exposed_worst)} on the rank that waited longest"
    )
    lines: list[RenderableType] = [table, Text(waits)]
    if report.overlapped:
        lines.append(Text(f"{format_seconds(report.overlapped)} of it at the same time on several streams", "dim"))
    lines.append(Text(rates_text(report.assumed), "dim"))
    return lines


def measured_caption(report: MeasuredReport | None) -> str:
    """Say what was measured, and how."""
    if report is None:
        return ""
    return f"{plural(report.steps, 'step')} on {plural(report.ranks, 'rank')}, by {report.clock}"


def measured_remark(report: MeasuredReport | None) -> str:
    """The measured step and its prediction in one line, for the headline; empty if nothing was measured."""
    if report is None:
        return ""
    return (
        f"measured step {format_seconds(report.seconds)}, simulated {format_seconds(report.predicted_seconds)} "
        f"({error_text(report.error)}, {rates_label(report.assumed)})"
    )


def rates_label(assumed: Sequence[str]) -> str:
    """Say in two words whether all rates of a prediction were measured."""
    return "assumed rates" if assumed else "measured rates"


def rates_text(assumed: Sequence[str]) -> str:
    """Say which rates predictions use."""
    if not assumed:
        return "predicted by simulation, with rates that were measured on this machine"
    return f"predicted by simulation; assumed rates: {', '.join(assumed)}"


def error_text(error: float | None) -> str:
    """An error in percent, with its sign."""
    return "-" if error is None else f"{error:+.0%}"
