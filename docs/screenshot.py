"""Pictures of a forecast's page: `python docs/screenshot.py PAGE.html OUT.png [--width 390] [--dark] [--whole]`.

Needs playwright and a Chromium that is installed; it downloads none.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

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
DRAWN = """() => [...document.querySelectorAll(".chart")].every((chart) =>
    !chart.checkVisibility() || chart.getBoundingClientRect().top > innerHeight || chart.querySelector(".point"))"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1180, help="of the part that is shown")
    parser.add_argument("--scale", type=float, default=1.5, help="pixels of the picture per pixel of the page")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole page, however long")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 1
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=browser, args=list(FLAGS))
        view = running.new_page(
            viewport={"width": options.width, "height": options.height},
            device_scale_factor=options.scale,
            color_scheme="dark" if options.dark else "light",
        )
        view.goto(options.page.resolve().as_uri())
        if options.whole:  # charts are drawn when they come into sight
            height = view.evaluate("document.documentElement.scrollHeight")
            view.set_viewport_size({"width": options.width, "height": height})
        view.wait_for_function(DRAWN, timeout=60_000)
        view.screenshot(path=options.out)
        running.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
