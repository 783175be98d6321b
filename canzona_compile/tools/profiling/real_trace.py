"""Measured steps as a trace, in the form of a forecast's: a process per rank, a thread per stream.

All ranks are on this machine and read one clock. The collectives of a step are spans of their own from their start to
the end of the wait, joined by arrows among the ranks that take part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.engine import COMPUTE, NODE, Simulation, Span
from canzona_compile.tools.planning.trace import written
from canzona_compile.tools.profiling.rank_profile import RankProfile

START, WAIT = "start ", "wait "


def real_trace(profiles: Sequence[RankProfile], model: str, optimizer: str, hardware: Hardware) -> dict[str, Any]:
    """Return the measured steps as the object form of a trace: `json.dump` it to a file."""
    flows: dict[tuple[Any, ...], int] = {}
    found = [span for own in profiles for span in spans_of(own, flows)]
    begin = min((span.start for span in found), default=0.0)
    moved = [replace(span, start=span.start - begin, end=span.end - begin) for span in found]
    seconds = max((span.end for span in moved), default=0.0)
    ranks = tuple(sorted(own.rank for own in profiles))
    return written(
        Simulation(seconds, (), ranks, tuple(sorted(moved, key=lambda s: (s.rank, s.start, s.stream))), ()),
        hardware,
        {
            "fingerprint": profiles[0].fingerprint,
            "model": model,
            "optimizer": optimizer,
            "ranks": len(ranks),
        },
    )


def spans_of(profile: RankProfile, flows: dict[tuple[Any, ...], int]) -> Iterator[Span]:
    """Yield what a rank did, and below it its collectives."""
    rank = profile.rank
    for number, step in enumerate(profile.steps):
        begun: dict[tuple[int, str], float] = {}
        for own in step.spans:
            names = profile.computed[number].get(own.group, ()) if own.act == "compute" else ()
            yield Span(rank, COMPUTE, own.act.replace(START, "begin "), own.group, own.start, own.end, names)
            phase = own.act.removeprefix(START).removeprefix(WAIT)
            transfer = profile.transfers[number].get((own.group, phase))
            if transfer is None:
                continue
            if own.act.startswith(START):
                begun[own.group, phase] = own.start
            elif (own.group, phase) in begun:
                team, sent = transfer
                flow = flows.setdefault((number, own.group, phase, team), len(flows))
                first = begun.pop((own.group, phase))
                yield Span(rank, NODE, f"{START}{phase}", own.group, first, own.end, (), sent, flow)
