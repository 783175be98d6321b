"""The page of a forecast: one file that loads nothing, whatever parameters are called."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.page import SCRIPTS, STYLES, page, part, payload
from tests.tools.forecasts import NASTY, forecast, nasty


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
        (text,) = [text for _, attributes, text in self.texts if attributes.get("id") == "forecast"]
        return json.loads(text)


def test_it_is_one_file_that_loads_nothing() -> None:
    found = Elements(page(forecast()))
    assert [attributes.get("type") for tag, attributes, _ in found.texts if tag == "script"] == [
        "application/json",
        None,
    ]
    loading = {"src", "srcset", "data", "action", "background", "poster", "cite", "xlink:href"}
    assert not [tag for tag, attributes in found.tags if loading & attributes.keys()]
    assert all(a["href"][:1] == "#" for _, a in found.tags if a.get("href"))
    assert not {tag for tag, _ in found.tags} & {"link", "iframe", "object", "embed", "img", "base", "form"}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on") or name == "style"]


def test_its_parts_name_no_other_place() -> None:
    for name in (*SCRIPTS, *STYLES, "page.html"):
        text = part(name)
        assert not re.search(r"https?:|//\w+\.\w|url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|\bimport\(", text), (
            name
        )
        assert not re.search(r"\beval\b|\bFunction\(|innerHTML|outerHTML|insertAdjacent|document\.write", text), name
        assert text.count("\n") <= 400, name


def test_its_policy_allows_its_own_parts_only() -> None:
    found = Elements(page(nasty()))
    (policy,) = [a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == ["'none'"]
    for tag in ("script", "style"):
        (text,) = [text for own, attributes, text in found.texts if own == tag and not attributes]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == [f"'sha256-{digest}'"]


def test_names_cannot_leave_their_place() -> None:
    plain, found = page(forecast()), page(nasty())
    assert [tag for tag, _ in Elements(found).tags] == [tag for tag, _ in Elements(plain).tags]
    for what in ("</script", "<script", "<!--"):
        assert found.count(what) == plain.count(what), what
    found.encode()  # even half of a surrogate pair is no obstacle
    assert Elements(found).data()["tasks"]["name"][: len(NASTY)] == list(NASTY)
    (title,) = [text for tag, _, text in Elements(found).texts if tag == "title"]
    assert NASTY[0] in title


@pytest.mark.parametrize("make", [forecast, nasty, lambda: forecast(100, 2, 1)], ids=["plain", "nasty", "many ranks"])
def test_figures_come_back_as_they_went_in(make: Callable[[], Forecast]) -> None:
    found = make()
    data = Elements(page(found)).data()
    assert data == json.loads(json.dumps(payload(found)))
    assert data["fingerprint"] == found.fingerprint
    assert data["simulation"]["seconds"] == found.simulation.seconds
    assert data["tasks"]["name"] == [t.name for t in found.tasks]
    assert data["loads"]["flops"] == [load.flops for load in found.loads]
    spans = data["simulation"]["spans"]
    for i, span in enumerate(found.simulation.spans):
        names = [data["tasks"]["name"][k] for k in spans["tasks"]["of"][spans["tasks"]["at"][i]]]
        assert (names, spans["act"]["of"][spans["act"]["at"][i]]) == (list(span.tasks), span.act)
        assert spans["start"][i] == pytest.approx(span.start, abs=1e-12)
        assert (spans["rank"][i], data["simulation"]["streams"][spans["stream"][i]]) == (span.rank, span.stream)
    assert (data["loads"]["by_group"] is None) == (len(found.loads) > 64)


def test_what_is_impossible_takes_no_number() -> None:
    found = forecast()
    strategies = found.templates[0].strategies
    assert any(math.isinf(s.seconds) for s in strategies)
    text = page(found)
    assert not re.search(r"[:,\[](-?Infinity|NaN)", text)
    seconds = [s["seconds"] for s in Elements(text).data()["templates"][0]["strategies"]]
    assert seconds == [s.seconds if math.isfinite(s.seconds) else None for s in strategies]


def test_matrices_that_only_spans_know_have_names_too() -> None:
    found = forecast()
    first = next(i for i, span in enumerate(found.simulation.spans) if span.tasks)
    spans = list(found.simulation.spans)
    spans[first] = replace(spans[first], tasks=("a stranger",))
    data = payload(replace(found, simulation=replace(found.simulation, spans=tuple(spans))))["simulation"]
    assert data["others"] == ["a stranger"]
    assert data["spans"]["tasks"]["of"][data["spans"]["tasks"]["at"][first]] == [len(found.tasks)]
