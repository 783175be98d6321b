"""Whose distributed optimizer takes the steps of its plain form? Ours and others', on gloo ranks.

    python benchmarks/rivals.py
    python benchmarks/rivals.py --only 'dion*' --ranks 2

For each optimizer and layout that its page claims, on 2 and 4 ranks, `canzona_compile.verify(as_is=True)` compares it
with its own plain form: with matrices that divide evenly, that do not, and that leave ranks without rows; then on 4
ranks, resumed from 2. `--page FILE` also writes the tables in Markdown. dion and Meta's Shampoo are not on the package
index: have checkouts on PYTHONPATH. Meta's Shampoo needs Python 3.12.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores

from rich.console import Console
from rich.table import Table

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.tools import processes
from canzona_compile.tools.processes import run_ranks
from canzona_compile.tools.verification.steps_as_is import run_as_is
from rival_builds import ALL, NOT_TRIED, RIVALS, SHAPES, VERIFY_LAYOUT, Rival, build, resumed, save_first, shapes_of

RANKS = (2, 4)
STEPS = 4
LIMIT = 180.0  # seconds without progress
MARKS = {"equal bits": "equal", "equal to rounding": "rounding"}


@dataclass(frozen=True, slots=True)
class Found:
    """One comparison: the verdict in words, and what a step sends, in bytes per element of the rank that sends most."""

    said: str
    detail: str = ""
    bytes_per_element: float | None = None
    collectives: str = ""

    @property
    def same(self) -> bool:
        """Whether it is the same algorithm."""
        return self.said.startswith(tuple(MARKS.values()))


@dataclass(frozen=True, slots=True)
class Row:
    """An optimizer in a layout on some ranks: what was found, by shapes, and of a resumed run."""

    rival: Rival
    layout: str
    ranks: int
    found: dict[str, Found]


def compare(function: Any, layout: str, ranks: int, **given: str) -> Found:
    """What `verify` finds of what a function builds."""
    build_of = partial(function, layout=layout, **given)
    try:
        result = canzona_compile.verify(
            build_of, as_is=True, layout=VERIFY_LAYOUT[layout], ranks=ranks, steps=STEPS, limit=LIMIT
        )
    except CanzonaError as error:
        return Found("plain form fails", str(error))
    found = result.as_is
    assert found is not None
    said = MARKS.get(found.verdict, found.verdict)
    if found.gaps:
        worst = found.gaps[-1]
        said += f", {worst.apart:.0e} after step {worst.step}" if said != "rounding" else f", {found.gaps[0].apart:.0e}"
    calls = ", ".join(f"{count:.3g} {name}" for name, count in found.collectives.items())
    elements = sum(rows * columns for rows, columns in shapes_of(given["shapes"]))
    return Found(said, found.error, found.bytes_sent / elements, calls)


def row_of(rival: Rival, layout: str, ranks: int) -> Row:
    """All comparisons of a row: of all shapes in one model, and of each where that says too little."""
    found = {ALL: compare(build, layout, ranks, rival=rival.name, shapes=ALL)}
    if found[ALL].same:
        found |= dict.fromkeys(SHAPES, found[ALL])
    else:
        found |= {shapes: compare(build, layout, ranks, rival=rival.name, shapes=shapes) for shapes in SHAPES}
    good = [shapes for shapes, one in found.items() if one.same]
    if good and ranks == max(RANKS):
        found["resumed"] = compare_resumed(rival, layout, ranks, good[0])
    return Row(rival, layout, ranks, found)


def compare_resumed(rival: Rival, layout: str, ranks: int, shapes: str) -> Found:
    """The same after a checkpoint of half as many ranks."""
    given = {"rival": rival.name, "shapes": shapes}
    with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
        try:
            run_ranks(ranks // 2, save_first, ({**given, "layout": layout}, folder), LIMIT)
        except CanzonaError as error:
            return Found("cannot save", str(error))
        return compare(resumed, layout, ranks, **given, folder=folder)


def rows(only: str, ranks: tuple[int, ...]) -> Iterator[Row | tuple[Rival, str]]:
    """Every row, or why there is none."""
    for rival in RIVALS.values():
        if not fnmatchcase(rival.name, only):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(rival.package)
        except (ImportError, SyntaxError) as error:
            yield rival, f"not installed: {error}"
            continue
        yield from (row_of(rival, layout, n) for layout in rival.layouts for n in ranks if layout != "hsdp" or n > 2)


# -- what is shown ---------------------------------------------------------------------------------


def cells(row: Row) -> list[str]:
    """A row of the table, below its optimizer."""
    ran = [one for one in row.found.values() if one.bytes_per_element is not None and one.said != "error"]
    first = next(iter(ran), Found(""))
    sent = "" if first.bytes_per_element is None else f"{first.bytes_per_element:.1f}"
    verdicts = [row.found[name].said if name in row.found else "" for name in (*SHAPES, "resumed")]
    return [row.layout, str(row.ranks), *verdicts, sent, first.collectives]


HEAD = ("optimizer", "layout", "ranks", *SHAPES, "resumed", "bytes per element", "collectives per step")


def page(found: list[Row | tuple[Rival, str]]) -> str:
    """Tables in Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for one in found:
        if isinstance(one, Row):
            lines.append(f"| {' | '.join([one.rival.name, *cells(one)])} |")
        else:
            lines.append(f"| {one[0].name} | {one[1]} |{' |' * (len(HEAD) - 2)}")
    lines += ["", "| optimizer | what its page says | where |", "|---|---|---|"]
    lines += [
        f"| {r.name} | {r.promise} | {f'[page]({r.source})' if r.source else 'this site'} |" for r in RIVALS.values()
    ]
    lines += ["", "| not tried without a GPU | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in NOT_TRIED.items()]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of names (default: all)")
    parser.add_argument("--ranks", help="comma-separated numbers of processes (default: 2,4)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the tables there")
    given = parser.parse_args()
    # Processes of each comparison are forked from one that has torch: a spawned one would take seconds to import it.
    processes.START_METHOD = "forkserver"
    multiprocessing.set_forkserver_preload([run_as_is.__module__, build.__module__])
    ranks = tuple(map(int, given.ranks.split(","))) if given.ranks else RANKS
    table, found, began = Table(*HEAD), list[Row | tuple[Rival, str]](), time.monotonic()
    for one in rows(given.only, ranks):
        found.append(one)
        if isinstance(one, Row):
            table.add_row(one.rival.name, *cells(one))
            print(one.rival.name, *cells(one), sep="; ", flush=True)
            for shapes, result in one.found.items():
                if result.detail:
                    print(f"  {shapes}: {result.detail}", flush=True)
        else:
            table.add_row(one[0].name, one[1])
    Console(width=None if sys.stdout.isatty() else 220).print(table)
    print(f"{time.monotonic() - began:.0f} s")
    if given.page:
        given.page.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
