"""The page of a forecast in a browser: all of it is drawn and found by name, and nothing is loaded or goes wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from canzona_compile.report.html import html
from canzona_compile.tools.planning.plan_page import plan_page
from tests.tools.forecasts import NASTY, nasty

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")


def test_everything_is_drawn_and_found(tmp_path: Path) -> None:
    play = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    found, path, errors, requests = nasty(), tmp_path / "forecast.html", [], []
    path.write_text(html(plan_page(found)), encoding="utf-8")
    with play.sync_playwright() as running, running.chromium.launch(executable_path=browser, args=list(FLAGS)) as made:
        view = made.new_page()
        view.set_default_timeout(120_000)
        view.on("console", lambda message: errors.append(message.text))
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.on("request", lambda request: requests.append(request.url))
        view.goto(path.as_uri())
        for chart in view.evaluate("[...document.querySelectorAll('.chart')].map((own) => own.id)"):
            view.locator(f"#{chart}").scroll_into_view_if_needed()
            view.wait_for_selector(f"#{chart} .point", state="attached")
        assert NASTY[0] in view.locator("h1").inner_text()
        assert found.fingerprint in view.locator("body").inner_text()
        view.locator("#tasks summary").click()
        rows = view.locator("#tasks details tbody tr")
        assert rows.count() == len(found.tasks)
        view.locator("#tasks input").fill("<!-- <script>")
        assert rows.count() == 1
        view.locator("#tasks input").fill("rank 1")
        assert rows.count() == sum(task.owner == 1 for task in found.tasks)
        assert (errors, requests, view.evaluate("window.broken")) == ([], [path.as_uri()], None)
