"""The results of a run in two files, JSON and a page, which are written anew after every result.

The page is Markdown, so that people can read it as it is, attach it to a report or paste it into one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from acceptance.step import StepResult

SCHEMA = 1
NAME = "acceptance"
UNFINISHED = ".unfinished"
SELDOM = 20.0  # seconds between archives: with traces of the benchmark one takes a while
FENCE = "`" * 6  # longer than any that a traceback may hold
LONGEST = 20_000  # letters of one detail: the end says most


def files_of(output: Path) -> Path:
    """The folder for everything that is not meant to be carried away file by file."""
    return output.with_name(f"{output.name}-files")


class AcceptanceJournal:
    """What is known so far. A crash of the machine costs nothing that was added before.

    Args:
        output: where the page and the archive go, and nothing else: a machine may give back a few files only.
        part: what is run, the name of the folder in `files_of(output)` for its own page and `acceptance.json`.
    """

    def __init__(self, output: Path, part: str, facts: Mapping[str, str]) -> None:
        self.output, self.folder, self.facts = output, files_of(output) / part, dict(facts)
        for folder in (self.output, self.folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.results: list[StepResult] = []
        self._began, self._complete, self._packed = time.time(), False, -SELDOM
        self._write()

    @property
    def failed(self) -> list[StepResult]:
        """The steps that failed, or never ended."""
        return [result for result in self.results if result.status in ("failed", "running")]

    @property
    def page(self) -> Path:
        """The file for people, with what earlier parts found."""
        return self.output / f"{NAME}.md"

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
        """Put all files of this part and of earlier ones into the archive; the archive."""
        path, files = self.output / f"{NAME}.tar.gz", files_of(self.output)
        unfinished = files / f"{path.name}{UNFINISHED}"
        with tarfile.open(unfinished, "w:gz") as archive:
            archive.add(files, files.name, filter=lambda file: None if file.name.endswith(UNFINISHED) else file)
        os.replace(unfinished, path)
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
        own = self.folder / f"{NAME}.md"
        replace(own, "\n".join(self._page_lines(f"Began {began}, {seconds:.0f} s.")) + "\n")
        pages = sorted(files_of(self.output).glob(f"*/{NAME}.md"), key=lambda path: path.stat().st_mtime, reverse=True)
        replace(self.page, "\n".join(path.read_text(encoding="utf-8") for path in pages))
        if self._complete or time.monotonic() > self._packed + SELDOM:
            with contextlib.suppress(OSError):  # a process may write or remove a file meanwhile
                self.pack()
            self._packed = time.monotonic()

    def _page_lines(self, began: str) -> Iterator[str]:
        dry = self.facts.get("device") == "cpu"
        yield from (f"# canzona_compile: acceptance, {self.folder.name}", "", verdict(self.results, self._complete), "")
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
    unfinished = path.with_suffix(f"{path.suffix}{UNFINISHED}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


# -- the page --------------------------------------------------------------------------------------


def verdict(results: Sequence[StepResult], complete: bool) -> str:
    """The outcome in a sentence; only numbers that are wrong speak against training."""
    if not complete:
        last = results[-1].name if results else "the first step"
        return f"**Not complete**: {counted(results)}; `{last}` was the last step to begin."
    if wrong := [f"`{result.name}`" for result in results if result.wrong]:
        return f"**Do not train with this**: {counted(results)}; wrong results in {', '.join(dict.fromkeys(wrong))}."
    if any(result.status == "failed" for result in results):
        return f"**Something failed**: {counted(results)}. No result that was compared is wrong; look at what failed."
    return f"**Nothing failed**: {counted(results)}."


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
