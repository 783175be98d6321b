"""Lays out findings for a terminal: first what differs, then the rest. Nothing depends on colour or Unicode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from canzona_compile.errors import some
from canzona_compile.report.sections import names_by_reason
from canzona_compile.report.terminal import columns
from canzona_compile.report.units import format_dtype, plural
from canzona_compile.tools.verification.findings import Findings, LeafDifference

MOST_ROWS = 40  # all leaves that differ are shown, and equal ones up to so many rows


def table(findings: Findings) -> RenderableType:
    """Verdict, leaves, and how the parameters were updated."""
    return Group(*sections(findings))


def sections(findings: Findings) -> Iterator[RenderableType]:
    f = findings
    count = plural(len(f.leaves), "leaf", "leaves")
    yield Text.assemble(
        (f"{f.optimizer} of {f.build}", "bold"),
        f" on {plural(f.ranks, 'rank')} ({f.layout}) against one device, {plural(f.steps, 'step')}: ",
        (f"{count}, every bit equal", "bold green")
        if f.ok
        else (f"{len(f.differing)} of {len(f.leaves)} leaves differ", "bold red"),
    )
    yield Text()
    equal = [leaf for leaf in f.leaves if leaf.equal]
    shown = [*f.differing, *equal[: max(0, MOST_ROWS - len(f.differing))]]
    yield Padding(rows(shown), (0, 0, 0, 2), expand=False)
    if hidden := len(f.leaves) - len(shown):
        yield Text(f"  and {hidden} more, equal", "dim")
    yield Text()
    if f.compiled:
        yield role("compiled", len(f.compiled), "captured graphs from the second step on")
    for word, found in (("eager", f.eager), ("local", f.local)):
        yield from by_reason(word, found)
    if f.everywhere:
        every = plural(len(f.everywhere), "matrix", "matrices")
        yield role("2 plans", 2, f"as planned, where every rank computes {every}, and with owners for all of them")
    if f.idle:
        yield role("idle", len(f.idle), f"never had a gradient: {some(f.idle)}")
    yield Text(f"torch {f.torch}, seed {f.seed}, {f.seconds:.1f} s", "dim")


def rows(leaves: list[LeafDifference]) -> Table:
    found = columns("parameter", "leaf", "shape", "dtype", ">ulps", ">relative", ">from step", "ranks")
    for column in found.columns[:2]:  # a long name goes on in the next line and loses no letter
        column.no_wrap, column.overflow, column.min_width = False, "fold", 10
    for leaf in leaves:
        found.add_row(*map(Text, cells(leaf)), style="" if leaf.equal else "red")
    return found


def cells(leaf: LeafDifference) -> tuple[str, ...]:
    shape = "x".join(map(str, leaf.shape)) or "-"
    dtype = format_dtype(leaf.dtype)
    if leaf.equal:
        return leaf.parameter, leaf.leaf, shape, dtype, "equal"
    ulps = "differs" if leaf.max_ulps is None else str(leaf.max_ulps)
    relative = "-" if leaf.max_relative is None else f"{leaf.max_relative:.1e}"
    where = ",".join(map(str, leaf.ranks))
    name = f"{leaf.leaf} ({leaf.remark})" if leaf.remark else leaf.leaf
    return leaf.parameter, name, shape, dtype, ulps, relative, str(leaf.first_step), where


def by_reason(word: str, found: Mapping[str, str]) -> Iterator[Text]:
    """One line per reason."""
    for why, names in names_by_reason(found.items()).items():
        yield role(word, len(names), f"{why}: {some(names)}")


def role(word: str, count: int, why: str) -> Text:
    return Text.assemble((f"{count} {word}", "bold"), f", {why}")
