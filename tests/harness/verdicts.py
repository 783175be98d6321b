"""What the wrapper has reached for each optimizer that tests know: tests/golden/verdicts/, a line each.

Many a trap may be either followed or refused, so its own expectation does not notice a loss. These lines do: whatever
they no longer say is a failing test, for better or worse. A better verdict is accepted by GOLDEN=accept; a worse one
only with its reason in the commit.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "verdicts"


@dataclass(frozen=True, slots=True)
class Frozen:
    """A file of verdicts, by name of the optimizer and of the layout."""

    name: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"

    def lines(self) -> dict[str, str]:
        """Verdicts by what they are of."""
        if not self.path.exists():
            return {}
        return dict(line.split(" | ", 1) for line in self.path.read_text(encoding="utf-8").splitlines())

    def mistakes(self, of: str, found: str) -> list[str]:
        """What is wrong with a verdict: nothing, or that it is another than the file's.

        Args:
            of: the optimizer and the layout, as in "adamw fsdp".
            found: the verdict in words, see `reached`. With GOLDEN=accept the file gets it.
        """
        if os.environ.get("GOLDEN") == "accept":
            self._accept(of, found)
            return []
        frozen = self.lines().get(of, "nothing yet")
        if frozen == found:
            return []
        return [f"{of} was '{frozen}' and is '{found}'; accept it with GOLDEN=accept, see {Path(__file__).name}"]

    def _accept(self, of: str, found: str) -> None:
        """Write a line. Workers of one run take turns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            lines = self.lines() | {of: found}
            file.truncate(0)
            file.write("".join(f"{name} | {verdict}\n" for name, verdict in sorted(lines.items())))


TRAPS, SURVEY, EXAMPLES = Frozen("traps"), Frozen("survey"), Frozen("examples")


def reached(kind: str, ways: Iterable[str] = (), error: str = "") -> str:
    """A verdict in words: "equal: compiled, local" or "refused: UnsupportedOptimizer".

    Args:
        kind: "equal", "refused" or what else came of it.
        ways: how parameters run, see `ways_of`.
        error: the class of the refusal.
    """
    said = ", ".join(sorted(set(ways))) or error
    return f"{kind}: {said}" if said else kind


def ways_of(optimizer: Any) -> set[str]:
    """How the parameters of a wrapped optimizer run: "compiled", "eager matrix", "local" and so on."""
    return {" ".join(filter(None, (row.how, row.cell))) for row in optimizer.canzona.explain().parameters}
