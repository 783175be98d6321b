"""A ready-made observer of the pipeline. Passes know nothing of observers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from canzona_compile.ir.pipeline import PassRecord
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Step


@dataclass(slots=True)
class DumpSteps:
    """Write every step to a folder as passes run: 000_captured.ir, 001_canonicalize.ir, 002_place.ir, ...

    Unlike the `dump()` of a handle it also writes the steps before a pass that fails.

    Attributes:
        directory: is made if it is not there.
    """

    directory: str | Path
    _count: int = field(default=0, init=False)
    _last: Step | None = field(default=None, init=False)

    def __call__(self, record: PassRecord) -> None:
        if record.before is not self._last:  # a pipeline begins
            self._write(record.before, record.before.form.name.lower())
        self._write(record.after, record.name)

    def _write(self, step: Step, name: str) -> None:
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self._count:03d}_{name}.ir").write_text(show(step), encoding="utf-8")
        self._count += 1
        self._last = step
