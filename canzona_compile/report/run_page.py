"""The page of a run: what its report shows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from canzona_compile.errors import some
from canzona_compile.machine.hardware import hardware_of
from canzona_compile.report.page import (
    Block,
    Cell,
    Figure,
    Lane,
    Listing,
    PageModel,
    PageTable,
    Section,
    Timeline,
    Words,
    note,
    rows_of,
)
from canzona_compile.report.schema import Figures, GridReport, ProfileReport, TaskReport, TemplateReport
from canzona_compile.report.sections import (
    MOST_ROWS,
    bullets,
    event,
    formula_text,
    group_section,
    load_section,
    measured_remark,
    measured_section,
    names_by_reason,
    rates_label,
    rates_text,
)
from canzona_compile.report.units import (
    format_bytes,
    format_dtype,
    format_flops,
    format_seconds,
    format_shape,
    plural,
)
from canzona_compile.simulation.figures import COMPUTE, STREAMS

LEVELS = "▁▂▃▄▅▆▇█"  # from little to all
MOST_LEVELS = 40  # letters
UNEVEN = 1.5  # times the mean: the load of a rank that the others wait for


def run_page(report: Figures) -> PageModel:
    """Build the page of a report, from the figures of a run."""
    alone = [(f"{one.name} {format_shape(one.shape)}", one.why) for one in report.local]
    where = [(grid_name(g.grid), len(g.tasks)) for g in report.micro_groups]
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
            Section(
                "Buckets",
                tuple(buckets(report)),
                "reduced together; what each data-parallel rank owns",
            ),
            group_section(report.micro_groups, where),
            Section("Tasks", tuple(tasks(report)), "the matrices that each rank updates, largest first"),
            Section("Cost", tuple(costs(report)), "FLOPs of one m x n matrix, and the bytes sent for it"),
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


def remarks(report: Figures) -> Iterator[str]:
    """Say how long a step takes, and how the plan was made and runs."""
    machine = report.machine
    yield measured_remark(report.measured) or (
        f"predicted step {format_seconds(report.predicted_seconds or 0.0)}, simulated with "
        f"{rates_label(hardware_of(machine).assumed)}"
    )
    yield f"{'/'.join(filter(None, (machine.device, machine.backend)))}, {report.numerics} numerics"
    yield (
        f"{plural(report.captures, 'capture')}, {plural(report.variants, 'variant')}, "
        f"{plural(report.rank_programs, 'rank program')}, {len(report.fallbacks)} eager"
    )
    if report.execution and machine.device != "cpu":
        yield report.execution


def next_step(report: Figures) -> str:
    """Say what a reader of the report can do next: the first of these that applies."""
    if report.fallbacks:
        return "canzona_compile.explain(optimizer) shows the line of the optimizer's code that keeps a matrix eager."
    if report.imbalance >= UNEVEN:
        return "There are too few large matrices for the ranks. split= cuts fused weights into matrices of their own."
    if report.measured is None:
        return "optimizer.canzona.measure(steps=5) times the next five steps; then print the report again."
    return "optimizer.canzona.plan() is this plan; save its to_json() for wrap(..., plan=) to follow."


def simulated_rank(report: Figures) -> str:
    """Say whose schedule is drawn."""
    ranks = {span.rank for span in report.schedule}
    return f"simulated: when rank {', '.join(map(str, ranks))}, which computes most, is busy"


def schedule(report: Figures) -> Iterator[Block]:
    """Draw when the processor and the links of the busiest rank are busy. Draw nothing if it sends nothing."""
    spans = report.schedule
    if all(span.stream == COMPUTE for span in spans):
        return
    lanes = {
        stream: tuple(event(s.act, stream, s.micro_group, s.start, s.end) for s in spans if s.stream == stream)
        for stream in STREAMS
    }
    yield Timeline(
        "What the rank that computes most does when",
        max(span.end for span in spans),
        tuple(Lane("", stream, events) for stream, events in lanes.items() if events),
        "micro-group",
    )
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


def memory_sentences(report: Figures) -> Sequence[str]:
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


def buckets(report: Figures) -> Iterator[Block]:
    """Show what each bucket holds and how even its shards are; nothing without ZeRO-1."""
    if (own := report.data_parallel) is None:
        return
    rows = []
    for row in own.buckets[:MOST_ROWS]:
        dtype: torch.dtype = getattr(torch, row.dtype)
        size, *ends = (n * dtype.itemsize for n in (row.elements, min(row.shards), max(row.shards)))
        padding = f"{row.padding / max(1, row.elements):.1%}"
        rows.append((row.index, row.dtype, row.parameters, size, padding, "equal" if row.uniform else "uneven", *ends))
    headers = ("#:n", "dtype", "parameters:n", "size:B", "padding:>", "shards", "shortest:B", "longest:B")
    yield PageTable(headers, tuple(rows), "Buckets")
    if hidden := own.buckets[MOST_ROWS:]:
        yield note(f"and {len(hidden)} more", "dim")
    elements, padding_of_all = (sum(getattr(b, what) for b in own.buckets) for what in ("elements", "padding"))
    yield note(
        f"each of {plural(own.owners, 'owner')} sends {format_bytes(own.backward_bytes)} in backward, "
        f"{own.step_bytes} B in the step, {format_bytes(own.forward_bytes)} after it; "
        f"padding {padding_of_all / max(1, elements):.1%}"
    )


def grid_name(grid: GridReport) -> str:
    """Name a grid by its replicas x shards and their ranks: "2x4: 0-7"."""
    return f"{grid.replicas}x{grid.shards}: {spans([r for row in grid.ranks for r in row])}"


def spans(ranks: Sequence[int], most: int = 2) -> str:
    """Write ranks as spans, "0-3,8"; those after the first few spans are counted."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in found]
    more = sum(map(len, found[most:]))
    return ",".join(texts[:most]) + (f",+{more}" if more else "")


def tasks(report: Figures) -> Iterator[Block]:
    """List the matrices, and below them why they have their strategies."""
    counts = Counter((task.strategy, task.reason) for task in report.tasks)
    labels = {
        (strategy, reason): f"{strategy} {mark(i)}" if len(counts) > 1 else strategy
        for i, (strategy, reason) in enumerate(counts)
    }
    rows: list[tuple[Cell, ...]] = []
    for shown, hidden in by_owner(report.tasks):
        for i, task in enumerate(shown):
            owner = "" if i else "every rank" if task.owner is None else f"rank {task.owner}"
            label = labels[task.strategy, task.reason]
            shape = format_shape(task.shape)
            rows.append((Words(owner, "bold"), task.name, shape, task.micro_group, task.flops, label))
        if hidden:
            flops = format_flops(sum(task.flops for task in hidden))
            rows.append(("", Words(f"  and {len(hidden)} more, {flops}", "dim")))
    if rows:
        headers = ("owner", "matrix", "shape:>", "micro-group:n", "FLOPs:FLOP", "strategy")
        yield PageTable(headers, tuple(rows), "Tasks", names=1)
    for (strategy, reason), count in counts.items():
        yield note(f"{labels[strategy, reason]} ({count}): {reason or 'no reason given'}", "dim")


def by_owner(tasks: Sequence[TaskReport]) -> Iterator[tuple[Sequence[TaskReport], Sequence[TaskReport]]]:
    """Group matrices by owner, largest first, in about MOST_ROWS rows.

    Yields:
        For each owner, the matrices to show and those to sum up. Without room for two rows per owner, this yields each
        of the largest matrices alone, then the rest.
    """
    order = sorted(tasks, key=lambda task: -task.flops)
    owned: dict[int, list[TaskReport]] = defaultdict(list)
    for task in order:
        owned[-1 if task.owner is None else task.owner].append(task)
    if len(tasks) <= MOST_ROWS:
        yield from ((found, ()) for _, found in sorted(owned.items()))
    elif 2 * len(owned) > MOST_ROWS:
        yield from (([task], ()) for task in order[:MOST_ROWS])
        yield (), order[MOST_ROWS:]
    else:
        most = MOST_ROWS // len(owned) - 1
        for _, found in sorted(owned.items()):
            shown = len(found) if len(found) == most + 1 else most  # summing up takes a row, too
            yield found[:shown], found[shown:]


def mark(i: int) -> str:
    """Number things by letters: a, b, ..., z, a2, ..."""
    return chr(ord("a") + i % 26) + (str(i // 26 + 1) if i >= 26 else "")


def costs(report: Figures) -> Iterator[Block]:
    """List each template that has matrices, and the formulas that templates share."""
    found = [t for t in report.templates if t.tasks]
    if not found:
        return
    formulas = list(dict.fromkeys(map(formula, found)))
    letters = [Words(mark(formulas.index(formula(t))), "bold") for t in found]
    rows = rows_of(found, "name", "tasks", "flops")
    moved = [(wires(t, "gather"), wires(t, "scatter")) for t in found]
    headers = ("", "template", "matrices:n", "FLOPs each:FLOP", "gather", "scatter")
    cells = tuple((letter, *row, *own) for letter, row, own in zip(letters, rows, moved, strict=True))
    yield PageTable(headers, cells, "Templates", names=1)
    yield Listing(tuple((Words(f"{mark(i)} =", "bold"), Words(own, "formula")) for i, own in enumerate(formulas)))
    homes = names_by_reason((t.name, ", ".join(t.resident)) for t in found if t.resident)
    for state, names in homes.items():
        yield note(f"state that only the owner keeps: {state} of {some(names)}", "dim")


def formula(template: TemplateReport) -> str:
    """Write a template's FLOPs as "10 m^3 + 20 m^2 n", or say that there is no graph to count."""
    if template.interpreted:
        return f"eager, elements counted: {template.interpreted}"
    return formula_text(template.formula)


def wires(template: TemplateReport, direction: str) -> str:
    """Name the values of one matrix that travel in a direction, and their sizes: "bf16 8 KiB"."""
    found = [wire for wire in template.wires if wire.direction == direction]
    dtypes = dict.fromkeys(format_dtype(wire.dtype) for wire in found)
    return f"{'+'.join(dtypes)} {format_bytes(sum(wire.bytes for wire in found))}" if found else "-"


def by_reason(pairs: Iterable[tuple[str, str]], one: str, many: str = "") -> Iterator[Block]:
    """List parameters that share a reason together.

    Args:
        pairs: of a name and its reason.
        one, many: what to call them, in singular and plural.
    """
    for reason, names in names_by_reason(pairs).items():
        yield note(f"{plural(len(names), one, many)}: {reason}", "bold")
        yield note(some(names, 4), "dim", indent=2)
