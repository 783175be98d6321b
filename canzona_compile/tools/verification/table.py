"""The page of findings: first what differs, then the rest. Nothing depends on colour or Unicode."""

from __future__ import annotations

from collections.abc import Iterator

from canzona_compile.errors import some
from canzona_compile.report.page import Block, PageModel, PageTable, Paragraph, Words, note
from canzona_compile.report.sections import names_by_reason
from canzona_compile.report.units import format_dtype, plural
from canzona_compile.tools.verification.findings import Findings, LeafDifference

MOST_ROWS = 40  # all leaves that differ are shown, and equal ones up to so many rows
HEADERS = ("parameter:~", "leaf:~", "shape", "dtype", "ulps:>", "relative:>", "from step:>", "ranks")


def findings_page(findings: Findings) -> PageModel:
    """Verdict, leaves, and how the parameters were updated."""
    return PageModel(tuple(findings_parts(findings)))


def findings_parts(f: Findings) -> Iterator[Block]:
    good = Words(f"{plural(len(f.leaves), 'leaf', 'leaves')}, every bit equal", "bold green")
    bad = Words(f"{len(f.differing)} of {len(f.leaves)} leaves differ", "bold red")
    where = f" on {plural(f.ranks, 'rank')} ({f.layout}) against one device, {plural(f.steps, 'step')}: "
    yield Paragraph((Words(f"{f.optimizer} of {f.build}", "bold"), where, good if f.ok else bad))
    yield note("")
    equal = [leaf for leaf in f.leaves if leaf.equal]
    shown = [*f.differing, *equal[: max(0, MOST_ROWS - len(f.differing))]]
    yield PageTable(HEADERS, tuple(map(cells, shown)), "Leaves", least=(10, 10), indent=2)
    if hidden := len(f.leaves) - len(shown):
        yield note(f"and {hidden} more, equal", "dim", indent=2)
    yield note("")
    if f.compiled:
        yield role("compiled", len(f.compiled), "captured graphs from the second step on")
    for word, found in (("eager", f.eager), ("local", f.local)):
        for why, names in names_by_reason(found.items()).items():
            yield role(word, len(names), f"{why}: {some(names)}")
    if f.everywhere:
        every = plural(len(f.everywhere), "matrix", "matrices")
        yield role("plans", 2, f"as planned, where every rank computes {every}, and with owners for all of them")
    if f.idle:
        yield role("idle", len(f.idle), f"never had a gradient: {some(f.idle)}")
    yield note(f"torch {f.torch}, seed {f.seed}, {f.seconds:.1f} s", "dim")


def cells(leaf: LeafDifference) -> tuple[Words, ...]:
    name = f"{leaf.leaf} ({leaf.remark})" if leaf.remark else leaf.leaf
    texts = [leaf.parameter, name, "x".join(map(str, leaf.shape)) or "-", format_dtype(leaf.dtype)]
    if leaf.equal:
        return tuple(map(Words, [*texts, "equal"]))
    ulps = "differs" if leaf.max_ulps is None else str(leaf.max_ulps)
    relative = "-" if leaf.max_relative is None else f"{leaf.max_relative:.1e}"
    texts += [ulps, relative, str(leaf.first_step), ",".join(map(str, leaf.ranks))]
    return tuple(Words(text, "red") for text in texts)


def role(word: str, count: int, why: str) -> Paragraph:
    return Paragraph((Words(f"{count} {word}", "bold"), f", {why}"))
