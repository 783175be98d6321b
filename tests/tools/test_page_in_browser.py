"""The page of a forecast at work in a browser: drawn, asked, zoomed, on small screens and in the dark."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.page import page
from canzona_compile.tools.simulation.figures import Simulation
from tests.tools.forecasts import NASTY, forecast, nasty

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

    def seen(self) -> tuple[float, float]:
        """Seconds between which the timeline lies."""
        own = self.view.evaluate("({ ...document.getElementById('timeline-canvas').dataset })")
        return float(own["from"]), float(own["to"])

    def settle(self) -> None:
        """Wait for two frames: what was asked for is drawn."""
        self.view.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def until(self, true: Callable[[], bool]) -> None:
        """Events of wheels, fingers and media arrive when the browser likes."""
        end = time.monotonic() + 10
        while not true():
            assert time.monotonic() < end, "nothing happens"
            self.settle()

    def box(self, selector: str) -> dict[str, float]:
        self.view.locator(selector).scroll_into_view_if_needed()
        self.settle()
        return dict(self.view.locator(selector).bounding_box())

    def colours(self, selector: str) -> int:
        """How many different ones are on a canvas."""
        script = """(selector) => {
            const own = document.querySelector(selector);
            const pixels = new Uint32Array(own.getContext("2d").getImageData(0, 0, own.width, own.height).data.buffer);
            return new Set(pixels).size;
        }"""
        return int(self.view.evaluate(script, selector))

    def find(self, wanted: str) -> tuple[float, float]:
        """Sweep the timeline's first lane until the tip says something."""
        box = self.box("#timeline-canvas")
        y = box["y"] + 28 + 4 + 22 + 10
        for x in range(90, int(box["width"]), 12):
            self.view.mouse.move(box["x"] + x, y)
            tip = self.view.locator("#tip")
            if tip.is_visible() and wanted in tip.inner_text():
                return box["x"] + x, y
        raise AssertionError(f"{wanted!r} is nowhere in the first lane")


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


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Show:
    """Open a forecast's page from disk; leaving it asserts that nothing was loaded and nothing went wrong."""

    @contextmanager
    def opened(found: Forecast, size: tuple[int, int] = DESKTOP, **options: Any) -> Iterator[Shown]:
        path = tmp_path / "forecast.html"
        path.write_text(page(found), encoding="utf-8")
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        try:
            shown = Shown(context.new_page())
            shown.view.goto(path.as_uri())
            shown.settle()
            yield shown
            assert shown.errors == []
            assert shown.requests == [path.as_uri()]
            assert shown.view.evaluate("window.broken") is None
        finally:
            context.close()

    return opened


def test_everything_is_drawn(show: Show) -> None:
    found = nasty()
    with show(found) as shown:
        assert shown.colours("#timeline-canvas") > 10
        assert shown.colours("#load-canvas") > 3
        text = shown.text("body")
        for word in (found.fingerprint, "predicted step", "exposed communication", "peak buffers", "impossible"):
            assert word in text
        assert f"matrices\n{found.matrices}\n" in shown.text("#tiles")
        assert "20 m n2 + 2 m n + 10 n3 + 1" in text.replace("\u2009", " ")
        assert NASTY[0] in shown.text("h1")
        for alternative in found.alternatives:
            assert alternative.name in shown.text("#alternatives")
        rates = shown.text("#rate-rows")
        kinds = [shown.view.locator(f"#rate-rows .{kind}").count() for kind in ("measured", "assumed")]
        assert kinds == [len(found.hardware.measured), len(found.hardware.assumed)]
        assert min(kinds) >= 2
        assert all(source in rates for _, source in found.hardware.sources)
        shown.view.locator("#groups summary").click()
        assert shown.view.locator("#groups tbody tr").count() == len(found.groups)


def test_matrices_are_found_by_name_and_rank(show: Show) -> None:
    found = nasty()
    with show(found) as shown:
        shown.view.locator("#matrices summary").click()
        rows = shown.view.locator("#matrix-rows tbody tr")
        shown.until(lambda: rows.count() == len(found.tasks))
        shown.view.locator("#find").fill("<!-- <script>")
        assert rows.count() == 1
        shown.view.locator("#find").fill("rank 1")
        assert rows.count() == sum(t.owner == 1 for t in found.tasks)


def test_pointing_names_the_matrices(show: Show) -> None:
    found = forecast(names=NASTY)
    span = next(s for s in found.simulation.spans if s.rank == 0 and NASTY[0] in s.tasks)
    with show(found) as shown:
        x, y = shown.find(f"compute, micro-group {span.group}")
        tip = shown.text("#tip")
        assert NASTY[0] in tip
        assert "processor" in tip
        shown.view.mouse.click(x, y)
        assert [item for item in shown.view.locator("#detail li").all_inner_texts() if item in span.tasks]
        shown.view.mouse.move(0, 0)
        assert shown.view.locator("#tip").is_hidden()
        assert shown.view.locator("#detail").is_visible()
        box = shown.box("#timeline-canvas")
        shown.view.mouse.move(box["x"] + 90, box["y"] + 28 + 4 + 22 + 10 + 23)
        assert "sends" in shown.text("#tip")
        assert "4 ranks" in shown.text("#tip")


def test_every_way_to_zoom_and_move(show: Show) -> None:
    with show(forecast()) as shown:
        mouse, keyboard = shown.view.mouse, shown.view.keyboard
        whole = shown.seen()
        box = shown.box("#timeline-canvas")
        middle = box["x"] + box["width"] / 2, box["y"] + 60

        def changes(act: Callable[[], object]) -> tuple[float, float]:
            before = shown.seen()
            act()
            shown.until(lambda: shown.seen() != before)
            return shown.seen()[0] - before[0], (shown.seen()[1] - shown.seen()[0]) / (before[1] - before[0])

        mouse.move(*middle)
        assert changes(lambda: mouse.wheel(0, -300))[1] < 0.7
        drawn = shown.text("#range")
        assert changes(lambda: shown.view.locator("#zoom-in").click())[1] == pytest.approx(0.5)
        assert shown.text("#range") != drawn
        assert changes(lambda: shown.view.locator("#zoom-out").click())[1] == pytest.approx(2)
        assert changes(lambda: shown.view.locator("#later").click())[0] > 0
        assert changes(lambda: shown.view.locator("#earlier").click())[0] < 0
        mouse.move(*middle)
        mouse.down()
        assert changes(lambda: mouse.move(middle[0] - 80, middle[1]))[0] > 0
        mouse.up()
        assert shown.view.locator("#detail").is_hidden()  # a drag is no click
        shown.view.locator("#lanes").focus()
        assert changes(lambda: keyboard.press("+"))[1] == pytest.approx(0.5)
        assert changes(lambda: keyboard.press("-"))[1] == pytest.approx(2)
        assert changes(lambda: keyboard.press("Shift+ArrowLeft"))[0] < 0
        changes(lambda: keyboard.press("0"))
        assert shown.seen() == whole
        scrolled = shown.view.evaluate("scrollY")
        mouse.move(*middle)
        mouse.wheel(0, 200)  # all is in sight: a wheel scrolls the page
        shown.until(lambda: shown.view.evaluate("scrollY") > scrolled)
        assert shown.seen() == whole


def test_keys_go_from_span_to_span(show: Show) -> None:
    found = forecast()
    with show(found) as shown:
        shown.view.locator("#lanes").focus()
        titles = []
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown"):
            shown.view.keyboard.press(key)
            titles.append(shown.text("#detail strong"))
        assert titles[:3] == ["prepare, micro-group 0", "prepare, micro-group 1", "compute, micro-group 0"]
        assert titles[3].startswith("gather")
        shown.view.keyboard.press("Escape")
        assert shown.view.locator("#detail").is_hidden()
        shown.view.locator("#load-chart").focus()
        shown.view.keyboard.press("ArrowRight")
        assert "Rank 0" in shown.text("#tip")


def test_fingers(show: Show) -> None:
    with show(forecast(), PHONE, has_touch=True, is_mobile=True, device_scale_factor=2) as shown:
        box = shown.box("#timeline-canvas")
        x, y = box["x"] + 110, box["y"] + 64
        shown.view.touchscreen.tap(x, y)
        assert "compute, micro-group 0" in shown.text("#tip")
        assert shown.view.locator("#detail li").count() > 0
        session = shown.view.context.new_cdp_session(shown.view)
        before = shown.seen()
        for kind, apart in (("touchStart", 20), ("touchMove", 50), ("touchMove", 90), ("touchEnd", None)):
            sides = () if apart is None else (-apart, apart)
            points = [{"x": x + 60 + side, "y": y, "id": i} for i, side in enumerate(sides)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        shown.until(lambda: shown.seen()[1] - shown.seen()[0] < 0.5 * (before[1] - before[0]))


@pytest.mark.parametrize("width", [320, 390, 768])
@pytest.mark.parametrize("make", [nasty, lambda: forecast(2000, 3, 4, most_shown=20)], ids=["nasty", "many ranks"])
def test_nothing_is_wider_than_the_screen(show: Show, width: int, make: Callable[[], Forecast]) -> None:
    with show(make(), (width, 844)) as shown:
        shown.view.evaluate("document.querySelectorAll('details').forEach((own) => { own.open = true; })")
        shown.settle()
        assert shown.view.evaluate("document.documentElement.scrollWidth") <= width
        too_wide = """(width) => [...document.querySelectorAll("body *")]
            .filter((own) => !own.closest(".sr, thead, [hidden]") && own.getBoundingClientRect().right > width + 0.5)
            .map((own) => own.tagName + "#" + own.id + "." + own.className)"""
        assert shown.view.evaluate(too_wide, width) == []


def test_dark_and_light(show: Show) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with show(forecast(), color_scheme="light") as shown:
        light, pixels = shown.view.evaluate(ground), shown.view.locator("#timeline-canvas").screenshot()
        shown.view.emulate_media(color_scheme="dark")
        shown.until(lambda: shown.view.locator("#timeline-canvas").screenshot() != pixels)
        dark = shown.view.evaluate(ground)

    def brightness(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert brightness(dark) < 150 < 600 < brightness(light)


def test_controls_have_names(show: Show) -> None:
    with show(forecast()) as shown:
        nameless = """[...document.querySelectorAll("button, input, [tabindex], [role=img], table, section")]
            .filter((own) => !(own.getAttribute("aria-label") || own.getAttribute("aria-labelledby")
                || own.labels?.length || own.textContent.trim()))
            .map((own) => own.outerHTML.slice(0, 80))"""
        assert shown.view.evaluate(nameless) == []
        shown.view.locator("body").click(position={"x": 2, "y": 2})
        reached = set()
        for _ in range(60):
            shown.view.keyboard.press("Tab")
            reached.add(shown.view.evaluate("document.activeElement.id"))
        assert {"lanes", "zoom-in", "later", "load-chart"} <= reached


def test_thousands_of_ranks_and_spans(show: Show) -> None:
    found = forecast(4096, 120, 40, most_shown=32)
    assert len(found.simulation.spans) > 15_000
    with show(found) as shown:
        assert "4,096 ranks" in shown.text("#load-about")
        assert shown.view.locator("#load-classes .classes > div").count() == 32
        box = shown.box("#load-canvas")
        shown.view.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 100)
        assert shown.text("#tip").startswith("Ranks ")
        box = shown.box("#timeline-canvas")
        shown.view.mouse.move(box["x"] + 400, box["y"] + 100)
        spent = []
        for _ in range(6):
            shown.view.mouse.wheel(0, -120)
            shown.settle()
            spent.append(float(shown.view.locator("#timeline-canvas").get_attribute("data-spent")))
        assert sorted(spent)[len(spent) // 2] < 100  # milliseconds; a few on a machine that is not busy


def test_a_plan_without_anything(show: Show) -> None:
    found = forecast()
    bare = replace(
        found,
        matrices=0,
        templates=(),
        tasks=(),
        groups=(),
        loads=(),
        alternatives=(),
        assumptions=(),
        simulation=Simulation(0.0, (), (), (), ()),
    )
    with show(bare, PHONE) as shown:
        assert shown.view.locator("#timeline").is_hidden()
        assert shown.view.locator("#load").is_hidden()
        assert "matrices\n0\n" in shown.text("#tiles")
