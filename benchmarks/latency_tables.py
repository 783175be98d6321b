"""Results for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from latency_first_step import FirstStep
from latency_results import CaseResult, ModelResult, Spread
from latency_variants import OURS


def case_table(case: CaseResult) -> Group:
    """Every variant of a case, then its first step."""
    table = Table(title=f"{case.name}: {case.about}", title_justify="left", title_style="bold")
    table.add_column("variant")
    for column in (
        "step ms (p10-p90)",
        "by ours (p10-p90)",
        "collectives",
        "bytes sent",
        "B/element",
        "CPU us/matrix",
        "bits",
    ):
        table.add_column(column, justify="right")
    notes: list[Text] = []
    for name, result in case.variants.items():
        if result.step_ms is None or result.cpu_us_per_matrix is None:
            table.add_row(name, "does not run")
            notes.append(Text(f"{name} does not run: {result.failure}", style="yellow"))
            continue
        table.add_row(
            name,
            show(result.step_ms, "{:.1f}"),
            "1" if name == OURS else show(case.ratios[name], "{:.2f}x"),
            str(result.collectives),
            f"{result.bytes_sent:,}",
            f"{result.bytes_per_element:.3f}",
            f"{result.cpu_us_per_matrix.median:.0f}",
            {True: "equal", False: "differ", None: ""}[result.same_bits],
        )
    return Group(table, *notes, plan_line(case), first_step_line(case.first_step), "")


def model_table(model: ModelResult) -> Group:
    """A model of `--first-step`."""
    table = Table(title=f"{model.name}: {model.about}", title_justify="left", title_style="bold", min_width=76)
    table.add_column(f"{model.matrices} matrices")
    table.add_column("us/matrix (p10-p90)", justify="right")
    table.add_row("steady step, wall", show(model.step_us_per_matrix, "{:.1f}"))
    table.add_row("steady step, CPU", show(model.cpu_us_per_matrix, "{:.1f}"))
    stages = first_step_line(model.first_step)
    return Group(table, plan_line(model), stages, passes_line(model.first_step), "")


def plan_line(result: CaseResult | ModelResult) -> str:
    chosen = ", ".join(f"{n} {name}" for name, n in result.decision.strategies.items())
    return (
        f"{result.matrices} matrices, {result.elements:,} elements; plan: {chosen}, "
        f"{result.decision.micro_groups} micro-group(s), "
        f"load max/mean {result.decision.imbalance:.3f}"
    )


def first_step_line(first: FirstStep) -> str:
    staged = first.capture + first.passes + first.emit
    return (
        f"first step {first.total:.2f} s (CPU {first.cpu:.2f}): capture {first.capture:.2f} ({first.captures} graphs)"
        f" + passes {first.passes:.2f} + emit {first.emit:.2f} = {staged:.2f} s,"
        f" rest {first.rest:.2f} s"
    )


def passes_line(first: FirstStep) -> str:
    return "passes, ms: " + ", ".join(f"{n} {s * 1e3:.1f}" for n, s in first.by_pass.items())


def show(values: Spread, form: str) -> str:
    median = form.format(values.median)
    if values.count < 3:
        return f"{median} ({values.count} steps)" if values.count > 1 else f"{median} (1 step)"
    return f"{median} ({form.format(values.p10)}-{form.format(values.p90)})"
