"""The page of a forecast: one file that loads nothing, whatever parameters are called."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import canzona_compile.tools.planning as planning
from canzona_compile.__main__ import main
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.page import page
from tests.harness.marks import also
from tests.tools.forecasts import NASTY, forecast, nasty

FOLDER = Path(planning.__file__).parent


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


def bars(data: Any) -> list[tuple[str, Any]]:
    """Traces of the timeline, each with the name of its chart."""
    charts = [(name, figure) for name, figure in data["figures"].items() if name.startswith("timeline")]
    return [(name, trace) for name, figure in charts for trace in figure["data"]]


def test_it_is_one_file_that_loads_nothing() -> None:
    found = Elements(page(forecast()))
    scripts = [attributes.get("type") for tag, attributes, _ in found.texts if tag == "script"]
    assert scripts == ["application/json", None, None]  # the figures, plotly, the page's own
    loading = {"src", "srcset", "data", "action", "background", "poster", "cite", "xlink:href"}
    assert not [tag for tag, attributes in found.tags if loading & attributes.keys()]
    assert all(a["href"][:1] == "#" for _, a in found.tags if a.get("href"))
    assert not {tag for tag, _ in found.tags} & {"link", "iframe", "object", "embed", "img", "base", "form"}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on") or name == "style"]


def test_its_template_names_no_other_place() -> None:
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.\w|url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|\bimport\(", text)
    assert not re.search(r"\beval\b|\bFunction\(|innerHTML|outerHTML|insertAdjacent|document\.write", text)
    assert re.findall(r"\|\s*safe\b.*", text) == ["|safe }}</script>"]  # plotly's own code
    assert text.count("\n") <= 400


def test_its_policy_allows_its_own_scripts_only() -> None:
    found = Elements(page(nasty()))
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
    plain, found = page(forecast()), page(nasty())
    assert [tag for tag, _ in Elements(found).tags if tag != "li"] == [
        tag for tag, _ in Elements(plain).tags if tag != "li"
    ]
    for what in ("</script", "<script", "<!--"):
        assert found.count(what) == plain.count(what), what
    found.encode()  # even half of a surrogate pair is no obstacle
    assert Elements(found).data()["names"][: len(NASTY)] == list(NASTY)
    (title,) = [text for tag, _, text in Elements(found).texts if tag == "title"]
    assert NASTY[0] in title


def test_charts_show_names_as_they_stand() -> None:
    """Plotly reads markup in texts: tags, links, entities."""
    texts = [str(text) for _, own in bars(Elements(page(nasty())).data()) for text in own["hovertext"]]
    named = [text for text in texts if "window.broken" in text]
    assert named
    for text in named:
        assert set(re.findall(r"<[^>]*>", text)) <= {"<b>", "</b>", "<br>"}
        assert html.unescape(text).count(NASTY[0]) + html.unescape(text).count(NASTY[2]) > 0


@pytest.mark.parametrize(
    "make", [forecast, nasty, *also([lambda: forecast(100, 2, 1)])], ids=["plain", "nasty", "many ranks"]
)
def test_figures_come_back_as_they_went_in(make: Callable[[], Forecast]) -> None:
    found = make()
    data = Elements(page(found)).data()
    assert data["names"] == [t.name for t in found.tasks]
    assert [(owner, group) for _, owner, group in data["matrices"]] == [(t.owner, t.group) for t in found.tasks]
    assert [data["kinds"][kind][3] for kind, _, _ in data["matrices"]] == [t.template for t in found.tasks]
    drawn = {}
    for _, own in bars(data):
        for start, length, text, place in zip(own["base"], own["x"], own["hovertext"], own["customdata"], strict=True):
            names = tuple(data["names"][k] for k in data["lists"][place]) if place >= 0 else ()
            drawn[text.split("<br>")[1], start, length, names] = text
    for span in found.simulation.spans:
        words = {"compute": "processor", "node": "links within the node", "network": "links to other nodes"}
        text = drawn[
            f"rank {span.rank}, {words[span.stream]}",
            round(span.start, 12),
            round(span.end - span.start, 12),
            span.tasks,
        ]
        assert text.startswith(f"<b>{span.act.removeprefix('start ')}, micro-group {span.group}</b>")
    work = [trace["y"] for trace in data["figures"]["load-work"]["data"] if trace.get("hoverinfo") == "skip"]
    assert [sum(parts) for parts in zip(*work, strict=True)] == [load.flops for load in found.loads]
    assert (len(work) == 1) == (len(found.loads) > 64)
    waits = [trace["y"] for trace in data["figures"]["load-time"]["data"] if trace.get("hoverinfo") == "skip"]
    assert waits == [[getattr(r, part) for r in found.simulation.ranks] for part in ("compute", "exposed", "bubble")]


def test_what_is_impossible_takes_no_number() -> None:
    found = forecast()
    first = found.templates[0]
    impossible = replace(first.strategies[-1], name="nobody", seconds=math.inf, compute=math.inf, gather=math.inf)
    found = replace(found, templates=(replace(first, strategies=(*first.strategies[:2], impossible)),))
    text = page(found)
    data = Elements(text).data()  # which json reads, so that there is neither Infinity nor NaN
    assert "Infinity" not in json.dumps(data)
    assert "NaN" not in json.dumps(data)
    assert [len(trace["x"]) for trace in data["figures"]["template-0"]["data"]] == [2, 2, 2]
    assert text.count("<td>impossible") == 1


def test_matrices_that_only_spans_know_have_names_too() -> None:
    found = forecast()
    first = next(i for i, span in enumerate(found.simulation.spans) if span.tasks)
    spans = list(found.simulation.spans)
    spans[first] = replace(spans[first], tasks=("a stranger",))
    data = Elements(page(replace(found, simulation=replace(found.simulation, spans=tuple(spans))))).data()
    assert data["names"][len(found.tasks) :] == ["a stranger"]
    assert [len(found.tasks)] in data["lists"]


@pytest.mark.full
def test_a_chart_has_no_more_bars_than_a_browser_draws_at_once() -> None:
    found = forecast(64, 60, 10, most_shown=16)
    drawn: dict[str, int] = {}
    for name, own in bars(Elements(page(found)).data()):
        drawn[name] = drawn.get(name, 0) + len(own["x"])
    assert len(drawn) > 1
    assert max(drawn.values()) <= 2500
    assert sum(drawn.values()) >= len(found.simulation.spans)


# -- without plotly ----------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_what_is_not_installed_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(CanzonaError, match=rf"(?s){missing}.*canzona-compile\[page\]"):
        page(forecast())


def test_the_command_says_so_before_it_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("canzona_compile.tools.planning.command.plan", lambda *_, **__: pytest.fail("it planned"))
    assert main(["plan", "--model", "qwen3-0.6b", "--mesh", "fsdp=2", "--format", "html"]) != 0
    assert "canzona-compile[page]" in capsys.readouterr().err


def test_nobody_else_needs_them() -> None:
    """Only the page's modules import plotly and jinja2, and only within a function does anyone import those."""
    for path in Path(planning.__file__).parents[2].rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not path.name.startswith("page_"):
            assert not re.search(r"^\s*(from|import) (plotly|jinja2|markupsafe)", text, re.MULTILINE), path
            assert not re.search(r"^(from|import) \S*planning\.page_", text, re.MULTILINE), path
