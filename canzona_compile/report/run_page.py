"""The page of a run: what its report shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from canzona_compile.errors import some
from canzona_compile.machine.hardware import hardware_of
from canzona_compile.report.page import (
    Block,
    Figure,
    PageModel,
    PageTable,
    Section,
    Timeline,
    Words,
    note,
)
from canzona_compile.report.schema import ProfileReport, RunReport
from canzona_compile.report.sections import (
    bucket_section,
    bullets,
    cost_section,
    event,
    group_section,
    lanes,
    links_text,
    load_section,
    measured_remark,
    measured_section,
    names_by_reason,
    rates_label,
    rates_text,
    state_section,
    task_section,
)
from canzona_compile.report.units import (
    format_bytes,
    format_seconds,
    format_shape,
    plural,
)
from canzona_compile.simulation.engine import COMPUTE

LEVELS = "▁▂▃▄▅▆▇█"  # from little to all
MOST_LEVELS = 40  # letters
UNEVEN = 1.5  # times the mean: the load of a rank that the others wait for


def run_page(report: RunReport) -> PageModel:
    """Build the page of a report, from the figures of a run."""
    alone = [(f"{one.name} {format_shape(one.shape)}", one.why) for one in report.local]
    owners = len({t.owner for t in report.tasks if t.strategy == "owner"})
    everywhere = "all" if any(t.owner is None for t in report.tasks) else "-"
    groups = len(report.micro_groups)
    balance = "green" if report.imbalance < 1.1 else "yellow" if report.imbalance < UNEVEN else "red"
    counted = (
        (len(report.tasks), "matrix", "matrices"),
        (owners or everywhere, "owner\nrank", "owner\nranks"),
        (groups, "micro-group", "micro-groups" + (f"\n{report.depth} in flight" if groups > 1 else "")),
        (report.collectives_per_step, "collective\nper step", "collectives\nper step"),
    )
    return PageModel(
        kind="canzona",
        title=f"{report.optimizer} on {plural(report.world_size, 'rank')}",
        figures=(
            *(Figure(str(count), one if count == 1 else many) for count, one, many in counted),
            Figure(f"{report.wire_bytes_per_element:.2f}", "bytes sent\nper element"),
            Figure(Words(f"{report.imbalance:.2f}x", balance), "busiest rank\nvs the mean"),
        ),
        remarks=tuple(remarks(report)),
        body=(
            measured_section(report.measured),
            load_section(report.loads),
            Section("Schedule", tuple(schedule(report)), simulated_rank(report)),
            profile_section(report.profile, timed=report.predicted_seconds is not None),
            Section("Memory", bullets(memory_sentences(report)), "in addition to parameters, gradients and state"),
            state_section(report.state),
            bucket_section(report.data_parallel),
            group_section(report.micro_groups),
            task_section(report.tasks),
            cost_section(report.templates),
            Section(
                "Without communication",
                tuple(by_reason(alone, "parameter")),
                "parameters that each rank updates by itself",
            ),
            Section(
                "Eager",
                tuple(by_reason(report.fallbacks.items(), "matrix", "matrices")),
                "not compiled: the owner runs the optimizer's own step",
            ),
            Section("Suggestions", bullets(report.suggestions)),
            Section("What to do next", (note(next_step(report)),)),
        ),
    )


def remarks(report: RunReport) -> Iterator[str]:
    """Say how long a step takes, and how the plan was made and runs."""
    machine = report.machine
    yield measured_remark(report.measured) or (
        f"predicted step {format_seconds(report.predicted_seconds or 0.0)}, simulated with "
        f"{rates_label(hardware_of(machine))}"
    )
    if machine.rates is not None and machine.rates.here:
        yield links_text(machine.rates)
    yield f"{'/'.join(filter(None, (machine.device, machine.backend)))}, {report.numerics} numerics"
    yield (
        f"{plural(report.captures, 'capture')}, {plural(report.variants, 'variant')}, "
        f"{plural(report.rank_programs, 'rank program')}, {len(report.fallbacks)} eager"
    )
    if report.execution and machine.device != "cpu":
        yield report.execution
    if report.skipped_steps:
        yield f"{plural(report.skipped_steps, 'step')} skipped, because a gradient was not finite"
    yield from report.bits


def next_step(report: RunReport) -> str:
    """Say what a reader of the report can do next: the first of these that applies."""
    if report.fallbacks:
        return "canzona_compile.explain(optimizer) shows the line of the optimizer's code that keeps a matrix eager."
    if report.imbalance >= UNEVEN:
        return "There are too few large matrices for the ranks. split= cuts fused weights into matrices of their own."
    if report.measured is None:
        return "optimizer.canzona.measure(steps=5) times the next five steps; then print the report again."
    return "optimizer.canzona.plan() is this plan; save its to_json() for wrap(..., plan=) to follow."


def simulated_rank(report: RunReport) -> str:
    """Say whose schedule is drawn."""
    ranks = {span.rank for span in report.schedule}
    return f"simulated: when rank {', '.join(map(str, ranks))}, which computes most, is busy"


def schedule(report: RunReport) -> Iterator[Block]:
    """Draw when the processor and the links of the busiest rank are busy. Draw nothing if it sends nothing."""
    spans = report.schedule
    if all(span.stream == COMPUTE for span in spans):
        return
    title = "What the rank that computes most does when"
    yield Timeline(title, max(span.end for span in spans), tuple(lanes("", spans, event)), "micro-group")
    hardware = hardware_of(report.machine)
    if not hardware.overlap:
        yield note("communication uses the cores that compute, so nothing overlaps", "dim")
    if report.measured is None:
        yield note(rates_text(hardware.assumed), "dim")


def profile_section(profile: ProfileReport | None, *, timed: bool) -> Section:
    """Show the seconds of each step of a period, or how they compare, with all periodic work at once and staggered."""
    if profile is None:
        return Section("Profile", ())
    most, rows = max(profile.together), []
    for name, steps, chosen in (
        ("all at once", profile.together, not profile.staggered),
        ("staggered", profile.apart, profile.staggered),
    ):
        look = "" if chosen else "dim"
        label = f"{LEVELS[-1] if chosen else ' '} {name}"
        rows.append((Words(label, look), Words(levels(steps, most), "cyan"), Words(worst_text(steps, timed), look)))
    table = PageTable(("", "", ""), tuple(rows), "Profile", bare=True)
    period = plural(len(profile.together), "step")
    return Section("Profile", (table,), f"computing per step, over a period of {period}")


def levels(values: Sequence[float], most: float) -> str:
    """Write values from 0 to `most` as columns, a letter each; of too many, the largest of neighbours."""
    each = math.ceil(len(values) / MOST_LEVELS)
    tops = [max(values[i : i + each]) for i in range(0, len(values), each)]
    return "".join(LEVELS[round((len(LEVELS) - 1) * top / most) if most else 0] for top in tops)


def worst_text(steps: Sequence[float], timed: bool) -> str:
    mean, worst = sum(steps) / len(steps), max(steps)
    return f"worst {f'{format_seconds(worst)}, ' * timed}{worst / mean if mean else 1:.2f} times the mean"


def memory_sentences(report: RunReport) -> Sequence[str]:
    """Say which buffers a step has, and what bounds them; nothing on CPU, where memory is not scarce."""
    if report.machine.device != "cuda":
        return ()
    memory, programs = report.memory, plural(report.rank_programs, "program")
    sentences = (
        (
            memory.buffers,
            f"of buffers, which stay and serve {programs}: for {plural(report.depth, 'micro-group')} in flight, of "
            f"which each gathers at most {format_bytes(report.capacity)} to a rank, or one matrix",
        ),
        (
            memory.first_buffers,
            "of buffers in a first step, in addition to what its own code took; it gave them back",
        ),
    )
    return [f"{format_bytes(size)} {words}" for size, words in sentences if size]


def by_reason(pairs: Iterable[tuple[str, str]], one: str, many: str = "") -> Iterator[Block]:
    """List parameters that share a reason together."""
    for reason, names in names_by_reason(pairs).items():
        yield note(f"{plural(len(names), one, many)}: {reason}", "bold")
        yield note(some(names, 4), "dim", indent=2)
