"""Forecasts for tests of pages and traces: a small decoder under Muon on some ranks, and one with names to survive."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import canzona_compile
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.tools.planning.figures import Forecast

# What users may call a parameter, and what a page must survive.
NASTY = (
    "</script><script>window.broken = 1</script>",
    "<!-- <script> never ends",
    "<img src=x onerror='window.broken = 1'>",
    "quote\" and 'quote' & ampersand &lt; \\\" backslash \\",
    "$title ${data} {0} %s",
    "line one\nline two\u2028line three\u2029end",
    "名前.重み.🪨 \ud800 alone",
    "]]> --> */ // `${1}`",
)
# Of more elements than captures compare with an eager step, which takes a minute at these sizes.
SHAPES = {"self_attn.q_proj": (8192, 4096), "self_attn.k_proj": (4096, 5120), "mlp.up_proj": (12288, 4096)}


@cache
def forecast(ranks: int = 4, groups: int = 3) -> Forecast:
    """A plan of four layers on 1 x `ranks` shards, in about as many micro-groups, with alternatives on few ranks."""
    hardware = replace(named_hardware("h100"), ranks_per_node=max(1, min(8, ranks // 2)), measured=("products", "node"))
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(4) for name, shape in SHAPES.items()}
    return canzona_compile.plan(
        shapes,
        mesh={"fsdp": ranks},
        hardware=hardware,
        strategy="owner",
        micro_groups=groups,
        alternatives=ranks == 4,
    ).forecast


def nasty() -> Forecast:
    """One with names that no one should give."""
    found = forecast()
    names = dict(zip((task.name for task in found.tasks), NASTY, strict=False))
    spans = [replace(span, tasks=tuple(names.get(own, own) for own in span.tasks)) for span in found.simulation.spans]
    return replace(
        found,
        model=NASTY[0],
        optimizer=NASTY[2],
        assumptions=NASTY,
        templates=(replace(found.templates[0], name=NASTY[0]), *found.templates[1:]),
        tasks=tuple(replace(task, name=names.get(task.name, task.name)) for task in found.tasks),
        simulation=replace(found.simulation, spans=tuple(spans)),
    )
