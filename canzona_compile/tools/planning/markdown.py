"""A forecast as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from canzona_compile.analysis.flops import readable, readable_bytes
from canzona_compile.report.charts import duration
from canzona_compile.tools.planning.figures import Forecast


def markdown(forecast: Forecast) -> str:
    """Headline, alternatives, templates and assumptions."""
    return "\n".join(lines(forecast)) + "\n"


def lines(forecast: Forecast) -> Iterator[str]:
    mesh = ", ".join(f"{name}={size}" for name, size in forecast.mesh)
    yield f"## {forecast.optimizer}, {forecast.model} on {mesh}"
    yield ""
    exposed = max((r.exposed for r in forecast.simulation.ranks), default=0.0)
    hidden = f", and {duration(forecast.hidden)} more under the next forward pass" if forecast.hidden else ""
    yield (
        f"Predicted step **{duration(forecast.simulation.seconds)}** on {forecast.hardware.name}, of which "
        f"{duration(exposed)} are exposed communication{hidden}; {forecast.matrices} matrices, max/mean load "
        f"{forecast.imbalance:.2f}, buffers {readable_bytes(forecast.memory.buffers)}, plan "
        f"`{forecast.fingerprint[:12]}`."
    )
    yield ""
    yield from rows(
        ("plan", "step", "max/mean", "exposed", "wire", "buffers"),
        (
            (
                f"**{one.name}**" if one.chosen else one.name,
                duration(one.seconds),
                f"{one.imbalance:.2f}",
                duration(one.exposed),
                readable_bytes(one.sent),
                readable_bytes(one.peak),
            )
            for one in forecast.alternatives
        ),
    )
    yield ""
    yield from rows(
        ("template", "matrices", "FLOPs each", "seconds each", "memory", "wire"),
        (
            (
                cell(t.name),
                str(t.tasks),
                readable(t.flops_value),
                duration(t.seconds),
                readable_bytes(t.memory_value),
                readable_bytes(t.wire_value),
            )
            for t in forecast.templates
        ),
    )
    yield ""
    yield from (f"- {text}" for text in forecast.assumptions)


def rows(headers: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in body:
        yield f"| {' | '.join(row)} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
