"""The page of a plan: what it says, and one HTML file that loads nothing, whatever parameters are called."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import canzona_compile.report as report
from canzona_compile.__main__ import main
from canzona_compile.report.html import html
from canzona_compile.report.page import Block, Detail, PageModel, PageTable, Section, Timeline, text_of
from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.plan_page import plan_page
from tests.report.test_measured import measured
from tests.tools.forecasts import NASTY, forecast, nasty

FOLDER = Path(report.__file__).parent


# -- what it says ------------------------------------------------------------------------------


def flat(body: tuple[Block, ...]) -> Iterator[Block]:
    """All blocks, those in sections and details too."""
    for block in body:
        yield block
        if isinstance(block, Section | Detail):
            yield from flat(block.body)


def titled(page: PageModel, title: str) -> Any:
    (found,) = [block for block in flat(page.body) if getattr(block, "title", "") == title]
    return found


def column(table: PageTable, header: str) -> list[Any]:
    place = [title for title, _ in table.columns].index(header)
    return [row[place] for row in table.rows]


@pytest.mark.parametrize("make", [forecast, nasty])
def test_figures_come_back_as_they_went_in(make: Callable[[], Forecast]) -> None:
    found = make()
    page = plan_page(found)
    matrices = next(b for b in flat(page.body) if isinstance(b, PageTable) and b.search)
    assert column(matrices, "matrix") == [t.name for t in found.tasks]
    assert column(matrices, "owner") == [f"rank {t.owner}" for t in found.tasks]
    assert column(matrices, "FLOPs") == [t.flops for t in found.tasks]
    plans = titled(page, "Plans")
    assert [text_of(name) for name in column(plans, "plan")] == [own.name for own in found.alternatives]
    assert plans.chosen == tuple(own.chosen for own in found.alternatives)
    work = titled(page, "Work per rank")
    assert [(bar.name, bar.total) for bar in work.bars] == [(load.rank, load.flops) for load in found.loads]
    time = titled(page, "Time per rank")
    assert [bar.values for bar in time.bars] == [(r.compute, r.exposed, r.bubble) for r in found.simulation.ranks]
    timeline = titled(page, "What each rank does when")
    assert isinstance(timeline, Timeline)
    drawn = {(lane.of, lane.name, e.begin, e.end, e.names): e for lane in timeline.lanes for e in lane.events}
    for span in found.simulation.spans:
        event = drawn[f"rank {span.rank}", span.stream, span.start, span.end, span.tasks]
        assert event.title == f"{span.act.removeprefix('start ')}, micro-group {span.group}"
    assert len([lane for lane in timeline.lanes if not lane.detail]) <= 3 * 4


def test_measured_steps_stand_beside() -> None:
    assert not [b for b in plan_page(forecast()).body if isinstance(b, Section) and b.title == "Measured" and b.body]
    section = titled(plan_page(replace(forecast(), measured=measured())), "Measured")
    assert section.caption == "2 steps on 2 ranks, by the clock of each rank"
    assert column(section.body[0], "mean")[:2] == [3.25, 3.75]


def test_every_micro_group_is_there() -> None:
    page = plan_page(replace(forecast(), micro_groups=60 * forecast().micro_groups[:1]))
    tables = [b for b in flat(page.body) if isinstance(b, PageTable) and "icro-groups" in b.title]
    assert [len(table.rows) for table in tables] == [40, 60]


# -- one file ----------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Start tags and the text of scripts and styles, as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self.inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag in ("script", "style", "title")
        if self.inside:
            self.texts.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            tag, attributes, text = self.texts[-1]
            self.texts[-1] = tag, attributes, text + data

    def data(self) -> Any:
        (text,) = [text for _, attributes, text in self.texts if attributes.get("id") == "data"]
        return json.loads(text)


def page_of(found: Forecast) -> str:
    return html(plan_page(found))


def test_it_is_one_file_that_loads_nothing() -> None:
    found = Elements(page_of(forecast()))
    scripts = [attributes.get("type") for tag, attributes, _ in found.texts if tag == "script"]
    assert scripts == ["application/json", None, None]  # the figures, plotly, the page's own
    loading = {"src", "srcset", "data", "action", "background", "poster", "cite", "xlink:href"}
    assert not [tag for tag, attributes in found.tags if loading & attributes.keys()]
    assert all(a["href"][:1] == "#" for _, a in found.tags if a.get("href"))
    assert not {tag for tag, _ in found.tags} & {"link", "iframe", "object", "embed", "img", "base", "form"}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on") or name == "style"]


def test_its_policy_allows_its_own_scripts_only() -> None:
    found = Elements(page_of(nasty()))
    (policy,) = [a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert set(rules) == {"default-src", "style-src", "img-src", "script-src", "base-uri"}  # fonts, ...: the default
    assert rules["default-src"] == rules["base-uri"] == ["'none'"]
    assert rules["style-src"] == ["'unsafe-inline'"]  # plotly writes styles
    assert rules["img-src"] == ["data:"]  # some of its versions ask the browser which formats it reads
    scripts = [text for tag, attributes, text in found.texts if tag == "script" and not attributes]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert rules["script-src"] == [f"'sha256-{digest}'" for digest in digests]


def test_names_cannot_leave_their_place() -> None:
    plain, found = page_of(forecast()), page_of(nasty())
    assert [tag for tag, _ in Elements(found).tags if tag != "li"] == [
        tag for tag, _ in Elements(plain).tags if tag != "li"
    ]
    for what in ("</script", "<script", "<!--"):
        assert found.count(what) == plain.count(what), what
    found.encode()  # even half of a surrogate pair is no obstacle
    (table,) = Elements(found).data()["tables"]
    assert [table["texts"][0][row[0]] for row in table["rows"]][: len(NASTY)] == list(NASTY)
    (title,) = [text for tag, _, text in Elements(found).texts if tag == "title"]
    assert NASTY[0] in title


# -- without plotly ----------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_the_command_names_what_is_not_installed_before_it_plans(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("canzona_compile.tools.planning.command.plan", lambda *_, **__: pytest.fail("it planned"))
    assert main(["plan", "--model", "qwen3-0.6b", "--mesh", "fsdp=2", "--format", "html"]) != 0
    assert re.search(rf"(?s){missing}.*canzona-compile\[page\]", capsys.readouterr().err)


def test_nobody_else_needs_them() -> None:
    """Only the modules of HTML import plotly and jinja2, and only within a function does anyone import those."""
    for path in FOLDER.parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not path.name.startswith("html"):
            assert not re.search(r"^\s*(from|import) (plotly|jinja2|markupsafe)", text, re.MULTILINE), path
            assert not re.search(r"^(from|import) \S*report\.html", text, re.MULTILINE), path
