"""Ready-made observers of the pipeline. Passes know nothing of them."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from canzona_compile.ir.pipeline import Record
from canzona_compile.ir.printer import differences, show
from canzona_compile.ir.step import Step


@dataclass(slots=True)
class PrintSteps:
    """Print the step after every pass."""

    file: TextIO = field(default_factory=lambda: sys.stdout)

    def __call__(self, record: Record) -> None:
        print(f"{headline(record)}\n{show(record.after)}", file=self.file)


@dataclass(slots=True)
class DiffSteps:
    """Print what every pass changed, as a unified diff."""

    file: TextIO = field(default_factory=lambda: sys.stdout)

    def __call__(self, record: Record) -> None:
        changes = differences(show(record.before), show(record.after))
        print(f"{headline(record)}\n{changes or '(unchanged)'}", file=self.file)


@dataclass(slots=True)
class DumpSteps:
    """Write every step to a folder: 000_captured.ir, 001_canonicalize.ir, 002_place.ir, ..."""

    directory: str | Path
    _count: int = field(default=0, init=False)
    _last: Step | None = field(default=None, init=False)

    def __call__(self, record: Record) -> None:
        if record.before is not self._last:  # a pipeline begins
            self._write(record.before, record.before.form.name.lower())
        self._write(record.after, record.name)

    def _write(self, step: Step, name: str) -> None:
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self._count:03d}_{name}.ir").write_text(show(step), encoding="utf-8")
        self._count += 1
        self._last = step


@dataclass(slots=True)
class LogTimes:
    """Log the time of every pass at level INFO."""

    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("canzona_compile"))

    def __call__(self, record: Record) -> None:
        self.logger.info(
            "%s: %.1f ms, form %s, %+d nodes",
            record.name,
            record.seconds * 1e3,
            record.after.form.name.lower(),
            record.nodes,
        )


def headline(record: Record) -> str:
    return f"# after {record.name} ({record.seconds * 1e3:.1f} ms)"
