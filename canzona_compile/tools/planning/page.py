"""A forecast as one HTML file, which opens from disk and loads nothing.

`page/` holds its parts: a frame, a style sheet, scripts. All figures are in one block of JSON; the scripts put them
on the page as text, never as markup, since parameters are called what users like. A policy in the file allows its own
style and script, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, TypeVar

from canzona_compile.ir.hardware import RATES
from canzona_compile.report.schema import LoadReport
from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.trace import tracks
from canzona_compile.tools.simulation.figures import STREAMS, Simulation

SCHEMA = 1
SCRIPTS = (
    "words.js",
    "elements.js",
    "chart.js",
    "timeline.js",
    "gestures.js",
    "drawing.js",
    "sections.js",
    "start.js",
)
STYLES = ("page.css", "figures.css", "tables.css", "narrow.css")
MOST_BARS = 64  # ranks with a bar of their own, cut by micro-group
# Within JSON these stand in strings only. Escaped, they can neither end the script element nor begin a comment in it.
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})

T = TypeVar("T", bound=Hashable)


def page(forecast: Forecast) -> str:
    """The whole file; write it in UTF-8."""
    data = json.dumps(payload(forecast), separators=(",", ":"), allow_nan=False)
    style, script = "".join(map(part, STYLES)), program()
    policy = f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; base-uri 'none'"
    title = html.escape(f"Forecast: {forecast.model} with {forecast.optimizer}")
    return Template(part("page.html")).substitute(
        policy=html.escape(policy, quote=False),
        title=title.encode("ascii", "xmlcharrefreplace").decode(),
        style=style,
        script=script,
        data=data.translate(ESCAPES),
    )


@cache
def part(name: str) -> str:
    return (files("canzona_compile.tools.planning") / "page" / name).read_text(encoding="utf-8")


@cache
def program() -> str:
    """All scripts in a scope of their own."""
    return '(() => {\n"use strict";\n' + "\n".join(map(part, SCRIPTS)) + "})();\n"


def digest(text: str) -> str:
    """How a content security policy names the element that holds this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def payload(forecast: Forecast) -> dict[str, Any]:
    """What the page knows, fit for JSON: infinite numbers are null, long lists are columns."""
    hardware = forecast.hardware
    return {
        "schema": SCHEMA,
        "fingerprint": forecast.fingerprint,
        "model": forecast.model,
        "optimizer": forecast.optimizer,
        "matrices": forecast.matrices,
        "elements": forecast.elements,
        "elementwise": forecast.elementwise,
        "mesh": forecast.mesh,
        "options": forecast.options,
        "imbalance": finite(forecast.imbalance),
        "depth": forecast.depth,
        "collectives": forecast.collectives,
        "hidden": finite(forecast.hidden),
        "hardware": {**hardware.to_dict(), "rates": RATES, "digest": hardware.digest},
        "templates": [finite(asdict(t)) for t in forecast.templates],
        "tasks": {
            "name": [t.name for t in forecast.tasks],
            "shape": interned(t.shape for t in forecast.tasks),
            "template": interned(t.template for t in forecast.tasks),
            "layout": interned(t.layout for t in forecast.tasks),
            "strategy": interned(t.strategy for t in forecast.tasks),
            **columns(forecast.tasks, "owner", "group", "flops"),
        },
        "groups": [asdict(g) for g in forecast.groups],
        "loads": loads(forecast.loads),
        "memory": finite(asdict(forecast.memory)),
        "simulation": simulation(forecast),
        "alternatives": [finite(asdict(a)) for a in forecast.alternatives],
        "assumptions": forecast.assumptions,
    }


def simulation(forecast: Forecast) -> dict[str, Any]:
    """Spans name their matrices by number, and those that compute the same ones share the list."""
    found: Simulation = forecast.simulation
    number = {task.name: i for i, task in enumerate(forecast.tasks)}
    strange = dict.fromkeys(name for span in found.spans for name in span.tasks if name not in number)
    number |= {name: len(forecast.tasks) + i for i, name in enumerate(strange)}
    tasks = interned(span.tasks for span in found.spans)
    return {
        "seconds": found.seconds,
        "ranks": columns(found.ranks, "rank", "compute", "exposed", "bubble", "finish", "peak", "sent"),
        "shown": found.shown,
        "streams": STREAMS,
        "others": list(strange),
        "spans": {
            **columns(found.spans, "rank", "group", "start", "end", "bytes", "flow"),
            "stream": [STREAMS.index(span.stream) for span in found.spans],
            "row": tracks(found.spans),
            "act": interned(span.act for span in found.spans),
            "tasks": {"of": [[number[name] for name in names] for names in tasks["of"]], "at": tasks["at"]},
        },
        "memory": columns(found.memory, "rank", "at", "bytes"),
    }


def loads(found: Sequence[LoadReport]) -> dict[str, Any]:
    few = len(found) <= MOST_BARS
    return {
        **columns(found, "rank", "tasks", "flops"),
        "by_group": [list(load.by_group.items()) for load in found] if few else None,
    }


def columns(items: Sequence[object], *names: str) -> dict[str, list[Any]]:
    return {name: [rounded(getattr(item, name)) for item in items] for name in names}


def rounded(value: Any) -> Any:
    """Times to a picosecond, which halves what thousands of them take."""
    return finite(round(value, 12)) if isinstance(value, float) else value


def interned(values: Iterable[T]) -> dict[str, list[Any]]:
    """Each different value once, and which one stands where."""
    places: dict[T, int] = {}
    at = [places.setdefault(value, len(places)) for value in values]
    return {"of": list(places), "at": at}


def finite(value: Any) -> Any:
    """JSON has no infinity: what is impossible takes null seconds."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(own) for key, own in value.items()}
        case list() | tuple():
            return [finite(own) for own in value]
    return value
