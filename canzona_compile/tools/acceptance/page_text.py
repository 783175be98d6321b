"""The page for people: Markdown, so that it can be read as it is, attached to a report or pasted into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from canzona_compile.tools.acceptance.step import StepResult

FENCE = "`" * 6  # longer than any that a traceback may hold
LONGEST = 20_000  # letters of one detail: the end says most


def page_text(
    results: Sequence[StepResult], facts: Mapping[str, str], began: str, seconds: float, complete: bool
) -> str:
    """The whole page.

    Args:
        results: one per step, in order.
        facts: about the machine, by name.
        began: when, in words.
        seconds: since then.
        complete: whether all steps were taken.
    """
    failed = [result for result in results if result.status in ("failed", "running")]
    dry = facts.get("device") == "cpu"
    lines = ["# canzona_compile: acceptance", "", verdict(results, complete), ""]
    if dry:
        lines += ["This was a dry run on the CPU. It says nothing about a GPU: no step was recorded or measured.", ""]
    lines += [f"Began {began}, {seconds:.0f} s.", "", "| machine | |", "|---|---|"]
    lines += [f"| {name} | {cell(value)} |" for name, value in facts.items() if value]
    if failed:
        lines += ["", "## What failed, or has not ended"]
        lines += [line for result in failed for line in told(result)]
    lines += ["", "## All steps", "", "| step | result | found | s |", "|---|---|---|---|"]
    lines += [f"| {r.name} | {r.status} | {cell(r.said)} | {r.seconds:.0f} |" for r in results]
    shown = [f"- **{r.name}**: {r.shows}" for r in results if r.status == "passed"]
    if shown:
        lines += ["", "## What would be known on a GPU" if dry else "## What is known now", "", *shown]
    return "\n".join(lines) + "\n"


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
    yield from ("", f"### {result.name}", "", f"*What it means*: {result.failing}", "")
    yield from (FENCE, result.said or "it has not ended", FENCE)
    for name, text in result.details:
        yield from ("", f"<details><summary>{cell(name)}</summary>", "", FENCE, text[-LONGEST:], FENCE, "</details>")


def cell(text: str) -> str:
    """The first line of a text, so that it stays one cell of a table."""
    lines = text.strip().splitlines()
    first = lines[0] if lines else ""
    return first.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
