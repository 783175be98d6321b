"""The results of a run in two files, JSON and a page, which are written anew after every result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from canzona_compile.tools.acceptance.page_text import page_text
from canzona_compile.tools.acceptance.step import StepResult

SCHEMA = 1
NAME = "acceptance"


class AcceptanceJournal:
    """What is known so far. A crash of the machine costs nothing that was added before.

    Args:
        folder: where `acceptance.json` and `acceptance.md` go; it is there.
        facts: about the machine, by name.

    Attributes:
        results: one per step that was begun, in order.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        self.folder, self.facts = folder, dict(facts)
        self.results: list[StepResult] = []
        self._began, self._complete = time.time(), False
        self._write()

    @property
    def failed(self) -> bool:
        """Whether a step failed, or never ended."""
        return any(result.status in ("failed", "running") for result in self.results)

    @property
    def page(self) -> Path:
        """The file for people."""
        return self.folder / f"{NAME}.md"

    def add(self, result: StepResult) -> None:
        """Note a result, in the place of what was noted of the same step."""
        if self.results and self.results[-1].name == result.name:
            self.results.pop()
        self.results.append(result)
        self._write()

    def finish(self) -> None:
        """Note that all steps were taken."""
        self._complete = True
        self._write()

    def _write(self) -> None:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._began))
        seconds = round(time.time() - self._began, 1)
        whole = {
            "schema": SCHEMA,
            "ok": self._complete and not self.failed,
            "complete": self._complete,
            "began": began,
            "seconds": seconds,
            "machine": self.facts,
            "steps": [asdict(result) for result in self.results],
        }
        replace(self.folder / f"{NAME}.json", json.dumps(whole, indent=1) + "\n")
        replace(self.page, page_text(self.results, self.facts, began, seconds, self._complete))


def replace(path: Path, text: str) -> None:
    """Write a file so that there is an old one or a new one at any time, also after a power cut."""
    unfinished = path.with_suffix(f"{path.suffix}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
