"""Compares an optimizer that is distributed already with the plain one: as both run, and with floats of 64 bits."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from canzona_compile.compat.telling import tell
from canzona_compile.errors import CanzonaError, without_pages
from canzona_compile.tools.processes import A_DAY, ProcessCall, Worker, asked, failure, rank_calls, started
from canzona_compile.tools.verification.findings import LeafDifference, merged
from canzona_compile.tools.verification.steps_as_is import AsIsOutcome, Part, PlainOutcome, run_as_is, run_plain_as_is
from canzona_compile.tools.verification.verdict import AsIs, Gap, VerdictName, judged
from canzona_compile.tools.verification.workers import Order


class Stopped(Exception):
    """The distributed optimizer raised, or hangs: what to say of it."""

    def __init__(self, verdict: VerdictName, error: CanzonaError) -> None:
        super().__init__(without_pages(str(error)))
        self.verdict = verdict


def compared(order: Order, ranks: int, limit: float) -> tuple[str, tuple[LeafDifference, ...], AsIs]:
    """The name of the distributed optimizer, its parameters, and the verdict.

    Args:
        limit: seconds without progress after which processes are ended.
    """
    with tempfile.TemporaryDirectory(prefix="canzona-journal-") as folder, contextlib.ExitStack() as stack:
        once, twice = (str(Path(folder, name)) for name in ("once", "twice"))
        beside = ProcessCall("plain", run_plain_as_is, (order, once, None))
        calls, _store = rank_calls(ranks, run_as_is, (order, once), A_DAY)
        workers = stack.enter_context(started([beside, *calls]))
        try:
            plain, found = stepped(workers, [beside, *calls], limit, once)
        except Stopped as stopped:
            return "the optimizer", (), AsIs(stopped.verdict, error=str(stopped))
        leaves = merged([own.leaves for own in found])
        if all(leaf.equal for leaf in leaves):
            result = AsIs("equal bits")
        else:
            tell("repeating the steps in float64")
            again = replace(order, double=True)
            beside = ProcessCall("plain", run_plain_as_is, (again, twice, once))
            calls = [ProcessCall(call.name, run_as_is, (rank, again, twice)) for rank, call in enumerate(calls)]
            double, undecided = list[Gap](), ""
            try:
                double = gaps(*stepped(workers, [beside, *calls], limit, twice))
            except (CanzonaError, Stopped) as error:
                undecided = str(error).splitlines()[0].rstrip(".")
            result = replace(judged(gaps(plain, found), double), undecided=undecided)
    most = max(found, key=lambda own: own.bytes_sent)
    kinds = sorted({name for own in found for name in own.calls})
    each = {name: max(own.calls.get(name, 0.0) for own in found) for name in kinds}
    return found[0].optimizer, leaves, replace(result, bytes_sent=most.bytes_sent, collectives=each)


def stepped(
    workers: Sequence[Worker], calls: Sequence[ProcessCall], limit: float, folder: str
) -> tuple[PlainOutcome, list[AsIsOutcome]]:
    """Make the calls of the plain process and of the ranks, which share a folder."""
    Path(folder).mkdir()
    ends = asked(workers, calls, limit, renewed=True)
    by_worker = {end.process: end for end in ends}
    plain, *others = (by_worker[worker] for worker in workers)
    failed, late = ([end for end in ends if end.how in how] for how in (("raised", "died"), ("hung",)))
    # Ranks wait for the first page before they build: if there is none, no optimizer of theirs has failed.
    if plain in failed or not any(Path(folder).iterdir()):
        raise failure([plain] if plain in failed else failed[:1] or late, limit)
    if failed:
        error = failure(failed[:1], limit)
        named = CanzonaError(f"{failed[0].process.name}: {error.problem}", at=error.at, hint=error.hint)
        raise Stopped("error", named)
    if plain in late:
        raise failure([plain], limit)
    if late:
        where = ", ".join(f"{end.process.name} ({end.process.told})" for end in late)
        hint = "their stacks are above"
        raise Stopped("hang", CanzonaError(f"no progress within {limit:g} seconds", at=where, hint=hint))
    return plain.value, [end.value for end in others]


def gaps(plain: PlainOutcome, ranks: Sequence[AsIsOutcome]) -> list[Gap]:
    """The distance of every parameter after every step, from those of the parts that ranks hold."""
    found = []
    for at, (moved, rounding) in enumerate(zip(plain.moved, plain.rounding, strict=True)):
        for name in moved:
            parts: dict[Part, float] = {}
            for part, apart in (own.apart[at][name] for own in ranks):
                parts[part] = max(apart, parts.get(part, 0.0))
            whole = math.hypot(*parts.values())
            found.append(Gap.of(name, at + 1, plain.precision, whole, rounding[name], moved[name]))
    return found
