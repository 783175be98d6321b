"""Every optimizer of the package `pytorch-optimizer`, wrapped: does it run, how, and with the bits of the plain one?

    python benchmarks/optimizer_survey.py
    python benchmarks/optimizer_survey.py --only SOAP,Shampoo,Lion --steps 30 --json out.json

Three small matrices of uneven shapes, sharded over gloo ranks that the script starts itself. See README.md beside it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: processes are forked later

import torch
from rich.console import Console
from rich.table import Table

from survey_catalog import names
from survey_ranks import Ranks, Stuck
from survey_results import COMPILED, ELEMENTWISE, ERROR, INTERPRETED, OUTCOMES, SCHEMA, Difference, Finding, Survey
from survey_trial import survey

SEED = 1000
STYLES = {COMPILED: "green", ELEMENTWISE: "green", INTERPRETED: "yellow"}


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    only: tuple[str, ...]
    ranks: int
    steps: int
    limit: float
    json: str | None


def parse() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated names (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of every optimizer (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one optimizer (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    given = parser.parse_args()
    known = names()
    only = tuple(given.only.split(",")) if given.only else tuple(known)
    if unknown := [name for name in only if name not in known]:
        parser.error(f"no optimizer {', '.join(unknown)}; there are {', '.join(known)}")
    if given.steps < 1 or given.ranks < 1:
        parser.error("--steps and --ranks must be at least 1")
    return Settings(only, given.ranks, given.steps, given.limit, given.json)


def main() -> None:
    settings = parse()
    console = Console(width=None if sys.stdout.isatty() else 200)
    progress = Console(stderr=True)
    found = Survey(
        SCHEMA, torch.__version__, importlib.metadata.version("pytorch-optimizer"), settings.ranks, settings.steps
    )
    ranks = Ranks(settings.ranks, settings.limit)
    for name in settings.only:
        row = ask(ranks, name, settings)
        progress.print(f"{row.outcome:>11}  {name}", highlight=False)
        found = replace(found, findings=[*found.findings, row])
        if settings.json:  # after each one: a long run may be stopped
            Path(settings.json).write_text(json.dumps(asdict(found), indent=2) + "\n")
    ranks.close()
    console.print(table_of(found))


def ask(ranks: Ranks, name: str, settings: Settings) -> Finding:
    """Have one optimizer surveyed."""
    try:
        findings: list[Finding] = ranks.run(survey, name, settings.steps, SEED)
    except Stuck as stuck:
        return Finding(name, ERROR, str(stuck))
    worst = max(findings, key=lambda finding: OUTCOMES.index(finding.outcome))
    if worst.outcome == ERROR:
        ranks.close()  # a collective may be left pending
    return worst


def table_of(found: Survey) -> Table:
    counts = Counter(row.outcome for row in found.findings)
    title = (
        f"pytorch-optimizer {found.package}, torch {found.torch}, {found.ranks} gloo ranks, {found.steps} steps: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("optimizer", "nature", "outcome", "parameters", "state"):
        table.add_column(column, no_wrap=column == "optimizer")
    for column in ("captures", "first step s"):
        table.add_column(column, justify="right")
    table.add_column("reason")
    for row in found.findings:
        table.add_row(*cells(row))
    return table


def cells(row: Finding) -> Sequence[str]:
    style = STYLES.get(row.outcome, "red")
    return (
        row.name,
        row.nature.text if row.nature else "",
        f"[{style}]{row.outcome}[/]",
        shown(row.params),
        shown(row.state),
        str(row.captures or ""),
        f"{row.seconds:.2f}" if row.seconds else "",
        row.reason.replace("[", "\\[")[:300],
    )


def shown(difference: Difference | None) -> str:
    if difference is None:
        return ""
    if difference.equal:
        return "equal"
    if difference.ulps is None:
        return "differ"
    relative = "" if difference.relative is None else f", {difference.relative:.1e}"
    return f"{difference.ulps} ulp{relative}"


if __name__ == "__main__":
    main()
