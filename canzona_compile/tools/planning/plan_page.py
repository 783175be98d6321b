"""The pages of a plan made offline: all of its figures, and the few to paste into a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from canzona_compile.machine.hardware import Curve, Hardware, Link
from canzona_compile.report.page import (
    Bar,
    Bars,
    Block,
    Cell,
    Detail,
    Figure,
    Listing,
    PageModel,
    PageTable,
    Paragraph,
    Section,
    Words,
    note,
    rows_of,
)
from canzona_compile.report.sections import (
    bullets,
    formula_text,
    group_section,
    load_section,
    measured_section,
)
from canzona_compile.report.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    format_shape,
    plural,
)
from canzona_compile.tools.planning.figures import Alternative, Forecast, TemplateForecast, Zero1Forecast
from canzona_compile.tools.planning.plan_timelines import MOST_RANKS, buckets_text, iteration, phases, timelines, times


def plan_page(forecast: Forecast) -> PageModel:
    """Build the page of all figures of a plan."""
    hardware = forecast.hardware
    simulation = forecast.simulation
    how = "by the owners of their slices" if forecast.zero1 else "without communication"
    some_ranks = "; the busiest and the idlest rank" if len(simulation.shown) > MOST_RANKS else ""
    return PageModel(
        kind="canzona plan",
        title=headline(forecast, " "),
        about=f"No step was run. Times are predicted, from {len(hardware.measured)} measured and "
        f"{plural(len(hardware.assumed), 'assumed rate')} of the machine {hardware.name}. A run that makes the same "
        "plan has the same fingerprint.",
        figures=tuple(figures(forecast)),
        remarks=(
            "steps are predicted; the figures below and next to them are those of the heaviest step"
            if forecast.period
            else "",
            beside(forecast.zero1) if forecast.zero1 else "",
            f"{plural(forecast.elementwise, 'parameter')} updated elementwise, {how}" if forecast.elementwise else "",
            f"plan {forecast.fingerprint[:12]}",
        ),
        facts=(
            ("fingerprint", forecast.fingerprint),
            ("machine", f"{hardware.device}, {hardware.backend}, {plural(hardware.ranks_per_node, 'rank')} a node"),
            ("rates", hardware.digest),
            ("micro-groups", f"{len(forecast.groups)}, {forecast.depth} in flight"),
            ("collectives", f"{forecast.collectives} a step"),
            ("elementwise", plural(forecast.elementwise, "parameter")),
            *((name.replace("_", " "), with_unit(name, value)) for name, value in forecast.options),
        ),
        body=(
            Section("Alternatives", tuple(alternatives(forecast)), "the same matrices, planned another way"),
            Section(
                "Iteration",
                tuple(iteration(forecast.zero1)) if forecast.zero1 else (),
                "backward, step, next forward pass, simulated; numbers are buckets",
            ),
            measured_section(forecast.measured),
            load_section(forecast.loads, *times(forecast)),
            Section("Timeline", tuple(timelines(forecast)), f"simulated{some_ranks}"),
            Section(
                "Strategies",
                tuple(strategies(t, i > 0) for i, t in enumerate(forecast.templates)),
                "time for these matrices, with nothing else on their ranks",
            ),
            Section(
                "Cost",
                tuple(map(cost, forecast.templates)),
                "of one m x n matrix: FLOPs, bytes in memory, bytes sent",
            ),
            group_section(forecast.groups, [(f"{g.replicas}x{g.shards}", g.tasks) for g in forecast.groups]),
            Section("Memory", tuple(memory(forecast)), "bytes on the rank that needs most"),
            Section("Without communication", tuple(alone(forecast)), "parameters that each rank updates by itself"),
            Detail((matrices(forecast),)),
            Section("Rates", tuple(rates(hardware)), f"of {hardware.name}"),
            Section("Assumptions", (*bullets(forecast.assumptions), Detail(bullets([overlap_text(hardware)])))),
            Section("What to do next", (note(next_step(hardware)),)),
        ),
    )


def with_unit(option: str, value: str) -> str:
    """Write the value of an option; bytes as people write them."""
    return format_bytes(int(value)) if option in ("capacity", "bucket_bytes") and value.isdecimal() else value


def next_step(hardware: Hardware) -> str:
    """Say what a reader of the plan can do next."""
    if hardware.assumed:
        return "To use the rates of your machine: canzona-compile calibrate -o mine.json, then --hardware mine.json."
    return 'To run this plan: --format json -o plan.json, then wrap(..., plan="plan.json").'


def alone(forecast: Forecast) -> Iterator[Paragraph]:
    """What is updated without communication, by other optimizers than that of the matrices."""
    if (own := forecast.local) is None:
        return
    yield note(
        f"{' and '.join(own.optimizers)}: {plural(own.parameters, 'parameter')}, {format_count(own.elements)} elements"
    )
    yield note(
        f"on the rank with most: {format_count(own.most)} elements, state {format_bytes(own.state)}, "
        f"{format_seconds(own.seconds)} after the matrices, which the predicted step leaves out"
    )


def headline(forecast: Forecast, between: str) -> str:
    mesh = between.join(f"{name}={size}" for name, size in forecast.mesh)
    return f"{forecast.optimizer}, {forecast.model} on {mesh}"


def figures(forecast: Forecast) -> Iterator[Figure]:
    """The key figures."""
    seconds, memory = forecast.simulation.seconds, forecast.memory
    exposed = max((r.exposed for r in forecast.simulation.ranks), default=0.0)
    if (period := forecast.period) is None:
        yield Figure(format_seconds(seconds), "predicted\nstep", "of the optimizer alone")
    else:
        yield Figure(format_seconds(period.mean), f"mean of\n{plural(len(period.seconds), 'step')}")
        yield Figure(format_seconds(period.worst), "heaviest\nstep", "of the optimizer alone")
    yield Figure(str(forecast.matrices), "matrices", f"{forecast.elements / 1e9:.3g} billion elements")
    mesh = ", ".join(f"{name} {size}" for name, size in forecast.mesh)
    yield Figure(str(len(forecast.simulation.ranks)), "ranks", mesh, detail=True)
    yield Figure(f"{forecast.imbalance:.2f}x", "busiest rank\nvs the mean", "1.00x is even")
    yield Figure(format_seconds(exposed), "waiting for\ncommunication", f"{share(exposed, seconds)} of the step")
    used = share(memory.buffers, forecast.hardware.memory)
    whole = format_bytes(forecast.hardware.memory)
    yield Figure(format_bytes(memory.buffers), "buffers\nper rank", f"{used} of its {whole}")


def beside(zero1: Zero1Forecast) -> str:
    """Say what communication costs before and after the step."""
    found = [f"{format_seconds(p.exposed)} in {p.name}" for p in zero1.phases if p.name != "step"]
    return f"outside of the step, communication adds {' and '.join(found)}"


# -- how plans compare -------------------------------------------------------------------------


def alternatives(forecast: Forecast) -> Iterator[Block]:
    """Compare the plan with others, if the user asked for others."""
    found = forecast.alternatives
    if len(found) < 2:
        return
    yield zero1_plans(found) if forecast.zero1 else plans(forecast)
    computes = [(own, own.seconds - min(own.exposed, own.seconds)) for own in found]
    yield Detail(
        (
            *([plans(forecast)] if forecast.zero1 else []),
            Bars(
                "The step of each plan",
                "s",
                (("computes, or waits for other ranks", "compute"), ("exposed on the busiest rank", "gather")),
                tuple(Bar(o.name, (c, o.seconds - c), (), o.chosen) for o, c in computes),
            ),
        )
    )


def plans(forecast: Forecast) -> PageTable:
    """A row per plan."""
    found = forecast.alternatives
    base = next((own.seconds for own in found if own.chosen), 0.0)
    rows = tuple(
        (
            *(Words(own.name, about=own.about), Words(format_seconds(own.seconds), about=against(own, base))),
            *(own.imbalance, own.exposed or None, own.sent, own.peak, own.groups),
        )
        for own in found
    )
    step = "step:s" if forecast.period is None else "heaviest step:s"
    headers = ("plan", step, "vs mean:n", "exposed:s", "sent:B", "buffers:B", "micro-groups:n")
    return PageTable(headers, rows, "Plans", chosen=tuple(own.chosen for own in found))


def against(plan: Alternative, base: float) -> str:
    """Say how much longer its step is than that of the chosen plan: "+12%"."""
    if plan.chosen or not base:
        return ""
    return f"{plan.seconds / base:.3g} times" if plan.seconds > 3 * base else f"{plan.seconds / base - 1:+.0%}"


def zero1_plans(found: Sequence[Alternative]) -> PageTable:
    """A row per plan, with what its buckets send in an iteration."""
    rows = []
    for own in found:
        told: tuple[Cell, ...] = (None,) * 4
        if (zero1 := own.zero1) is not None:
            told = (zero1.makespan, f"{zero1.padding_share:.2%}", zero1.sent, zero1.exposed)
        rows.append((Words(own.name, about=own.about), own.seconds, own.imbalance, *told, own.peak))
    quantities = ("step:s", "vs mean:n", "busiest:FLOP", "padding:>", "sent:B", "exposed:s", "buffers:B")
    return PageTable(
        ("plan", *quantities), tuple(rows), "Plans with buckets", chosen=tuple(own.chosen for own in found)
    )


# -- matrices ----------------------------------------------------------------------------------


def strategies(template: TemplateForecast, bare: bool) -> Section:
    """Compare the strategies that the matrices of a template can have."""
    found = template.strategies
    parts = rows_of(found, "seconds", "compute", "gather", "scatter")
    rows = tuple((own.name, *(part or None for part in row), own.note) for own, row in zip(found, parts, strict=True))
    table = PageTable(
        ("strategy", "time:s", "compute:s", "gather:s", "scatter:s", "why:~"),
        rows,
        f"Strategies of {template.name}",
        chosen=tuple(own.chosen for own in found),
        least=(1, 11, 7, 7, 7, 7, 16),
        bare=bare,
    )
    drawn = Bars(
        f"What each strategy takes for {template.name}",
        "s",
        (("computes", "compute"), ("gathers", "gather"), ("scatters", "scatter")),
        tuple(Bar(own.name, (own.compute, own.gather, own.scatter), (), own.chosen) for own in found),
    )
    return Section(f"{template.name}: {plural(template.tasks, 'matrix', 'matrices')}", (table, Detail((drawn,))))


def cost(template: TemplateForecast) -> Section:
    """Write the cost of one matrix of a template, as formulas and as numbers."""
    count = plural(template.tasks, "matrix", "matrices")
    title = f"{template.name}: {count} of {format_shape(template.shape)}, {format_seconds(template.seconds)} each"
    rows = tuple(
        (what, Words(f"{formula_text(formula)} = {value}", "formula"))
        for what, formula, value in (
            ("FLOPs", template.flops, format_flops(template.flops_value)),
            ("memory", template.memory, format_bytes(template.memory_value)),
            ("wire", template.wire, format_bytes(template.wire_value)),
        )
    )
    resident = [Detail((note(f"{', '.join(template.resident)} on the owner only"),))] if template.resident else []
    return Section(title, (Listing(rows, indent=2), *resident))


def matrices(forecast: Forecast) -> Section:
    """List all matrices."""
    rows = tuple(
        (
            *(t.name, format_shape(t.shape), t.strategy, "every rank" if t.owner is None else f"rank {t.owner}"),
            *(f"micro-group {t.group}", t.flops, t.template, t.layout),
        )
        for t in forecast.tasks
    )
    headers = ("matrix", "shape:>", "strategy", "owner", "micro-group", "FLOPs:FLOP", "template", "layout")
    table = PageTable(headers, rows, "Matrices", search="part of a name, a template, rank 3 ...")
    return Section("Matrices", (table,), plural(len(rows), "matrix", "matrices"), folded=True)


# -- memory and rates --------------------------------------------------------------------------


def memory(forecast: Forecast) -> Iterator[Block]:
    """Compare the bytes of the plan with those of simpler ones."""
    own = forecast.memory
    yield note(f"buffers {format_bytes(own.buffers)}, in one micro-group {format_bytes(own.one_group)}")
    kept = f"optimizer state {format_bytes(own.state)}"
    yield note(f"{kept}, kept whole on every rank {format_bytes(own.state_replicated)}")
    for title, other, planned, simpler in (
        ("Buffers", "one micro-group", own.buffers, own.one_group),
        ("Optimizer state", "whole on all ranks", own.state, own.state_replicated),
    ):
        less = f"{share(simpler - planned, simpler)} less than {other}" if simpler > planned else ""
        bars = (Bar("as planned", (planned,), chosen=True), Bar(other, (simpler,)))
        yield Detail((Section(title, (Bars(f"Bytes of {title.lower()}", "B", (("", "compute"),), bars),), less),))


def share(part: float, whole: float) -> str:
    """Write a part of a whole: "3.6%"."""
    return f"{100 * part / whole:.3g}%" if whole else "0%"


def rates(hardware: Hardware) -> Iterator[Block]:
    """List the rates that the predictions assume, and their sources."""
    calls = [f"{name} {format_seconds(own)}" for name, own in hardware.product_calls]
    brief = {
        "products": rates_by_name(hardware.products),
        "factorizations": rates_by_name(hardware.factorizations),
        "bandwidth": Words(format_bandwidth(hardware.bandwidth)),
        "launch": Words(format_seconds(hardware.launch) if hardware.launch else "0"),
        "node": link_rates(hardware.node),
        "network": link_rates(hardware.network),
    }
    more = {
        "transposed": Words(format_bandwidth(hardware.transposed.best), about=curve(hardware.transposed)),
        "memory": Words(format_bytes(hardware.memory)),
        "product_calls": Words(", ".join(calls)),
        "host": Words(f"{format_seconds(hardware.host)} a matrix"),
    }
    sources = dict(hardware.sources)

    def listed(values: dict[str, Words]) -> Listing:
        rows = []
        for name, value in values.items():
            known = "measured" if name in hardware.measured else "assumed"
            source = sources.get(name, "no source given")
            said = source if source.startswith(known) else f"{known}: {source}"
            rows.append((Words(name, "bold"), Words(value.text, remark=said, about=value.about)))
        return Listing(tuple(rows))

    yield listed(brief)
    yield Detail((listed(more),))


def link_rates(link: Link) -> Words:
    """Write the rates of a link."""
    brief = f"{format_bandwidth(link.bandwidth)}, {format_seconds(link.latency)} an exchange"
    return Words(brief, about=f"{format_seconds(link.per_peer)} more per peer")


def rates_by_name(curves: Sequence[tuple[str, Curve]]) -> Words:
    """Write the best rate of each dtype, or of each kind of factorization."""
    best = ", ".join(f"{name} {format_flops(own.best)}/s" for name, own in curves)
    return Words(best, about="; ".join(f"{name}: {curve(own)}" for name, own in curves))


def curve(own: Curve) -> str:
    """Write how a rate depends on the size."""
    return ", ".join(f"{rate:.3g} at {size:,.0f}" for size, rate in own.points)


def overlap_text(hardware: Hardware) -> str:
    if hardware.overlap:
        return "transfers overlap with computation, on separate links"
    return "transfers use the processors that compute, so nothing overlaps"


# -- the few figures to paste into a document --------------------------------------------------


def brief_page(forecast: Forecast) -> PageModel:
    """Build a page of a headline, tables of plans and templates, and the assumptions."""
    return PageModel(tuple(brief(forecast)), title=headline(forecast, ", "))


def brief(forecast: Forecast) -> Iterator[Block]:
    exposed = max((r.exposed for r in forecast.simulation.ranks), default=0.0)
    machine, step = f" on {forecast.hardware.name}", format_seconds(forecast.simulation.seconds)
    headline: tuple[str | Words, ...] = ("Predicted step ", Words(step, "bold"), machine)
    if (period := forecast.period) is not None:
        mean = Words(format_seconds(period.mean), "bold")
        words = f"{machine}. All other figures are those of the heaviest step."
        yield Paragraph((f"Predicted mean of {len(period.seconds)} steps ", mean, words))
        headline = ("Heaviest step ", Words(format_seconds(period.worst), "bold"))
    yield Paragraph(
        (
            *headline,
            f", of which {format_seconds(exposed)} are exposed communication; {forecast.matrices} matrices, "
            f"the busiest rank computes {forecast.imbalance:.2f}x the mean, "
            f"buffers {format_bytes(forecast.memory.buffers)}, plan ",
            Words(forecast.fingerprint[:12], "code"),
            ".",
        )
    )
    if (own := forecast.local) is not None:
        yield note(
            f"{' and '.join(own.optimizers)}: {own.parameters} parameters that each rank updates by itself; at most "
            f"{format_bytes(own.state)} of state and {format_seconds(own.seconds)} on a rank, after the predicted step."
        )
    if forecast.zero1 is not None:
        yield note(f"{buckets_text(forecast.zero1)}.")
        yield phases(forecast.zero1)
        yield zero1_plans(forecast.alternatives)
    else:
        yield plans(forecast)
    headers = ("template", "matrices:n", "FLOPs each:FLOP", "time each:s", "memory:B", "wire:B")
    fields = ("name", "tasks", "flops_value", "seconds", "memory_value", "wire_value")
    yield PageTable(headers, rows_of(forecast.templates, *fields), "Templates")
    yield from bullets(forecast.assumptions)
