"""A page of every kind of block, as each renderer shows it."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from canzona_compile.ir.pipeline import run
from canzona_compile.passes import Canonicalize, Place
from canzona_compile.report.html import html
from canzona_compile.report.markdown import markdown
from canzona_compile.report.page import (
    Bar,
    Bars,
    Block,
    Detail,
    Figure,
    Fill,
    Lane,
    Listing,
    PageModel,
    PageTable,
    Paragraph,
    Section,
    Timeline,
    TimelineEvent,
    Words,
    note,
)
from canzona_compile.report.pass_table import PassTable
from canzona_compile.report.sections import classes_of
from canzona_compile.report.terminal import printed, render
from tests.harness.samples import grid_of, muon_step

NASTY = "[/red]<b>a|b"  # markup to rich, to HTML and to Markdown
TABLE = PageTable(
    ("name", "time:s", "size:B", "work:FLOP", "ratio:n", "why:~"),
    (
        (Words("layers.0.up.weight", about="the first"), 0.0015, 2048, 3e9, 1.5, NASTY),
        ("layers.1.up.weight", None, 0, 0, 2, "so"),
    ),
    "Names",
    chosen=(True, False),
)
BLOCKS: tuple[Block, ...] = (
    Paragraph(("plain, ", Words("bold", "bold"), " and ", Words("3f9a", "code"))),
    Listing((("", "a sentence"), ("", NASTY))),
    TABLE,
    PageTable(("", "name"), ((Fill(0), "layers.0.weight"), (Fill(1), "layers.1.weight")), names=1, bare=True),
    Bars("Work", "FLOP", (("", 0), ("", 1)), (Bar(0, (1e9, 2e9), ("2 things",)), Bar(1, (1e9, 0.0))), of="rank"),
    Timeline("When", 1.0, (Lane("rank 0", "node", (TimelineEvent(0.0, 0.5, "gather", 0, NASTY),)),), "group"),
    Section("Inner", (note("inside", indent=2),)),
    Detail((note("where there is room"), Section("Folded", (TABLE,), folded=True))),
)
PAGE = PageModel(
    (Section("First", BLOCKS, "a caption"), Section("Empty", (Detail(()),))),
    "kind",
    NASTY,
    "about it",
    (Figure("4.9 ms", "step\ntime"), Figure("2", "ranks", detail=True)),
    ("a remark", ""),
    (("fact", "true"),),
)


def test_terminal() -> None:
    assert printed(render(PAGE), 74) == (
        "╭─ kind  [/red]<b>a|b ───────────────────────────────────────────────────╮\n"
        "│                                 4.9 ms                                 │\n"
        "│                                  step                                  │\n"
        "│                                  time                                  │\n"
        "│                                                                        │\n"
        "│                                a remark                                │\n"
        "╰────────────────────────────────────────────────────────────────────────╯\n"
        "\n"
        "── First ── a caption ────────────────────────────────────────────────────\n"
        "  plain, bold and 3f9a\n"
        "  - a sentence\n"
        "  - [/red]<b>a|b\n"
        "     name                  time   size        work  ratio  why\n"
        "  █  layers.0.up.weight  1.5 ms  2 KiB  3.00 GFLOP   1.50  [/red]<b>a|b\n"
        "     layers.1.up.weight       -    0 B      0 FLOP      2  so\n"
        "  ██  layers.0.weight\n"
        "  ▓▓  layers.1.weight\n"
        "  rank 0 █████████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ 3.00 GFLOP +50% 2 things\n"
        "  rank 1 █████████████                            1.00 GFLOP -50%\n"
        "  mean 2.00 GFLOP; the busiest rank has 3.00 GFLOP, 1.50x the mean\n"
        "              ├ 0 ─────────├ 250 ms ────├ 500 ms ────├ 750 ms ───      1 s\n"
        "  rank 0 node ███████████ g0 ███████████························· busy 50%\n"
        "              number: group  g gather  · idle\n"
        "  Inner\n"
        "    inside\n"
    )


@pytest.mark.parametrize("width", [20, 40, 80, 300])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_terminals_of_any_width_and_encoding(width: int, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=width).print(render(PAGE))  # would raise on what the encoding lacks
    stream.seek(0)
    assert max(map(len, stream.read().splitlines())) <= min(width, 120)


def test_names_that_are_too_long_lack_what_all_share() -> None:
    text = printed(render(PageModel((BLOCKS[3],))), 16)
    assert text.splitlines() == ["██  0", "▓▓  1", "names in full:", "layers.….weight"]


def test_markdown() -> None:
    assert markdown(PAGE) == (
        "## [/red]<b>a|b\n\n"
        "- **4.9 ms** step time\n- **2** ranks\n\n"
        "a remark\n\n"
        "### First\n\n"
        "plain, **bold** and `3f9a`\n\n"
        "- a sentence\n"
        "- [/red]<b>a|b\n\n"
        "| name | time | size | work | ratio | why |\n"
        "|---|---|---|---|---|---|\n"
        "| **layers.0.up.weight** | 1.5 ms | 2 KiB | 3.00 GFLOP | 1.50 | [/red]<b>a\\|b |\n"
        "| layers.1.up.weight | - | 0 B | 0 FLOP | 2 | so |\n\n"
        "|  | name |\n"
        "|---|---|\n"
        "|  | layers.0.weight |\n"
        "|  | layers.1.weight |\n\n"
        "### Inner\n\n"
        "inside\n"
    )


def test_html_has_all_of_it() -> None:
    text = html(PAGE)
    for words in (
        "about it",
        "a remark",
        "where there is room",
        "<summary>Folded</summary>",
        "the first",
        "3.00 GFLOP",
    ):
        assert words in text, words
    assert "mean 2.00 GFLOP; the busiest rank has 3.00 GFLOP" in text
    assert "<h2>Empty" not in text
    assert "[/red]&lt;b&gt;a|b" in text
    assert "[/red]<b>" not in text


def test_totals_that_differ_by_rounding_are_one_class() -> None:
    """Seconds of ranks that do the same may differ in the last bit, too little for edges between them."""
    low = 0.5072336431
    assert classes_of([low, math.nextafter(low, 1.0), low], 32)[0] == [3]
    assert len(classes_of([1.0, 1.0 + 1e-6], 32)[0]) == 32


def test_passes_print_as_a_table() -> None:
    _, history = run(muon_step(grid_of(1, 2), (64, 32)), [Canonicalize(), Place()])
    text = printed(PassTable(history.records), 120)
    assert re.search(r"place +│ placed +│ +[\d.]+ │ +\+\d+ │", text)
    assert "-4 permute" in text
