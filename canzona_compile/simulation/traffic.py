"""Counts what each rank of a micro-group sends, receives, computes and holds, as arrays [replicas, shards]."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from canzona_compile.analysis.lanes import batch_times, saved
from canzona_compile.analysis.roofline import GraphTime, PlacedTime
from canzona_compile.ir import program_ops
from canzona_compile.ir.fx_utils import is_operator
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.step import Batch, Leaf, MicroGroup, Phase, Placed, Step, Task, Wire
from canzona_compile.lowering.batch_graph import LoopOver, product
from canzona_compile.lowering.elementwise_kernels import opened_by_kernels
from canzona_compile.machine.hardware import Hardware

Floats: TypeAlias = NDArray[np.float64]


@dataclass(slots=True)
class Ends:
    """Bytes of one exchange by rank and class of link. Only the buffers count bytes that stay on their rank."""

    sent_node: Floats
    sent_network: Floats
    received_node: Floats
    received_network: Floats
    send_buffer: Floats
    receive_buffer: Floats

    @classmethod
    def none(cls, shape: tuple[int, int]) -> Ends:
        return cls(*(np.zeros(shape) for _ in range(6)))

    def seconds(self, hardware: Hardware) -> tuple[Floats, Floats]:
        """Return the seconds for which each rank's links are busy: those within its node, and those to other nodes.

        Links send and receive at the same time. A processor that moves the bytes itself does one after the other,
        and copies the bytes that stay on its rank.
        """
        if hardware.overlap:
            node = np.maximum(self.sent_node, self.received_node) / hardware.node.bandwidth
            return node, np.maximum(self.sent_network, self.received_network) / hardware.network.bandwidth
        stays = self.send_buffer - self.sent_node - self.sent_network
        node = (self.sent_node + self.received_node) / 2 / hardware.node.bandwidth
        network = (self.sent_network + self.received_network) / 2 / hardware.network.bandwidth
        return node + 2 * stays / hardware.bandwidth, network


@dataclass(slots=True)
class GroupTraffic:
    """The traffic of one micro-group.

    Attributes:
        fetch, store: seconds of opening stored state, and of storing it.
        prepare, compute, apply: seconds of a rank's processor, packing and unpacking included.
        ends: the bytes of each of its exchanges.
        gathered: bytes of the whole values that each rank assembles.
        computed: names of the matrices that a rank computes, by (replica, shard); (-1, -1) stands for every rank.
    """

    grid: Grid
    prepare: Floats
    compute: Floats
    apply: Floats
    ends: dict[Phase, Ends]
    gathered: Floats
    fetch: Floats
    store: Floats
    computed: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))


def traffic(
    step: Step, group: MicroGroup, times: Mapping[str, PlacedTime], hardware: Hardware, boxes: Boxes
) -> GroupTraffic:
    """Sum up the figures of a micro-group task by task, without a look at pairs of ranks."""
    tasks = [step.task(name) for name in group.tasks]
    placed = {p.name: p for p in step.placed}
    grid = tasks[0].layout.grid
    shape = (grid.replicas, grid.shards)
    nodes = np.array(grid.ranks) // hardware.ranks_per_node
    ends = {e.phase: Ends.none(shape) for e in group.exchanges}
    prepare, compute, apply, gathered, fetch, store = (np.zeros(shape) for _ in range(6))
    made = GroupTraffic(grid, prepare, compute, apply, ends, gathered, fetch, store)
    launches = Launches(step, group, times, hardware)
    opened = {p.name: [own for own in p.leaves if own.name in p.opened] for p in step.placed if p.opened}
    scattered = np.zeros(shape)  # bytes of updates that a rank has for the other replicas
    moved = Moved(shape)
    for task in tasks:
        cut, time = placed[task.placed], times[task.placed]
        share = boxes.share(task)
        made.prepare += share * time.prepare.seconds
        made.apply += share * (time.apply.seconds + 2 * time.kept / hardware.bandwidth)
        up, down = boxes.bytes(task, cut.gather), boxes.bytes(task, cut.scatter)
        owner = task.owner
        inside = boxes.opened(task, cut) if hardware.device != "cpu" else {}
        for leaf in opened.get(cut.name, ()):
            if inside.get(leaf.name) == "bfloat16":
                continue
            seconds = opening(leaf, hardware)
            at: Any = (slice(None) if owner is None else owner) if leaf.name in cut.resident else slice(None)
            part = 1.0 if leaf.name in cut.resident else share
            made.fetch[at] += part * seconds * (leaf.name not in inside)
            made.store[at] += part * seconds * (leaf.name in cut.template.writes)
        if owner is None and grid.shards > 1 and time.turned:  # the rank copies strided parts before it uses them
            made.apply += share * (time.turned + 2 * time.scattered / hardware.bandwidth)
        made.computed[owner or (-1, -1)].append(task.name)
        where: tuple[int, int] | slice = slice(None) if owner is None else owner
        made.compute[where] += time.compute.seconds - launches.saved(task) + launches.compute(task)
        copied = 0
        if Phase.GATHER in made.ends:
            moved.add(Phase.GATHER, up, where)
            near = slice(None) if owner is None else owner[0]
            copies = grid.shards if owner is None else time.packed / max(1, time.gathered)
            made.prepare[near] += 2 * up * copies / hardware.bandwidth
            made.gathered[where] += time.gathered
            copied += 2 * time.gathered
        if owner is not None and Phase.SCATTER in made.ends:
            moved.add(Phase.SCATTER, down, where)
            copied += 2 * time.scattered
            made.compute[where] += time.turned
        if owner is not None and Phase.EXCHANGE in made.ends:
            scattered[owner[0]] += down
        made.compute[where] += copied / hardware.bandwidth
    for owner, own in groupby(group.batches, key=lambda batch: batch.owner):
        made.compute[slice(None) if owner is None else owner] -= launches.beside(tuple(own))
    moved.count(made.ends, nodes)
    if Phase.EXCHANGE in made.ends:
        exchange(made.ends[Phase.EXCHANGE], scattered, nodes)
        made.compute += 2 * scattered * grid.replicas / hardware.bandwidth  # a copy for each replica
    made.prepare += launches.prepare(tasks)
    if hardware.device == "cpu":
        made.prepare += len(tasks) * hardware.host
    made.apply += launches.apply(tasks)
    return made


# Bytes per second between the memory of a GPU and of its host: PCIe 5.0 with 16 lanes, of 64 GB/s by its standard.
HOST_LINK = 55e9


def opening(leaf: Leaf, hardware: Hardware) -> float:
    """Return the seconds of opening a whole leaf, or of storing it; copies from the host are not taken to overlap."""
    assert leaf.stored is not None and leaf.dtype is not None
    own, whole = leaf.nbytes(leaf.shape), math.prod(leaf.shape) * leaf.dtype.itemsize
    seconds = (own + whole) / hardware.bandwidth + hardware.launch
    return seconds + (own / HOST_LINK if leaf.stored.host and hardware.device == "cuda" else 0.0)


class Boxes:
    """The fragments of tasks, computed once for all tasks with the same layout."""

    def __init__(self) -> None:
        self._shares: dict[object, Floats] = {}
        self._bytes: dict[object, Floats] = {}
        self._opened: dict[object, dict[str, str]] = {}

    def share(self, task: Task) -> Floats:
        """Return the share of the matrix's elements that each shard holds."""
        key = id(task.layout.boxes)
        if key not in self._shares:
            whole = max(1, math.prod(task.shape))
            self._shares[key] = np.array([box.numel / whole for box in task.layout.boxes])
        return self._shares[key]

    def opened(self, task: Task, cut: Placed) -> dict[str, str]:
        """Return the stored leaves of a task that generated kernels open."""
        key = (id(task.layout.boxes), cut.name)
        if key not in self._opened:
            self._opened[key] = opened_by_kernels(cut, {box.size[-1] for box in task.layout.boxes if box.numel})
        return self._opened[key]

    def bytes(self, task: Task, wires: tuple[Wire, ...]) -> Floats:
        """Return the bytes of the wires that each shard holds."""
        key = (id(task.layout.boxes), wires)
        if key not in self._bytes:
            sizes = [sum(w.box(box).numel * w.itemsize for w in wires) for box in task.layout.boxes]
            self._bytes[key] = np.array(sizes, dtype=np.float64)
        return self._bytes[key]


class Launches:
    """The seconds that operators cost beside their work.

    A program launches an operator once per batch of stacked tasks, once per task in a loop, and once per list of equal
    tasks if kernels take lists (CUDA's foreach; on CPU that is a loop). On CPU a loop over tasks, and the view that a
    copy needs, take as long as another operator.
    """

    def __init__(self, step: Step, group: MicroGroup, times: Mapping[str, PlacedTime], hardware: Hardware) -> None:
        self.times, self.hardware = times, hardware
        self.loops = hardware.device == "cpu"
        self.joins = {e.phase for e in group.exchanges}
        self.batches = {name: batch for batch in group.batches for name in batch.tasks}
        self.graphs = {p.name: p.stacked.graph for p in step.placed if p.stacked is not None}
        self.counts: dict[str, tuple[int, int]] = {}
        self.savings: dict[tuple[str, int], float] = {}

    def saved(self, task: Task) -> float:
        """Return the seconds that a task's products take less because its batch is a stack."""
        batch = self.batches[task.name]
        key = task.placed, len(batch.tasks)
        if not batch.stacked:
            return 0.0
        if key not in self.savings:
            self.savings[key] = self.times[task.placed].compute.saves(key[1], self.hardware)
        return self.savings[key]

    def beside(self, batches: Sequence[Batch]) -> float:
        """Return the seconds that batches of one owner take less because they compute side by side."""
        compute = {b.placed: self.times[b.placed].compute for b in batches}
        times = batch_times(batches, compute, self.hardware)
        return max(0.0, saved(times, [b.lane for b in batches], self.hardware))

    def compute(self, task: Task) -> float:
        """Return the seconds of launches for a task on its owner, unpacking and packing included."""
        time, batch = self.times[task.placed].compute, self.batches[task.name]
        alike = len(batch.tasks) if batch.stacked or not self.loops else 1
        pieces = sum(1 for box in task.layout.boxes if box.numel) if self.loops else 1
        copies = pieces * ((Phase.GATHER in self.joins) + (1 + self.loops) * bool(self.joins - {Phase.GATHER})) / alike
        if not batch.stacked:
            return (time.calls + self.loops + copies) * self.hardware.launch + time.product_calls(self.hardware)
        shared, own = self.stacked(task.placed)
        together = shared * self.hardware.launch + time.product_calls(self.hardware)
        return (own + copies) * self.hardware.launch + together / len(batch.tasks) + time.turned

    def stacked(self, placed: str) -> tuple[int, int]:
        """Count the launches of a stacked graph: those for all of its tasks together, and those for each task."""
        if placed not in self.counts:
            shared = own = 0
            for node in self.graphs[placed].nodes:
                if node.op != "call_function" or product(node):
                    continue
                each = node.target is program_ops.each or isinstance(node.target, LoopOver)
                target = node.args[0] if each else node.target
                view = is_operator(target) and target.is_view
                counted = int(self.loops or not view)
                if each:
                    own += counted + self.loops
                elif "_foreach_" in str(getattr(target, "__name__", "")):
                    own += 1
                else:
                    shared += counted
            self.counts[placed] = shared, own
        return self.counts[placed]

    def prepare(self, tasks: Sequence[Task]) -> float:
        """Return the seconds of launches to prepare a micro-group, with the copies into the send buffer."""
        return self.elementwise(
            (t, self.times[t.placed].prepare, t.layout.grid.shards if t.owner is None else 1) for t in tasks
        )

    def apply(self, tasks: Sequence[Task]) -> float:
        return self.elementwise((t, self.times[t.placed].apply, int(self.times[t.placed].kept > 0)) for t in tasks)

    def elementwise(self, works: Iterable[tuple[Task, GraphTime, int]]) -> float:
        """Return the seconds to launch graphs over lists, each with some copies."""
        seconds = {
            t.name if self.loops else t.placed: time.launches(self.hardware) + copies * self.hardware.launch
            for t, time, copies in works
        }
        return sum(seconds.values())


class Moved:
    """How many values of each kind each rank gathers or scatters; equal tasks count together."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._counts: dict[tuple[Phase, int], tuple[Floats, Floats]] = {}

    def add(self, phase: Phase, size: Floats, where: tuple[int, int] | slice) -> None:
        """Add values; shard s holds `size[s]` bytes of them, and the rank or ranks `where` hold them whole."""
        if (phase, id(size)) not in self._counts:
            self._counts[phase, id(size)] = size, np.zeros(self.shape)
        self._counts[phase, id(size)][1][where] += 1

    def count(self, ends: Mapping[Phase, Ends], nodes: NDArray[np.int64]) -> None:
        """Add the bytes to the ends of each phase."""
        for (phase, _), (size, counts) in self._counts.items():
            own = ends[phase]
            if phase is Phase.SCATTER:  # a scatter receives what a gather would send
                own = Ends(
                    own.received_node,
                    own.received_network,
                    own.sent_node,
                    own.sent_network,
                    own.receive_buffer,
                    own.send_buffer,
                )
            gather(own, size, counts, nodes)


def gather(ends: Ends, size: Floats, counts: Floats, nodes: NDArray[np.int64]) -> None:
    """Add the bytes of fragments that become `counts[r, s]` whole values on each rank (r, s) of a replica."""
    for r, row in enumerate(nodes):
        _, place = np.unique(row, return_inverse=True)
        whole, wanted = size.sum(), counts[r].sum()
        near_size = np.bincount(place, size)[place] - size
        near_count = np.bincount(place, counts[r])[place] - counts[r]
        ends.sent_node[r] += size * near_count
        ends.sent_network[r] += size * (wanted - counts[r] - near_count)
        ends.received_node[r] += counts[r] * near_size
        ends.received_network[r] += counts[r] * (whole - size - near_size)
        ends.send_buffer[r] += size * wanted
        ends.receive_buffer[r] += counts[r] * whole


def exchange(ends: Ends, size: Floats, nodes: NDArray[np.int64]) -> None:
    """Add the bytes that each replica's owners computed and send to the same shard of all other replicas."""
    replicas, whole = len(size), size.sum(0)
    for r, row in enumerate(nodes):
        near = nodes == row  # the replicas whose rank of the same shard is on the same node
        mates, there = near.sum(0) - 1, (size * near).sum(0)
        ends.sent_node[r] += size[r] * mates
        ends.sent_network[r] += size[r] * (replicas - 1 - mates)
        ends.received_node[r] += there - size[r]
        ends.received_network[r] += whole - there
        ends.send_buffer[r] += size[r] * replicas
        ends.receive_buffer[r] += whole
