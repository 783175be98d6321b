"""Plays a scheduled step on all of its ranks: when each rank does what, and how long the whole step takes.

This is the second of the two models of time. The first one, `analysis.roofline`, gives the seconds of work from its
FLOPs and bytes. The simulation takes these, and adds what depends on other ranks: links and processors that ranks
share, collectives that begin when the last member starts them, waiting. It predicts what a finished plan will do, and
decides nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from canzona_compile.analysis.roofline import exchange_seconds, placed_time
from canzona_compile.errors import InvalidStep
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.step import Act, Buffer, BufferUse, Event, Form, Phase, Step
from canzona_compile.machine.hardware import Hardware
from canzona_compile.simulation.engine import (
    Collective,
    CollectiveShare,
    ComputeOp,
    Engine,
    Memory,
    RankSummary,
    SimulatedOp,
    Simulation,
    Start,
    Wait,
)
from canzona_compile.simulation.traffic import Boxes, Floats, GroupTraffic, traffic

MOST_SHOWN = 16  # how many ranks of a large job keep their spans

STARTS = {Act.START_GATHER: Phase.GATHER, Act.START_SCATTER: Phase.SCATTER, Act.START_EXCHANGE: Phase.EXCHANGE}
WAITS = {Act.WAIT_GATHER: Phase.GATHER, Act.WAIT_SCATTER: Phase.SCATTER, Act.WAIT_EXCHANGE: Phase.EXCHANGE}


def simulate(step: Step, hardware: Hardware, *, shown: Collection[int] = ()) -> Simulation:
    """Play the schedule of a step.

    Returns:
        What each rank does, in seconds from the begin of the step, and bytes.
    """
    if step.form < Form.SCHEDULED:
        raise InvalidStep(f"a step of form {step.form.name} has no schedule to play")
    used = {t.placed for t in step.tasks}
    times = {p.name: placed_time(p, hardware) for p in step.placed if p.name in used}
    boxes = Boxes()
    groups = {g.index: traffic(step, g, times, hardware, boxes) for g in step.micro_groups}
    ranks = 1 + max((r for own in groups.values() for row in own.grid.ranks for r in row), default=-1)
    visible = frozenset(shown) & set(range(ranks)) | chosen(groups.values(), ranks)
    player = Player(step, hardware, groups, ranks, visible)
    player.write()
    outcome = Engine(player.operations, player.collectives, hardware, visible).run()
    peak = static_bytes(step, groups, ranks)
    memory = [m for rank in sorted(visible) for m in live_bytes(step, groups, player, outcome, rank)]
    columns = (outcome.compute, outcome.exposed, outcome.bubble, outcome.finish, peak, player.sent)
    summaries = tuple(RankSummary(rank, *own) for rank, own in enumerate(zip(*columns, strict=True)))
    spans = tuple(sorted(outcome.spans, key=lambda s: (s.rank, s.start, s.stream)))
    sent = tuple((group, str(phase), total) for (group, phase), total in player.totals.items())
    acts = tuple(seconds_by_act(player, outcome, visible).items())
    books = max(matrices_by_rank(step).values(), default=0) * hardware.host if hardware.device != "cpu" else 0.0
    return Simulation(max(outcome.seconds, books), summaries, tuple(sorted(visible)), spans, tuple(memory), sent, acts)


def matrices_by_rank(step: Step) -> Counter[int]:
    """Count the matrices that each rank keeps books of: those that it holds a fragment of."""
    held: Counter[int] = Counter()
    grids = {id(task.layout.grid): task.layout.grid for task in step.tasks}  # to compare large ones takes long
    for key, number in Counter(id(task.layout.grid) for task in step.tasks).items():
        held.update(dict.fromkeys(grids[key].members(), number))
    return held


def chosen(groups: Collection[GroupTraffic], ranks: int) -> frozenset[int]:
    """Return all ranks of a small job; of a large one the busiest, the idlest, and others evenly between them."""
    load = np.zeros(ranks)
    for own in groups:
        np.add.at(load, np.array(own.grid.ranks), own.compute)
    order = np.argsort(-load, kind="stable").tolist()
    if ranks <= MOST_SHOWN:
        return frozenset(order)
    return frozenset(order[i * (ranks - 1) // (MOST_SHOWN - 1)] for i in range(MOST_SHOWN))


def seconds_by_act(player: Player, outcome: Engine, visible: Collection[int]) -> dict[str, float]:
    """Return how long each act of the schedule takes the mean visible rank. A rank does one thing after the other."""
    found: dict[str, float] = defaultdict(float)
    for (event, rank), place in player.position.items():
        begin, end = outcome.moments[rank][place]
        found[str(event.act)] += (end - begin) / len(visible)
    return dict(found)


class Player:
    """Writes every rank's operations in the order of the schedule."""

    def __init__(
        self,
        step: Step,
        hardware: Hardware,
        groups: dict[int, GroupTraffic],
        ranks: int,
        visible: frozenset[int],
    ) -> None:
        self.step, self.hardware, self.groups = step, hardware, groups
        self.operations: list[list[SimulatedOp]] = [[] for _ in range(ranks)]
        self.collectives: list[Collective] = []
        self.sent = [0] * ranks
        self.totals: dict[tuple[int, Phase], int] = {}  # bytes of a micro-group's exchange, over all ranks
        self.numbers: dict[tuple[int, Phase], dict[int, int]] = {}  # the number of each rank's collective
        self.visible = visible
        self.position: dict[tuple[Event, int], int] = {}  # the index of an event in the operations of a visible rank

    def write(self) -> None:
        for event in self.step.schedule:
            own = self.groups[event.micro_group]
            if event.act in STARTS:
                self.start(event, own, STARTS[event.act])
            elif event.act in WAITS:
                numbers = self.numbers[event.micro_group, WAITS[event.act]]
                for rank in own.grid.members():
                    self.add(event, rank, Wait(numbers[rank]))
            elif event.act is Act.MEET:
                self.meet(event, own.grid)
            else:
                self.work(event, own)

    def add(self, event: Event, rank: int, operation: SimulatedOp) -> None:
        if rank in self.visible:
            self.position[event, rank] = len(self.operations[rank])
        self.operations[rank].append(operation)

    def work(self, event: Event, own: GroupTraffic) -> None:
        phases = {Act.FETCH: own.fetch, Act.PREPARE: own.prepare, Act.APPLY: own.apply, Act.STORE: own.store}
        seconds = phases.get(event.act, own.compute).tolist()
        act, computed = str(event.act), own.computed if event.act is Act.COMPUTE else {}
        everywhere = tuple(computed.get((-1, -1), ()))
        for r, row in enumerate(own.grid.ranks):
            for s, rank in enumerate(row):
                tasks = (*everywhere, *computed.get((r, s), ()))
                self.add(event, rank, ComputeOp(act, event.micro_group, seconds[r][s], tasks))

    def start(self, event: Event, own: GroupTraffic, phase: Phase) -> None:
        ends, grid = own.ends[phase], own.grid
        node, network = (part.tolist() for part in ends.seconds(self.hardware))
        sent = (ends.sent_node + ends.sent_network).astype(np.int64).tolist()
        numbers = self.numbers[event.micro_group, phase] = {}
        self.totals[event.micro_group, phase] = sum(map(sum, sent))
        for members in teams(grid, phase):
            ranks = tuple(grid.ranks[r][s] for r, s in members)
            parts = tuple(CollectiveShare(node[r][s], network[r][s], sent[r][s]) for r, s in members)
            self.collectives.append(Collective(str(phase), event.micro_group, ranks, parts, self.latency(ranks)))
            for rank, (r, s) in zip(ranks, members, strict=True):
                numbers[rank] = len(self.collectives) - 1
                self.sent[rank] += sent[r][s]
                self.add(event, rank, Start(numbers[rank]))

    def meet(self, event: Event, grid: Grid) -> None:
        ranks = grid.members()
        self.collectives.append(
            Collective("meet", event.micro_group, ranks, (CollectiveShare(0.0, 0.0),) * len(ranks), self.latency(ranks))
        )
        for rank in ranks:
            self.operations[rank].append(Start(len(self.collectives) - 1))
            self.add(event, rank, Wait(len(self.collectives) - 1))

    def latency(self, ranks: tuple[int, ...]) -> float:
        return exchange_seconds(self.hardware.link(ranks), 0.0, len(ranks))


def teams(grid: Grid, phase: Phase) -> Iterator[list[tuple[int, int]]]:
    """Return the members of each process group of a phase."""
    if phase is Phase.EXCHANGE:
        for s in range(grid.shards):
            yield [(r, s) for r in range(grid.replicas)]
    else:
        for r in range(grid.replicas):
            yield [(r, s) for s in range(grid.shards)]


def buffer_bytes(own: GroupTraffic, buffer: Buffer) -> Floats:
    """Return the bytes of one buffer of a micro-group, by (replica, shard)."""
    if buffer.use is BufferUse.GATHERED:
        return own.gathered
    ends = own.ends[buffer.phase]
    return ends.send_buffer if buffer.use is BufferUse.SEND else ends.receive_buffer


def static_bytes(step: Step, groups: dict[int, GroupTraffic], ranks: int) -> list[int]:
    """Count the bytes that the runtime allocates on each rank: a slot is as large as the largest buffer in it."""
    slots: dict[int, Floats] = defaultdict(lambda: np.zeros(ranks))
    for buffer in step.buffers:
        own = groups[buffer.micro_group]
        where = np.array(own.grid.ranks)
        slots[buffer.slot][where] = np.maximum(slots[buffer.slot][where], buffer_bytes(own, buffer))
    total = sum(slots.values(), np.zeros(ranks))
    return [int(n) for n in total]


def live_bytes(
    step: Step, groups: dict[int, GroupTraffic], player: Player, outcome: Engine, rank: int
) -> Iterator[Memory]:
    """Yield the bytes that a rank's buffers hold over time; a buffer counts from its first event to its last."""
    changes: dict[float, int] = defaultdict(int)
    for buffer in step.buffers:
        own = groups[buffer.micro_group]
        if rank not in own.grid.members():
            continue
        size = int(buffer_bytes(own, buffer)[own.grid.find(rank)])
        first, last = (player.position[step.schedule[i], rank] for i in (buffer.first, buffer.last))
        changes[outcome.moments[rank][first][0]] += size
        changes[outcome.moments[rank][last][1]] -= size
    held = 0
    for at in sorted(changes):
        if changes[at]:
            held += changes[at]
            yield Memory(rank, at, held)
