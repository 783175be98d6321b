"""Have ranks survey one optimizer after the other, and show what they found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from survey_ranks import Ranks, Stuck
from survey_results import ERROR, FAILURES, Difference, Finding, Survey, severity
from survey_trial import Trial, survey

STYLES = {"eager": "yellow", **dict.fromkeys(FAILURES, "red")}


def run_all(trials: Iterable[Trial], found: Survey, limit: float, path: str | None) -> Survey:
    """Survey optimizers and tell each outcome.

    Args:
        trials: what to try.
        found: what the findings are added to.
        limit: seconds for one optimizer.
        path: the file that gets the results as JSON, after each one: a long run may be stopped.
    """
    progress = Console(stderr=True)
    ranks = Ranks(found.ranks, limit)
    for trial in trials:
        row = ask(ranks, trial)
        progress.print(f"{row.outcome:>11}  {row.package} {row.name} {row.layout}", highlight=False)
        found = replace(found, findings=[*found.findings, row])
        if path:
            Path(path).write_text(json.dumps(asdict(found), indent=2) + "\n")
    ranks.close()
    return found


def ask(ranks: Ranks, trial: Trial) -> Finding:
    """Have one optimizer surveyed."""
    try:
        findings: list[Finding] = ranks.run(survey, trial)
    except Stuck as stuck:
        return Finding(trial.name, ERROR, str(stuck), package=trial.package, layout=trial.layout)
    worst = max(findings, key=lambda finding: severity(finding.outcome))
    if worst.outcome == ERROR:
        ranks.close()  # a collective may be left pending
    return worst


def table_of(found: Survey) -> Table:
    """One row per optimizer, with the number of each outcome above."""
    counts = Counter(row.outcome for row in found.findings)
    outcomes = sorted(counts, key=lambda outcome: (severity(outcome), -counts[outcome]))
    packages = ", ".join(f"{name} {version}".strip() for name, version in found.packages.items())
    title = f"{packages}; torch {found.torch}, {found.ranks} gloo ranks, {found.steps} steps: " + ", ".join(
        f"{counts[outcome]} {outcome}" for outcome in outcomes
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("package", "optimizer", "layout", "nature", "outcome", "parameters", "state"):
        table.add_column(column, no_wrap=column == "optimizer")
    for column in ("captures", "first step s"):
        table.add_column(column, justify="right")
    table.add_column("reason")
    for row in found.findings:
        table.add_row(*cells(row))
    return table


def cells(row: Finding) -> Sequence[str]:
    style = STYLES.get(row.outcome, "green")
    return (
        row.package,
        row.name,
        row.layout,
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
