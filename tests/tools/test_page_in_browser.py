"""The page of a forecast at work in a browser: drawn, asked, zoomed, on small screens and in the dark."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from canzona_compile.report.html import html
from canzona_compile.simulation.engine import Simulation, Span
from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.plan_page import plan_page
from tests.harness.marks import crossed
from tests.tools.forecasts import NASTY, forecast, many_spans, nasty

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP, PHONE = (1280, 900), (390, 844)


class Shown:
    """A page in a browser, and what went wrong there."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.errors: list[str] = []
        self.requests: list[str] = []
        view.on("console", lambda message: self.errors.append(message.text))
        view.on("pageerror", lambda error: self.errors.append(str(error)))
        view.on("request", lambda request: self.requests.append(request.url))

    def text(self, selector: str) -> str:
        return str(self.view.locator(selector).inner_text())

    def draw(self, *charts: str) -> None:
        """Bring charts into sight: they are drawn when they come near."""
        for chart in charts:
            self.view.locator(f"#{chart}").scroll_into_view_if_needed()
            self.view.wait_for_selector(f"#{chart} .point", state="attached")
            self.settle()

    def seen(self) -> tuple[float, float]:
        """Seconds between which the timeline lies."""
        first, last = self.view.evaluate("document.getElementById('timeline-0').layout.xaxis.range")
        return float(first), float(last)

    def settle(self) -> None:
        """Wait for two frames: what was asked for is drawn."""
        self.view.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def until(self, true: Callable[[], bool]) -> None:
        """Events of wheels, fingers and media arrive when the browser likes."""
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end, "nothing happens"
            self.settle()

    def place(self, span: Span) -> tuple[float, float]:
        """The middle of a span's bar in the first chart of the timeline."""
        script = """([rank, start, length]) => {
            const { data, layout } = document.getElementById("timeline-0");
            const { x, y, width, height } = document.querySelector("#timeline-0 .nsewdrag").getBoundingClientRect();
            const along = (value, [first, last]) => (value - first) / (last - first);
            for (const bars of data) {
                const i = bars.hovertext.findIndex((text, k) =>
                    bars.base[k] === start && bars.x[k] === length && text.includes(rank));
                if (i < 0) continue;
                const middle = along(start + length / 2, layout.xaxis.range);
                return [x + middle * width, y + (1 - along(bars.y[i], layout.yaxis.range)) * height];
            }
        }"""
        given = [f"rank {span.rank}, ", round(span.start, 12), round(span.end - span.start, 12)]
        x, y = self.view.evaluate(script, given)
        return float(x), float(y)

    def point(self, x: float, y: float) -> str:
        """What stands beside the pointer there."""
        self.view.mouse.move(x - 2, y)
        self.view.mouse.move(x, y)
        self.view.wait_for_selector(".hoverlayer .hovertext")
        return str(self.view.evaluate("document.querySelector('.hoverlayer .hovertext').textContent"))


Show = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    play = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with play.sync_playwright() as running:
        made = running.chromium.launch(executable_path=path, args=list(FLAGS))
        yield made
        made.close()


@contextmanager
def opened(
    browser: Any,
    folder: Path,
    found: Forecast,
    size: tuple[int, int] = DESKTOP,
    first: tuple[str, ...] = ("timeline-0",),
    **options: Any,
) -> Iterator[Shown]:
    """A forecast's page from disk; leaving it asserts that nothing was loaded and nothing went wrong."""
    path = folder / "forecast.html"
    path.write_text(html(plan_page(found)), encoding="utf-8")
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
    context.set_default_timeout(120_000)
    try:
        shown = Shown(context.new_page())
        shown.view.goto(path.as_uri())
        shown.settle()
        shown.draw(*first)
        yield shown
        assert shown.errors == []
        assert shown.requests == [path.as_uri()]
        assert shown.view.evaluate("window.broken") is None
    finally:
        context.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Show:
    """Open a forecast's page."""
    return partial(opened, browser, tmp_path)


@pytest.fixture(scope="module")
def usual_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """A page of `forecast()` for several tests: opening one takes seconds."""
    with opened(browser, tmp_path_factory.mktemp("usual"), forecast()) as shown:
        yield shown


@pytest.fixture(scope="module")
def nasty_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """The same of `nasty()`."""
    with opened(browser, tmp_path_factory.mktemp("nasty"), nasty()) as shown:
        yield shown


@pytest.mark.full
def test_everything_is_drawn(nasty_page: Shown) -> None:
    found, shown = nasty(), nasty_page
    charts = shown.view.evaluate("[...document.querySelectorAll('.chart')].map((own) => own.id)")
    labels = shown.view.evaluate(
        "[...document.querySelectorAll('.chart')].map((own) => own.getAttribute('aria-label'))"
    )
    assert {"What each rank does when", "Work per rank", "Time per rank", "The step of each plan"} < set(labels)
    shown.draw(*charts)
    for chart in charts:
        assert shown.view.locator(f"#{chart} .point").count() > 1, chart
    text = shown.text("body")
    for word in (found.fingerprint, "predicted step", "waiting for communication", "buffers per rank"):
        assert word in text
    assert f"matrices\n{found.matrices}\n" in text
    assert "20 m n2 + 2 m n + 10 n3 + 1" in text
    assert NASTY[0] in shown.text("h1")
    for alternative in found.alternatives:
        assert alternative.name in shown.text("#alternatives table")
    assert all(source in shown.text("#rates") for _, source in found.hardware.sources)
    assert shown.view.locator("#micro-groups tbody tr").count() == len(found.micro_groups)


def test_matrices_are_found_by_name_and_rank(nasty_page: Shown) -> None:
    found, shown = nasty(), nasty_page
    shown.view.locator("#matrices summary").click()
    rows = shown.view.locator("#matrices tbody tr")
    assert rows.count() == len(found.tasks)
    shown.view.locator("#matrices input").fill("<!-- <script>")
    assert rows.count() == 1
    shown.view.locator("#matrices input").fill("rank 1")
    assert rows.count() == sum(t.owner == 1 for t in found.tasks)


def test_pointing_names_the_matrices_and_a_click_keeps_them(nasty_page: Shown) -> None:
    found, shown = nasty(), nasty_page
    span = next(s for s in found.simulation.spans if s.rank == 0 and NASTY[0] in s.tasks)
    transfer = next(s for s in found.simulation.spans if s.rank == 0 and s.flow >= 0)
    shown.draw("timeline-0")
    place = shown.place(span)
    said = shown.point(*place)
    assert f"compute, micro-group {span.group}" in said
    assert "processor" in said
    assert NASTY[0] in said
    shown.view.mouse.click(*place)
    assert [item for item in shown.view.locator("#detail li").all_inner_texts() if item in span.tasks]
    assert shown.view.locator("#detail li").count() == len(span.tasks)
    shown.view.locator("#detail-close").click()
    assert shown.view.locator("#detail").is_hidden()
    said = shown.point(*shown.place(transfer))
    assert "sends" in said
    assert f"collective {transfer.flow}, 4 ranks" in said


@pytest.mark.full
def test_zoom(usual_page: Shown) -> None:
    shown = usual_page
    shown.draw("timeline-0")
    mouse, whole = shown.view.mouse, shown.seen()
    box = shown.view.locator("#timeline-0 .nsewdrag").first.bounding_box()
    left, right, y = box["x"] + box["width"] * 0.25, box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2
    mouse.move(left, y)
    mouse.down()
    mouse.move((left + right) / 2, y)
    mouse.move(right, y)
    mouse.up()
    shown.until(lambda: shown.seen() != whole)
    assert shown.seen() == pytest.approx((whole[1] * 0.25, whole[1] * 0.5), rel=0.02)
    assert shown.view.locator("#detail").is_hidden()  # a drag is no click
    mouse.dblclick(left, y)
    shown.until(lambda: shown.seen() == pytest.approx(whole))
    mouse.move(left, y)
    shown.view.locator("#timeline-0 .modebar-btn[data-title='Zoom in']").click()
    shown.until(lambda: shown.seen() != pytest.approx(whole))
    zoomed, scrolled = shown.seen(), shown.view.evaluate("scrollY")
    mouse.move(left, y)
    mouse.wheel(0, 200)  # a wheel scrolls the page
    shown.until(lambda: shown.view.evaluate("scrollY") > scrolled)
    assert shown.seen() == zoomed


@pytest.mark.full
def test_fingers(show: Show) -> None:
    found = forecast()
    span = next(s for s in found.simulation.spans if s.rank == 0 and s.tasks)
    with show(found, PHONE, has_touch=True, is_mobile=True, device_scale_factor=2) as shown:
        shown.view.touchscreen.tap(*shown.place(span))
        shown.until(lambda: shown.view.locator("#detail li").count() == len(span.tasks))
        assert "compute, micro-group 0" in shown.text("#detail")
        script = "getComputedStyle(document.querySelector('#timeline-0 .nsewdrag')).touchAction"
        assert shown.view.evaluate(script) != "none"  # so that a finger scrolls the page


@pytest.mark.full
@pytest.mark.parametrize(("width", "make"), crossed([320, 390, 768], [nasty, many_spans]))
def test_nothing_is_wider_than_the_screen(show: Show, width: int, make: Callable[[], Forecast]) -> None:
    with show(make(), (width, 844)) as shown:
        shown.view.evaluate("document.querySelectorAll('details').forEach((own) => { own.open = true; })")
        shown.draw("bars-0", "bars-1", "bars-2", "bars-4", "bars-6")
        assert shown.view.evaluate("document.documentElement.scrollWidth") <= width
        too_wide = """(width) => [...document.querySelectorAll("body *")]
            .filter((own) => !own.closest(".scroll table, svg, [hidden]"))
            .filter((own) => own.getBoundingClientRect().right > width + 0.5)
            .map((own) => own.tagName + "#" + own.id + "." + own.className)"""
        assert shown.view.evaluate(too_wide, width) == []


@pytest.mark.full
def test_dark_and_light(usual_page: Shown) -> None:
    shown = usual_page
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('#timeline-0 .ytick text')).fill"

    def brightness(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    shown.view.emulate_media(color_scheme="light")
    shown.until(lambda: brightness(shown.view.evaluate(ink)) < 250)
    assert brightness(shown.view.evaluate(ink)) < 250 < 600 < brightness(shown.view.evaluate(ground))
    shown.view.emulate_media(color_scheme="dark")
    shown.until(lambda: brightness(shown.view.evaluate(ink)) > 500)
    assert brightness(shown.view.evaluate(ground)) < 150


@pytest.mark.full
def test_controls_have_names(usual_page: Shown) -> None:
    shown = usual_page
    nameless = """[...document.querySelectorAll("button, input, .chart, table, section")]
        .filter((own) => !(own.getAttribute("aria-label") || own.labels?.length || own.textContent.trim()))
        .map((own) => own.outerHTML.slice(0, 80))"""
    assert shown.view.evaluate(nameless) == []


@pytest.mark.full
def test_thousands_of_ranks_and_spans(show: Show) -> None:
    found = many_spans(4096)
    assert len(found.simulation.spans) > 15_000
    with show(found) as shown:
        assert shown.view.locator(".chart[id^=timeline]").count() > 6
        assert shown.view.locator(".chart[id^=timeline] .main-svg").count() < 16  # the first ones; the others wait
        session = shown.view.context.new_cdp_session(shown.view)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})  # other programs do not count

        def busy() -> float:
            found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
            return float(found["TaskDuration"])

        begin = busy()
        shown.view.evaluate("Plotly.relayout('timeline-0', { 'xaxis.range[1]': 0.001 })")
        assert busy() - begin < 3  # seconds; some tenths on a machine that is not busy
        shown.draw("bars-1")
        assert "x the mean" in shown.text("#load")
        assert shown.view.locator("#bars-1 .barlayer .point").count() == 32  # ranks by how much
        box = shown.view.locator("#bars-1 .nsewdrag").first.bounding_box()
        said = shown.point(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2)
        assert re.match(r"rank \d+", said)


@pytest.mark.full
def test_a_plan_without_anything(show: Show) -> None:
    found = forecast()
    bare = replace(
        found,
        matrices=0,
        templates=(),
        costs=(),
        tasks=(),
        micro_groups=(),
        loads=(),
        alternatives=(),
        assumptions=(),
        simulation=Simulation(0.0, (), (), (), ()),
    )
    with show(bare, PHONE, ("bars-0", "bars-1")) as shown:
        assert shown.view.locator("#timeline").count() == shown.view.locator("#load").count() == 0
        assert "matrices\n0\n" in shown.text(".tiles")
