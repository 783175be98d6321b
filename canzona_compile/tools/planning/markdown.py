"""A forecast as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from canzona_compile.report.units import format_bytes, format_flops, format_seconds
from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.zero1_table import PHASES, PLANS, buckets_text, phase_rows, plans


def markdown(forecast: Forecast) -> str:
    """Write a forecast as a headline, tables of alternatives and templates, and a list of assumptions.

    Args:
        forecast: the figures of a plan made offline.

    Returns:
        Markdown as GitHub reads it.
    """
    return "\n".join(lines(forecast)) + "\n"


def lines(forecast: Forecast) -> Iterator[str]:
    """Write a forecast line by line."""
    mesh = ", ".join(f"{name}={size}" for name, size in forecast.mesh)
    yield f"## {forecast.optimizer}, {forecast.model} on {mesh}"
    yield ""
    exposed = max((r.exposed for r in forecast.simulation.ranks), default=0.0)
    step = f"Predicted step **{format_seconds(forecast.simulation.seconds)}** on {forecast.hardware.name}"
    if (period := forecast.period) is not None:
        yield (
            f"Predicted mean of {len(period.seconds)} steps **{format_seconds(period.mean)}** on "
            f"{forecast.hardware.name}. All other figures are those of the heaviest step."
        )
        yield ""
        step = f"Heaviest step **{format_seconds(period.worst)}**"
    yield (
        f"{step}, of which "
        f"{format_seconds(exposed)} are exposed communication; {forecast.matrices} matrices, max/mean load "
        f"{forecast.imbalance:.2f}, buffers {format_bytes(forecast.memory.buffers)}, plan "
        f"`{forecast.fingerprint[:12]}`."
    )
    yield ""
    if (own := forecast.local) is not None:
        yield (
            f"{' and '.join(own.optimizers)}: {own.parameters} parameters that each rank updates by itself; at most "
            f"{format_bytes(own.state)} of state and {format_seconds(own.seconds)} on a rank, after the predicted step."
        )
        yield ""
    if forecast.zero1 is not None:
        yield f"{buckets_text(forecast.zero1)}."
        yield ""
        yield from rows(PHASES, phase_rows(forecast.zero1))
        yield ""
        told = plans(forecast.alternatives)
        yield from rows(PLANS, ((f"**{name}**" if chosen else name, *cells) for chosen, (name, *cells) in told))
    else:
        yield from plain_plans(forecast)
    yield ""
    yield from rows(
        ("template", "matrices", "FLOPs each", "time each", "memory", "wire"),
        (
            (
                cell(t.name),
                str(t.tasks),
                format_flops(t.flops_value),
                format_seconds(t.seconds),
                format_bytes(t.memory_value),
                format_bytes(t.wire_value),
            )
            for t in forecast.templates
        ),
    )
    yield ""
    yield from (f"- {text}" for text in forecast.assumptions)


def plain_plans(forecast: Forecast) -> Iterator[str]:
    """Compare the plan with others."""
    yield from rows(
        ("plan", "step" if forecast.period is None else "heaviest step", "max/mean", "exposed", "wire", "buffers"),
        (
            (
                f"**{one.name}**" if one.chosen else one.name,
                format_seconds(one.seconds),
                f"{one.imbalance:.2f}",
                format_seconds(one.exposed),
                format_bytes(one.sent),
                format_bytes(one.peak),
            )
            for one in forecast.alternatives
        ),
    )


def rows(headers: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    """Write a table; its cells are Markdown."""
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in body:
        yield f"| {' | '.join(row)} |"


def cell(text: str) -> str:
    """Write a name so that it stays in its cell."""
    return text.replace("|", "\\|").replace("\n", " ")
