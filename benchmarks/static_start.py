"""The static rule of Canzona's authors as a planner: the row in whose shard of the buffer a job starts owns the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import Pass
from canzona_compile.ownership.alpha import static_start
from canzona_compile.ownership.buffer import rows_of
from canzona_compile.ownership.jobs import NOTHING, GridPosition, Job, LoadByRank, within_rows
from canzona_compile.passes import AssignOwners, planning_passes


class StaticStart:
    """The columns of a row share its jobs, largest first by elements. It reads neither costs nor `load`."""

    name: ClassVar[str] = "static"
    about: ClassVar[str] = "the rank in whose share of the buffer a matrix starts (Canzona's equation 1)"

    def __call__(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank) -> list[GridPosition]:
        return within_rows(jobs, rows_of(static_start(jobs, rows)), columns, "elements", load)

    def bound(self, jobs: Sequence[Job], rows: int, columns: int, load: LoadByRank = NOTHING) -> float:
        """That of any plan: all jobs on one place cost as often the mean as there are places."""
        return float(rows * columns)


def planning_by(planner: str) -> list[Pass]:
    """The passes that give each matrix an owner, by "static" or a planner of the package."""
    if planner != StaticStart.name:
        return planning_passes(Options(strategy="owner", planner=planner))
    passes = planning_passes(Options(strategy="owner"))
    return [AssignOwners("owner", StaticStart()) if isinstance(p, AssignOwners) else p for p in passes]
