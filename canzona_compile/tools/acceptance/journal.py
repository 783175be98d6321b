"""The results of a run in two files, JSON and a page, which are written anew after every result.

The page is Markdown, so that people can read it as it is, attach it to a report or paste it into one.
"""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from canzona_compile.tools.acceptance.step import StepResult

SCHEMA = 1
NAME = "acceptance"
FENCE = "`" * 6  # longer than any that a traceback may hold
LONGEST = 20_000  # letters of one detail: the end says most


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
    def failed(self) -> list[StepResult]:
        """The steps that failed, or never ended."""
        return [result for result in self.results if result.status in ("failed", "running")]

    @property
    def page(self) -> Path:
        """The file for people."""
        return self.folder / f"{NAME}.md"

    def add(self, result: StepResult) -> None:
        """Note a result, in the place of what was noted of the same step."""
        if self.results and (self.results[-1].name, self.results[-1].ranks) == (result.name, result.ranks):
            self.results.pop()
        self.results.append(result)
        self._write()

    def finish(self) -> None:
        """Note that all steps were taken, or left out for want of time."""
        self._complete = True
        self._write()

    def pack(self) -> Path:
        """Put the folder with everything in it into one archive beside it; the archive."""
        path = self.folder.with_name(f"{self.folder.name}.tar.gz")
        with tarfile.open(path, "w:gz") as archive:
            archive.add(self.folder, self.folder.name)
        return path

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
        replace(self.page, "\n".join(self._page_lines(f"Began {began}, {seconds:.0f} s.")) + "\n")

    def _page_lines(self, began: str) -> Iterator[str]:
        dry = self.facts.get("device") == "cpu"
        yield from ("# canzona_compile: acceptance", "", verdict(self.results, self._complete), "")
        if dry:
            yield "This was a dry run on the CPU. It says nothing about a GPU: no step was recorded or measured."
            yield ""
        yield from (began, "", "| machine | |", "|---|---|")
        yield from (f"| {name} | {cell(value)} |" for name, value in self.facts.items() if value)
        if self.failed:
            yield from ("", "## What failed, or has not ended")
            for result in self.failed:
                yield from told(result)
        yield from ("", "## All steps", "", "| step | ranks | result | found | s |", "|---|---|---|---|---|")
        yield from (
            f"| {r.name} | {r.ranks or ''} | {r.status} | {cell(r.said)} | {r.seconds:.0f} |" for r in self.results
        )
        if shown := dict.fromkeys(f"- **{r.name}**: {r.shows}" for r in self.results if r.status == "passed"):
            yield from ("", "## What would be known on a GPU" if dry else "## What is known now", "", *shown)


def replace(path: Path, text: str) -> None:
    """Write a file so that there is an old one or a new one at any time, also after a power cut."""
    unfinished = path.with_suffix(f"{path.suffix}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


# -- the page --------------------------------------------------------------------------------------


def verdict(results: Sequence[StepResult], complete: bool) -> str:
    """The outcome in a sentence."""
    if not complete:
        last = results[-1].name if results else "the first step"
        return f"**Not complete**: {counted(results)}; `{last}` was the last step to begin."
    failed = any(result.status == "failed" for result in results)
    return f"**{'Something failed' if failed else 'Nothing failed'}**: {counted(results)}."


def counted(results: Sequence[StepResult]) -> str:
    """How many steps ended in which way."""
    count = Counter(result.status for result in results)
    return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"


def told(result: StepResult) -> Iterator[str]:
    """A failure: what it means, what was found, and the details folded away."""
    yield from ("", f"### {result.name}, {result.by}", "", f"*What it means*: {result.failing}", "")
    yield from (FENCE, result.said or "it has not ended", FENCE)
    for name, text in result.details:
        yield from ("", f"<details><summary>{cell(name)}</summary>", "", FENCE, text[-LONGEST:], FENCE, "</details>")


def cell(text: str) -> str:
    """The first line of a text, so that it stays one cell of a table."""
    lines = text.strip().splitlines()
    first = lines[0] if lines else ""
    return first.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
