"""The HTML of a forecast's page: the template `page.html` filled in.

The file holds names that users chose only as escaped text or as JSON. A policy in the file allows the scripts that it
contains, by their hashes, and forbids loading anything.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from canzona_compile.machine.hardware import RATES, Curve, Hardware, Link
from canzona_compile.report.measured_table import error_text, measured_caption, rates_text
from canzona_compile.report.units import format_bytes, format_flops, plural
from canzona_compile.tools.planning.figures import Alternative, Forecast
from canzona_compile.tools.planning.page_charts import charts, metrics
from canzona_compile.tools.planning.page_style import period, share, themes
from canzona_compile.tools.planning.page_timeline import task_lists

RATE_WORDS = {
    "products": "matrix products",
    "bandwidth": "memory bandwidth",
    "transposed": "memory bandwidth, transposed",
    "memory": "memory of a rank",
    "launch": "launch of an operator",
    "product_calls": "call of a matrix product",
    "host": "bookkeeping on the host",
    "node": "links within a node",
    "network": "links between nodes",
}
STRATEGY_WORDS = {"owner": "one rank each", "replicated": "every rank computes all"}


def document(forecast: Forecast) -> str:
    """Return the whole file; write it in UTF-8."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {"period": period, "bytes": format_bytes, "flops": format_flops, "share": share}
    environment.filters |= {"formula": formula, "against": against, "error": error_text}
    environment.filters |= {"caption": measured_caption, "rates_text": rates_text}
    environment.globals |= {"plural": plural, "digest": digest, "strategy_words": STRATEGY_WORDS}
    figures = {name: figure.to_plotly_json() for name, figure in charts(forecast).items()}
    template = environment.from_string(
        files("canzona_compile.tools.planning").joinpath("page.html").read_text(encoding="utf-8"),
        {"charts": figures, "plotly": get_plotlyjs()},
    )
    text = template.render(
        forecast=forecast,
        hardware=forecast.hardware,
        simulation=forecast.simulation,
        exposed=exposed(forecast),
        metrics=list(metrics(forecast)),
        rates=list(rates(forecast.hardware)),
        data={
            "figures": figures,
            "themes": {name: theme.to_plotly_json() for name, theme in themes().items()},
            **matrices(forecast),
        },
    )
    return text.encode("utf-8", "xmlcharrefreplace").decode()  # half of a surrogate pair is not a character


def digest(script: str) -> str:
    """Return the name by which a content security policy allows this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def matrices(forecast: Forecast) -> dict[str, Any]:
    """Describe all matrices, and the lists of matrices that spans compute, as JSON can hold them.

    Returns:
        "names": the names of all matrices; those that only spans have come last.
        "kinds": properties that matrices share, in words: shape, strategy, FLOPs, template and layout.
        "matrices": for each matrix of the forecast, its place in "kinds", its owner or None, and its micro-group.
        "lists": each list as places in "names".
    """
    tasks, lists = forecast.tasks, task_lists(forecast.simulation)
    number = {
        name: i for i, name in enumerate(dict.fromkeys([t.name for t in tasks] + [n for own in lists for n in own]))
    }
    kinds: dict[tuple[str, ...], int] = {}
    rows = []
    for t in tasks:
        shape = " \u00d7 ".join(f"{n:,}" for n in t.shape)
        kind = (shape, t.strategy, format_flops(t.flops), t.template, t.layout)
        rows.append((kinds.setdefault(kind, len(kinds)), t.owner, t.group))
    return {
        "names": list(number),
        "kinds": list(kinds),
        "matrices": rows,
        "lists": [[number[name] for name in own] for own in lists],
    }


def formula(text: str) -> Markup:
    """Typeset `10*m**3 + 2*m*n`."""
    raised = re.sub(r"\*\*(\w+|\([^()]*\))", r"<sup>\1</sup>", str(escape(text)))
    return Markup(raised.replace("*", "\u2009"))


def against(alternative: Alternative, forecast: Forecast) -> str:
    """Say how much longer the step of a plan is than that of the chosen plan: " (+12%)"."""
    base = next((own.seconds for own in forecast.alternatives if own.chosen), 0.0)
    if not base or alternative.chosen or not math.isfinite(alternative.seconds):
        return ""
    ratio = alternative.seconds / base
    return f" ({ratio:.3g} times)" if ratio > 3 else f" ({ratio - 1:+.0%})"


def exposed(forecast: Forecast) -> float:
    """Return the seconds that the busiest rank waits for communication."""
    planned = (own.exposed for own in forecast.alternatives if own.chosen)
    busiest = max(forecast.simulation.ranks, key=lambda rank: rank.compute, default=None)
    return next(planned, busiest.exposed if busiest else 0.0)


def rates(hardware: Hardware) -> Iterator[tuple[str, bool, list[str], str]]:
    """Describe each rate: its name, whether it was measured, its values, and its source."""
    values = {
        "products": [f"{name}: {curve(own, 'FLOP/s')}" for name, own in hardware.products],
        "factorizations": [f"{name}: {curve(own, 'FLOP/s')}" for name, own in hardware.factorizations],
        "bandwidth": [metric(hardware.bandwidth, "B/s")],
        "transposed": [curve(hardware.transposed, "B/s")],
        "memory": [metric(hardware.memory, "B")],
        "launch": [metric(hardware.launch, "s")],
        "product_calls": [f"{name}: {metric(own, 's')}" for name, own in hardware.product_calls],
        "host": [f"{metric(hardware.host, 's')} a matrix"],
        "node": [link(hardware.node)],
        "network": [link(hardware.network)],
    }
    sources = dict(hardware.sources)
    for name in RATES:
        words = RATE_WORDS.get(name, name)
        yield words, name in hardware.measured, values[name], sources.get(name, "no source given")


def curve(own: Curve, unit: str) -> str:
    (small, low), (large, high) = own.points[0], own.points[-1]
    if len(own.points) == 1:
        return metric(low, unit)
    return f"{metric(low, unit)} at {small:,.0f} to {metric(high, unit)} at {large:,.0f}"


def link(own: Link) -> str:
    return f"{metric(own.bandwidth, 'B/s')}, {metric(own.latency, 's')} each, {metric(own.per_peer, 's')} more per peer"


def metric(value: float, unit: str) -> str:
    """Write a value with its unit and a metric prefix: "1.5 TB/s"."""
    powers = (
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1, ""),
        (1e-3, "m"),
        (1e-6, "µ"),
        (1e-9, "n"),
    )
    size, prefix = next((power for power in powers if value >= power[0]), (1, ""))
    return f"{value / size:.3g} {prefix}{unit}"
