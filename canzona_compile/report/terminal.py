"""Lays out the report of a run for a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from canzona_compile.errors import some
from canzona_compile.machine.hardware import hardware_of
from canzona_compile.report.charts import event, load_chart, profile_chart, timeline
from canzona_compile.report.data_parallel import bucket_table
from canzona_compile.report.measured_table import (
    measured_caption,
    measured_remark,
    measured_table,
    rates_label,
    rates_text,
)
from canzona_compile.report.memory import memory_caption, memory_sentences
from canzona_compile.report.schema import Figures, GridReport, TaskReport, TemplateReport
from canzona_compile.report.sections import (
    MOST_ROWS,
    MicroGroupRow,
    Section,
    bullets,
    columns,
    formula_text,
    headline_panel,
    listing,
    micro_group_table,
    names_by_reason,
    page,
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

ANY_WIDTH = 10_000  # columns; more than any table needs
SHORTEST_NAME = 8  # letters of a name on one line


def render(report: Figures) -> RenderableType:
    """Lay out a report.

    Args:
        report: the figures of a run.

    Returns:
        Its sections, top to bottom, for a console of any width and encoding.
    """
    steps = len(report.profile.together) if report.profile else 0
    alone = [(f"{one.name} {format_shape(one.shape)}", one.why) for one in report.local]
    return page(
        headline(report),
        (
            Section("Measured", measured_caption(report.measured), measured_table(report.measured)),
            Section("Load", "FLOPs of each rank per step", load_chart(report.loads, report.imbalance)),
            Section("Schedule", simulated_rank(report), schedule(report)),
            Section(
                "Profile",
                f"computing per step, over a period of {plural(steps, 'step')}",
                profile_chart(report.profile),
            ),
            Section("Memory", memory_caption(report.memory), bullets(memory_sentences(report))),
            Section("Buckets", "what data-parallel ranks own of each", bucket_table(report.data_parallel)),
            Section("Micro-groups", "bytes that leave a rank, summed over all ranks", micro_groups(report)),
            Section("Tasks", "matrices by owner rank, largest first", tasks(report)),
            Section("Cost", "FLOPs of one matrix of m x n, and its bytes on the wire", costs(report)),
            Section(
                "Without communication", "parameters that each rank updates by itself", by_reason(alone, "parameter")
            ),
            Section(
                "Interpreted",
                "the owner runs the optimizer's own eager step",
                by_reason(report.fallbacks.items(), "matrix", "matrices"),
            ),
            Section("Suggestions", "", bullets(report.suggestions)),
        ),
    )


def headline(report: Figures) -> Panel:
    """Frame the plan's main figures, and how the plan was made."""
    owners = len({t.owner for t in report.tasks if t.strategy == "owner"})
    everywhere = "all" if any(t.owner is None for t in report.tasks) else "-"
    groups = len(report.micro_groups)
    balance = "green" if report.imbalance < 1.1 else "yellow" if report.imbalance < 1.5 else "red"
    counted = [
        (len(report.tasks), "matrix", "matrices"),
        (owners or everywhere, "owner", "owners"),
        (groups, "micro-group", "micro-groups" + (f"\n{report.depth} in flight" if groups > 1 else "")),
        (report.collectives_per_step, "collective\nper step", "collectives\nper step"),
    ]
    figures = [(Text(str(count), "bold"), one if count == 1 else many) for count, one, many in counted]
    figures += [
        (Text(f"{report.wire_bytes_per_element:.2f}", "bold"), "wire bytes\nper element"),
        (Text(f"{report.imbalance:.2f}", f"bold {balance}"), "max / mean\nload"),
    ]
    machine = report.machine
    where = "/".join(filter(None, (machine.device, machine.backend)))
    shown = report.execution if machine.device != "cpu" else ""
    remarks = (
        measured_remark(report.measured) or predicted_remark(report),
        f"{where}, {report.numerics} numerics",
        f"{plural(report.captures, 'capture')}, {plural(report.variants, 'variant')}, "
        f"{plural(report.rank_programs, 'rank program')}, {len(report.fallbacks)} interpreted",
        f"{shown}, at most {format_bytes(report.memory.most)} in a step" if shown else "",
    )
    title = Text.assemble(("canzona", "bold"), f"  {report.optimizer} on {plural(report.world_size, 'rank')}")
    return headline_panel(title, figures, remarks)


def predicted_remark(report: Figures) -> str:
    """The simulated step in a line, with what its rates are worth."""
    rates = rates_label(hardware_of(report.machine).assumed)
    return f"predicted step {format_seconds(report.predicted_seconds)}, simulated with {rates}"


def simulated_rank(report: Figures) -> str:
    """Say whose schedule is drawn."""
    ranks = {span.rank for span in report.schedule}
    return f"simulated, rank {', '.join(map(str, ranks))}, which computes most"


def schedule(report: Figures) -> Iterator[RenderableType]:
    """Draw when the processor and the links of the busiest rank are busy. Draw nothing if it sends nothing."""
    spans = report.schedule
    if all(span.stream == COMPUTE for span in spans):
        return
    yield timeline(
        max(span.end for span in spans),
        [
            (
                stream,
                [event(s.act, stream, s.micro_group, s.start, s.end) for s in spans if s.stream == stream],
            )
            for stream in STREAMS
            if any(s.stream == stream for s in spans)
        ],
    )
    hardware = hardware_of(report.machine)
    if not hardware.overlap:
        yield Text("communication takes the cores that compute: no overlap", "dim")
    if report.measured is None:
        yield Text(rates_text(hardware.assumed), "dim")


def micro_groups(report: Figures) -> list[RenderableType]:
    """List the micro-groups."""
    return micro_group_table(
        [
            MicroGroupRow(
                g.index,
                grid_name(g.grid),
                len(g.tasks),
                (g.gather_bytes, g.scatter_bytes, g.exchange_bytes),
                g.makespan_flops,
            )
            for g in report.micro_groups
        ]
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


@dataclass(frozen=True, slots=True)
class TaskList:
    """A table of every matrix, or of the largest ones if there are too many.

    If names are too long for the console, the table leaves out the words that all names share. A name that is still too
    long goes on in the next line.

    Attributes:
        tasks: in any order, at least one.
        labels: what to call each strategy and the reason for it.
    """

    tasks: Sequence[TaskReport]
    labels: Mapping[tuple[str, str], str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self.table(0, None)
        if Measurement.get(console, options.update_width(ANY_WIDTH), whole).maximum <= options.max_width:
            yield whole
            return
        words = self.tasks[0].name.split(".")
        begin, end = differing([task.name for task in self.tasks])
        yield self.table(begin, end)
        if begin or end:
            around = ".".join([*words[:begin], "…", *(words[end:] if end else ())])
            yield Text(f"names in full: {around}", "dim")

    def table(self, begin: int, end: int | None) -> Table:
        """Make the table with those words of a name that are in words[begin:end]."""
        table = columns("owner", "matrix", ">shape", ">micro-group", ">FLOPs", "strategy")
        foldable(table.columns[1])
        for shown, hidden in by_owner(self.tasks):
            for i, task in enumerate(shown):
                owner = "" if i else "every rank" if task.owner is None else f"rank {task.owner}"
                cells = (
                    ".".join(task.name.split(".")[begin:end]),
                    format_shape(task.shape),
                    str(task.micro_group),
                    format_flops(task.flops),
                    self.labels[task.strategy, task.reason],
                )
                table.add_row(Text(owner, "bold"), *map(Text, cells))
            if hidden:
                flops = format_flops(sum(task.flops for task in hidden))
                table.add_row("", Text(f"  and {len(hidden)} more, {flops}", "dim"))
        return table


def foldable(names: Column) -> None:
    """Let long names go on in the next line, where others would be cut off."""
    names.no_wrap, names.overflow, names.min_width = False, "fold", SHORTEST_NAME


def tasks(report: Figures) -> Iterator[RenderableType]:
    """List the matrices, and below them why they have their strategies."""
    counts = Counter((task.strategy, task.reason) for task in report.tasks)
    labels = {
        (strategy, reason): f"{strategy} {mark(i)}" if len(counts) > 1 else strategy
        for i, (strategy, reason) in enumerate(counts)
    }
    if report.tasks:
        yield TaskList(report.tasks, labels)
    for (strategy, reason), count in counts.items():
        yield Text(f"{labels[strategy, reason]} ({count}): {reason or 'no reason given'}", "dim")


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


def differing(names: Sequence[str]) -> tuple[int, int | None]:
    """Find the words in which dotted names differ, at least one word of each name.

    Returns:
        Where it begins and ends in the list of a name's words; (0, None) for a single name.
    """
    if len(names) < 2:
        return 0, None
    words = [name.split(".") for name in names]
    begin = shared([own[:-1] for own in words])
    return begin, -shared([own[:begin:-1] for own in words]) or None


def shared(names: Sequence[Sequence[str]]) -> int:
    """Count the words with which all names begin."""
    return len(list(takewhile(lambda words: len(set(words)) == 1, zip(*names, strict=False))))


def costs(report: Figures) -> Iterator[RenderableType]:
    """List each template that has matrices, and the formulas that templates share."""
    found = [t for t in report.templates if t.tasks]
    formulas = list(dict.fromkeys(map(formula, found)))
    table = columns("", "template", ">matrices", ">FLOPs each", "gather", "scatter")
    foldable(table.columns[1])
    for t in found:
        cells = (t.name, str(t.tasks), format_flops(t.flops), wires(t, "gather"), wires(t, "scatter"))
        table.add_row(Text(mark(formulas.index(formula(t))), "bold"), *map(Text, cells))
    if found:
        yield table
        yield listing((Text(f"{mark(i)} =", "bold"), Text(text)) for i, text in enumerate(formulas))
    homes = names_by_reason((t.name, ", ".join(t.resident)) for t in found if t.resident)
    for state, names in homes.items():
        yield Text(f"only on the owner: {state} of {some(names)}", "dim")


def formula(template: TemplateReport) -> str:
    """Write a template's FLOPs as "10 m^3 + 20 m^2 n", or say that there is no graph to count."""
    if template.interpreted:
        return f"interpreted, elements counted: {template.interpreted}"
    return formula_text(template.formula)


def wires(template: TemplateReport, direction: str) -> str:
    """Name the values of one matrix that travel in a direction, and their sizes: "bf16 8 KiB"."""
    found = [wire for wire in template.wires if wire.direction == direction]
    dtypes = dict.fromkeys(format_dtype(wire.dtype) for wire in found)
    return f"{'+'.join(dtypes)} {format_bytes(sum(wire.bytes for wire in found))}" if found else "-"


def by_reason(pairs: Iterable[tuple[str, str]], one: str, many: str = "") -> Iterator[RenderableType]:
    """List parameters that share a reason together.

    Args:
        pairs: of a name and its reason.
        one, many: what to call them, in singular and plural.
    """
    for reason, names in names_by_reason(pairs).items():
        yield Text(f"{plural(len(names), one, many)}: {reason}", "bold")
        yield Padding(Text(some(names, 4), "dim"), (0, 0, 0, 2))
