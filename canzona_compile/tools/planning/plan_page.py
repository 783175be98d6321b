"""The page of a plan made offline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from canzona_compile.machine.hardware import Curve, Hardware, Link
from canzona_compile.report.page import (
    Bar,
    Bars,
    Block,
    Cell,
    Detail,
    Figure,
    Lane,
    Listing,
    PageModel,
    PageTable,
    Paragraph,
    Section,
    Timeline,
    TimelineEvent,
    Words,
    note,
    rows_of,
)
from canzona_compile.report.sections import (
    bucket_section,
    bullets,
    cost_section,
    event,
    group_section,
    lanes,
    load_section,
    measured_section,
    task_section,
)
from canzona_compile.report.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    plural,
)
from canzona_compile.simulation.engine import COMPUTE, NETWORK, NODE, Memory, Span
from canzona_compile.tools.planning.figures import Alternative, Forecast, Zero1Forecast

MOST_RANKS = 4  # whose lanes are drawn where there is little room
STREAM_WORDS = {COMPUTE: "processor", NODE: "links within the node", NETWORK: "links to other nodes"}


def plan_page(forecast: Forecast) -> PageModel:
    """Build the page of all figures of a plan."""
    hardware = forecast.hardware
    simulation = forecast.simulation
    some_ranks = "; the busiest and the idlest rank" if len(simulation.shown) > MOST_RANKS else ""
    return PageModel(
        kind="canzona plan",
        title=f"{forecast.optimizer}, {forecast.model} on {' '.join(f'{n}={size}' for n, size in forecast.mesh)}",
        about=f"No step was run. Times are predicted, from {len(hardware.measured)} measured and "
        f"{plural(len(hardware.assumed), 'assumed rate')} of the machine {hardware.name}. A run that makes the same "
        "plan has the same fingerprint.",
        figures=tuple(figures(forecast)),
        remarks=(
            "steps are predicted; the figures below and next to them are those of the heaviest step"
            if forecast.period
            else "",
            beside(forecast.zero1) if forecast.zero1 else "",
            *others(forecast),
            f"plan {forecast.fingerprint[:12]}",
        ),
        facts=(
            ("fingerprint", forecast.fingerprint),
            ("machine", f"{hardware.device}, {hardware.backend}, {plural(hardware.ranks_per_node, 'rank')} a node"),
            ("rates", hardware.digest),
            ("micro-groups", f"{len(forecast.micro_groups)}, {forecast.depth} in flight"),
            ("collectives", f"{forecast.collectives_per_step} a step"),
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
                tuple(strategies(forecast)),
                "time for these matrices, with nothing else on their ranks",
            ),
            bucket_section(forecast.data_parallel),
            group_section(forecast.micro_groups),
            task_section(forecast.tasks),
            cost_section(
                forecast.templates,
                {
                    "time each:s": [own.seconds for own in forecast.costs],
                    "memory:B": [own.memory_bytes for own in forecast.costs],
                },
            ),
            Section("Memory", tuple(memory(forecast)), "bytes on the rank that needs most"),
            Section("Without communication", tuple(alone(forecast)), "parameters that each rank updates by itself"),
            Section("Rates", tuple(rates(hardware)), f"of {hardware.name}"),
            Section("Assumptions", (*bullets(forecast.assumptions), Detail(bullets([overlap_text(hardware)])))),
            Section("What to do next", (note(next_step(hardware)),)),
        ),
    )


def others(forecast: Forecast) -> Iterator[str]:
    """Say what of the model is not in matrices."""
    how = "by the owners of their slices" if forecast.zero1 else "without communication"
    if forecast.elementwise:
        yield f"{plural(forecast.elementwise, 'parameter')} updated elementwise, {how}"
    if forecast.share < 1:
        yield f"the matrices have {forecast.share:.1%} of all elements"


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
        f"on the rank with most: {format_count(own.most)} elements, state {state_text(own.state, own.state_host)}, "
        f"{format_seconds(own.seconds)} after the matrices, which the predicted step leaves out"
    )


def figures(forecast: Forecast) -> Iterator[Figure]:
    """The key figures."""
    seconds, exposed, memory = forecast.simulation.seconds, forecast.simulation.exposed, forecast.memory
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
    yield plans(forecast)
    computes = [(own, own.seconds - min(own.exposed, own.seconds)) for own in found]
    drawn = Bars(
        "The step of each plan",
        "s",
        (("computes, or waits for other ranks", "compute"), ("exposed on the busiest rank", "gather")),
        tuple(Bar(o.name, (c, o.seconds - c), (), o.chosen) for o, c in computes),
    )
    yield Detail((drawn,))


def plans(forecast: Forecast) -> PageTable:
    """A row per plan; under ZeRO-1 with what its buckets send in an iteration."""
    found = forecast.alternatives
    base = next((own.seconds for own in found if own.chosen), 0.0)
    rows = []
    for own in found:
        told: tuple[Cell, ...] = (own.sent, own.exposed or None, own.peak, own.groups)
        if forecast.zero1 is not None:
            told = (*(None,) * 4, own.peak)
            if (zero1 := own.zero1) is not None:
                told = (zero1.makespan, f"{zero1.padding_share:.2%}", zero1.sent, zero1.exposed, own.peak)
        step = Words(format_seconds(own.seconds), about=against(own, base))
        rows.append((Words(own.name, about=own.about), step, own.imbalance, *told))
    step_name = "step:s" if forecast.period is None else "heaviest step:s"
    more = ("sent:B", "exposed:s", "buffers:B", "micro-groups:n")
    headers = ("busiest:FLOP", "padding:>", *more[:3]) if forecast.zero1 else more
    return PageTable(
        ("plan", step_name, "vs mean:n", *headers), tuple(rows), "Plans", chosen=tuple(own.chosen for own in found)
    )


def against(plan: Alternative, base: float) -> str:
    """Say how much longer its step is than that of the chosen plan: "+12%"."""
    if plan.chosen or not base:
        return ""
    return f"{plan.seconds / base:.3g} times" if plan.seconds > 3 * base else f"{plan.seconds / base - 1:+.0%}"


# -- strategies --------------------------------------------------------------------------------


def strategies(forecast: Forecast) -> Iterator[Section]:
    """Compare the strategies that the matrices of each template can have."""
    for template, cost in zip(forecast.templates, forecast.costs, strict=True):
        found = cost.strategies
        parts = rows_of(found, "seconds", "compute", "gather", "scatter")
        table = PageTable(
            ("strategy", "time:s", "compute:s", "gather:s", "scatter:s", "why:~"),
            tuple((own.name, *(n or None for n in row), own.note) for own, row in zip(found, parts, strict=True)),
            f"Strategies of {template.name}",
            chosen=tuple(own.chosen for own in found),
            least=(1, 11, 7, 7, 7, 7, 16),
            bare=template is not forecast.templates[0],
        )
        drawn = Bars(
            f"What each strategy takes for {template.name}",
            "s",
            (("computes", "compute"), ("gathers", "gather"), ("scatters", "scatter")),
            tuple(Bar(own.name, row[1:], (), own.chosen) for own, row in zip(found, parts, strict=True)),
        )
        yield Section(f"{template.name}: {plural(template.tasks, 'matrix', 'matrices')}", (table, Detail((drawn,))))


# -- memory and rates --------------------------------------------------------------------------


def memory(forecast: Forecast) -> Iterator[Block]:
    """Compare the bytes of the plan with those of simpler ones."""
    own = forecast.memory
    yield note(f"buffers {format_bytes(own.buffers)}, in one micro-group {format_bytes(own.one_group)}")
    kept = f"optimizer state {state_text(own.state, own.state_host)}"
    yield note(f"{kept}, kept whole on every rank {format_bytes(own.state_replicated)}")
    for title, other, planned, simpler in (
        ("Buffers", "one micro-group", own.buffers, own.one_group),
        ("Optimizer state", "whole on all ranks", own.state, own.state_replicated),
    ):
        less = f"{share(simpler - planned, simpler)} less than {other}" if simpler > planned else ""
        bars = (Bar("as planned", (planned,), chosen=True), Bar(other, (simpler,)))
        yield Detail((Section(title, (Bars(f"Bytes of {title.lower()}", "B", (("", "compute"),), bars),), less),))


def state_text(device: int, host: int) -> str:
    """Write bytes of state, and those in host memory if there are some."""
    return f"{format_bytes(device)} and {format_bytes(host)} in host memory" if host else format_bytes(device)


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
    if 0.0 < hardware.overlap < 1.0:
        return f"{hardware.overlap:.0%} of a transfer overlaps with computation"
    if hardware.overlap:
        return "transfers overlap with computation, on separate links"
    return "transfers use the processors that compute, so nothing overlaps"


# -- when what happens --------------------------------------------------------------------------


def iteration(zero1: Zero1Forecast) -> Iterator[Block]:
    """List the phases of an iteration, and draw what one rank does in the passes of the model."""
    headers = ("phase", "time:s", "exposed:s", "data-parallel traffic:B", "collectives:n")
    rows = tuple((own.name, own.seconds, own.exposed or None, own.sent, own.collectives) for own in zero1.phases)
    yield PageTable(headers, rows, "Phases")
    for phase in zero1.phases:
        if phase.spans and phase.seconds:
            # A pass computes, between copies.
            acts = [replace(s, act=COMPUTE) if s.act == phase.name else s for s in phase.spans]
            drawn = tuple(lanes(phase.name, acts, event))
            yield Timeline(f"What a rank does in {phase.name}", phase.seconds, drawn, "micro-group")


def times(forecast: Forecast) -> Iterator[Block]:
    """Draw what every rank has beside FLOPs, where there is room."""
    waits = (("computes", "compute"), ("waits for a transfer", "gather"), ("waits for other ranks", "wait"))
    charts: tuple[tuple[str, str, str, tuple[tuple[str, str], ...], tuple[str, ...]], ...] = (
        ("Time", "where the step goes on each rank", "s", waits, ("compute", "exposed", "bubble")),
        ("Buffers", "most bytes of buffers at any time", "B", (("", "buffers"),), ("peak",)),
        ("Sent", "bytes sent to other ranks in a step", "B", (("", "gather"),), ("sent",)),
    )
    for title, caption, unit, parts, fields in charts if forecast.simulation.ranks else ():
        found = (Bar(r.rank, tuple(getattr(r, name) for name in fields)) for r in forecast.simulation.ranks)
        drawn = Bars(f"{title} per rank", unit, parts, tuple(found), of="rank")
        yield Detail((Section(title, (drawn,), caption),))


def timelines(forecast: Forecast) -> Iterator[Block]:
    """Draw the simulated step of all ranks whose spans were kept; where there is little room, of the most telling."""
    simulation = forecast.simulation
    if not simulation.seconds:
        return
    busy = {r.rank: r.compute for r in simulation.ranks}
    ranks = sorted(simulation.shown, key=lambda rank: (-busy[rank], rank))
    asked = [int(value) for name, value in forecast.options if name == "rank"]
    telling = ranks if len(ranks) <= MOST_RANKS else list(dict.fromkeys([ranks[0], ranks[-1], *asked]))
    members: dict[int, set[int]] = defaultdict(set)
    for span in simulation.spans:
        members[span.flow].add(span.rank)
    drawn: list[Lane] = []
    for rank in dict.fromkeys([*telling, *ranks]):
        spans = [span for span in simulation.spans if span.rank == rank]
        drawn += lanes(f"rank {rank}", spans, lambda s: described(s, len(members[s.flow])), rank not in telling)
        moments = [m for m in simulation.memory if m.rank == rank]
        if moments:
            most = max(m.bytes for m in simulation.memory)
            drawn.append(Lane(f"rank {rank}", "buffers", tuple(held(moments, simulation.seconds, most)), detail=True))
    yield Detail((note(f"{len(ranks)} of {plural(len(simulation.ranks), 'rank')}, in one step"),))
    yield Timeline("What each rank does when", simulation.seconds, tuple(drawn), "micro-group")


def described(span: Span, members: int) -> TimelineEvent:
    """An event with all that is known of its span, and how many ranks that are shown take part in its collective."""
    title = f"{span.act.removeprefix('start ')}, micro-group {span.group}"
    remarks = [f"rank {span.rank}, {STREAM_WORDS[span.stream]}"]
    if span.flow >= 0:
        taking = f"{plural(members, 'rank')} of those shown"
        remarks += [f"sends {format_bytes(span.bytes)}", f"collective {span.flow}, {taking}"]
    return replace(event(span), title=title, remarks=tuple(remarks), names=span.tasks)


def held(moments: Sequence[Memory], seconds: float, most: int) -> Iterator[TimelineEvent]:
    """Show the bytes that a rank holds from each moment to its next, as a share of `most`."""
    ends = [*(moment.at for moment in moments[1:]), seconds]
    for own, end in zip(moments, ends, strict=True):
        if own.bytes and end > own.at:
            title = f"buffers of rank {own.rank}"
            yield TimelineEvent(
                own.at, end, "buffers", 0, title, (f"holds {format_bytes(own.bytes)}",), (), own.bytes / most
            )
