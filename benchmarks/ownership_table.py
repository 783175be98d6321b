"""How unevenly rules of ownership load data-parallel ranks: Qwen3's fused matrices, by FLOPs of Newton-Schulz.

    python benchmarks/ownership_table.py

Beside each figure stands that of an independent simulation of the same rules. Exit code 1 if one is off by more than
two percent. Figures are the busiest row by the mean row, of 5 steps on whole matrices; the last column is the longest
shard of a bucket by the mean one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

import canzona_compile
from canzona_compile.ownership.alpha import AlphaBalanced, static_start
from canzona_compile.ownership.buffer import Shards, length, rows_of
from canzona_compile.ownership.jobs import NOTHING, Job, Rows, imbalance, loads
from canzona_compile.ownership.lpt import TwoStageLpt

DATA = Path(canzona_compile.__file__).parent / "data" / "models.json"
STEPS = 5  # of Newton-Schulz
OFF = 0.02  # that a figure may differ from the simulated one
RULES = ("start index", "alpha = 0", "alpha = 1", "contiguous", "free order", "worst shard")


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on TP x DP ranks, and what the simulation says, in the order of RULES."""

    model: str
    tensor_parallel: int
    rows: int
    reference: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: our figures, in the order of RULES."""

    setting: Setting
    figures: tuple[float, ...]

    @property
    def off(self) -> tuple[float, ...]:
        """By how much each differs, relatively."""
        return tuple(abs(a / b - 1) for a, b in zip(self.figures, self.setting.reference, strict=True))


SETTINGS = (
    Setting("qwen3-1.7b", 4, 64, (1.88, 1.63, 1.63, 1.22, 1.06, 1.7)),
    Setting("qwen3-4b", 4, 64, (2.48, 2.14, 1.66, 1.34, 1.04, 7.7)),
    Setting("qwen3-8b", 8, 32, (1.68, 1.74, 1.12, 1.32, 1.02, 7.5)),
    Setting("qwen3-14b", 8, 32, (2.24, 1.60, 1.20, 1.20, 1.01, 18.7)),
    Setting("qwen3-32b", 8, 32, (2.34, 2.34, 1.16, 1.00, 1.00, 14.4)),
    Setting("qwen3-32b", 1, 64, (31.6, 31.6, 1.22, 1.00, 1.00, 38.6)),
    Setting("qwen3-32b", 1, 256, (126, 126, 2.04, 2.04, 2.04, 154)),
)


def table_rows() -> list[Row]:
    """The whole table; takes about a second."""
    return [Row(setting, figures_of(setting)) for setting in SETTINGS]


def figures_of(setting: Setting) -> tuple[float, ...]:
    """Those of one line.

    The balanced rule is shown as it cuts, whether or not its plan would then be taken instead of the static one.
    """
    jobs, rows = jobs_of(setting.model, setting.tensor_parallel), setting.rows
    static = static_start(jobs, rows)
    even, balanced = (AlphaBalanced(alpha).shards(jobs, rows) for alpha in (0.0, 1.0))
    free = {job.index: r for job, (r, _) in zip(jobs, TwoStageLpt()(jobs, rows, 1, NOTHING), strict=True)}
    plans = (rows_of(static), rows_of(even), rows_of(balanced), contiguous(jobs, rows), free)
    return (*(imbalance_of(jobs, plan, rows) for plan in plans), worst_shard(balanced))


def worst_shard(shards: Shards) -> float:
    """The length of the longest shard divided by the mean of its bucket, in the worst bucket; at least 1."""
    lengths = [[length(shard) for shard in bucket] for bucket in shards]
    return max((max(own) * len(own) / sum(own) for own in lengths if sum(own)), default=1.0)


def imbalance_of(jobs: Sequence[Job], plan: Rows, rows: int) -> float:
    return imbalance(loads(jobs, [(plan[job.index], 0) for job in jobs], rows, 1))


def contiguous(jobs: Sequence[Job], rows: int) -> dict[int, int]:
    """The best plan in which each row owns one run of the buffer, buckets ignored. Costs have to be integers."""
    least, most = int(max(job.cost for job in jobs)), int(sum(job.cost for job in jobs))
    while least < most:
        middle = (least + most) // 2
        if max(runs(jobs, middle).values()) < rows:
            most = middle
        else:
            least = middle + 1
    return runs(jobs, least)


def runs(jobs: Sequence[Job], limit: float) -> dict[int, int]:
    """As few runs as possible, none above the limit: a run ends where the next job no longer fits."""
    found: dict[int, int] = {}
    run, own = 0, 0.0
    for job in sorted(jobs, key=lambda j: j.index):
        if own + job.cost > limit:
            run, own = run + 1, 0.0
        own += job.cost
        found[job.index] = run
    return found


def jobs_of(model: str, tensor_parallel: int) -> list[Job]:
    """All fused matrices in the order in which Megatron registers them: whole costs, elements of a rank's shard."""
    config = models()[model]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{heads}_heads"] * config["head_dim"] for heads in ("attention", "key_value"))
    shapes = {"proj": (hidden, q), "qkv": (q + 2 * kv, hidden), "fc1": (2 * inner, hidden), "fc2": (hidden, inner)}
    named = [(f"{i}.{name}", shape) for i in range(config["num_hidden_layers"]) for name, shape in shapes.items()]
    return [
        Job(name, index, newton_schulz(*shape), shape[0] * shape[1] // tensor_parallel)
        for index, (name, shape) in enumerate(named)
    ]


def newton_schulz(rows: int, columns: int, steps: int = STEPS) -> float:
    """FLOPs of one matrix: per step two products of m x m x n, n >= m, and one of m x m x m."""
    m, n = sorted((rows, columns))
    return float(steps * (4 * n * m**2 + 2 * m**3))


@cache
def models() -> Mapping[str, Mapping[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def render(rows: Sequence[Row]) -> Table:
    """Ours, and in brackets the simulation's; figures that are off are red."""
    table = Table(title="Busiest data-parallel rank by the mean one (simulated)", title_justify="left")
    for column in ("model", "TP", "DP", *RULES):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        own = row.setting
        cells = [
            f"[red]{ours:.2f} ({theirs:g})[/]" if off > OFF else f"{ours:.2f} ({theirs:g})"
            for ours, theirs, off in zip(row.figures, own.reference, row.off, strict=True)
        ]
        table.add_row(own.model, str(own.tensor_parallel), str(own.rows), *cells)
    return table


def main() -> int:
    rows = table_rows()
    Console(width=None if sys.stdout.isatty() else 120).print(render(rows))
    return int(any(off > OFF for row in rows for off in row.off))


if __name__ == "__main__":
    sys.exit(main())
