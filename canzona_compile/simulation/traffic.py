"""What every rank of a micro-group sends, receives, computes and holds: arrays over the grid, [replicas, shards]."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from canzona_compile import instructions
from canzona_compile.hardware import Hardware
from canzona_compile.ir import MicroGroup, Phase, Placed, Step, Task, Wire
from canzona_compile.layout import Grid
from canzona_compile.lifting import product
from canzona_compile.timing import GraphTime, PlacedTime

Floats: TypeAlias = NDArray[np.float64]


@dataclass(slots=True)
class Ends:
    """Bytes of one exchange by rank and class of link; what stays on its rank is in `own` alone."""

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
        """That a rank's links within the node, and to others, are busy.

        Links send and receive at the same time. A processor that moves the bytes itself does one after the other,
        and copies what stays on its rank.
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
    """One micro-group.

    Attributes:
        prepare, compute, apply: seconds of a rank's processor, packing and unpacking included.
        ends: of its exchanges.
        gathered: bytes of the whole values that an owner assembles.
        computed: names of the matrices that a rank computes, by (replica, shard); (-1, -1): every rank.
    """

    grid: Grid
    prepare: Floats
    compute: Floats
    apply: Floats
    ends: dict[Phase, Ends]
    gathered: Floats
    computed: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))


def traffic(step: Step, group: MicroGroup, times: Mapping[str, PlacedTime], hardware: Hardware) -> GroupTraffic:
    """The figures of a group, task by task, without looking at pairs of ranks."""
    tasks = [step.task(name) for name in group.tasks]
    placed = {p.name: p for p in step.placed}
    grid = tasks[0].layout.grid
    shape = (grid.replicas, grid.shards)
    nodes = np.array(grid.ranks) // hardware.ranks_per_node
    made = GroupTraffic(
        grid, *(np.zeros(shape) for _ in range(3)), {e.phase: Ends.none(shape) for e in group.exchanges}, np.zeros(shape)
    )
    boxes = Boxes(placed)
    launches = Launches(step, group, times, hardware)
    scattered = np.zeros(shape)  # bytes of updates that a rank has for the other replicas
    for task in tasks:
        cut, time = placed[task.placed], times[task.placed]
        share = boxes.share(task)
        made.prepare += share * time.prepare.seconds
        made.apply += share * (time.apply.seconds + 2 * time.kept / hardware.bandwidth)
        up, down = boxes.bytes(task, cut.gather), boxes.bytes(task, cut.scatter)
        owner = task.owner
        made.computed[owner or (-1, -1)].append(task.name)
        where: tuple[int, int] | slice = slice(None) if owner is None else owner
        made.compute[where] += time.compute.seconds + launches.compute(task)
        copied = 0
        if Phase.GATHER in made.ends:
            gather(made.ends[Phase.GATHER], owner, up, nodes)
            near = slice(None) if owner is None else owner[0]
            copies = grid.shards if owner is None else time.packed / max(1, time.gathered)
            made.prepare[near] += 2 * up * copies / hardware.bandwidth
            made.gathered[where] += time.gathered
            copied += 2 * time.gathered
        if owner is not None and Phase.SCATTER in made.ends:
            scatter(made.ends[Phase.SCATTER], owner, down, nodes)
            copied += 2 * time.scattered
        if owner is not None and Phase.EXCHANGE in made.ends:
            scattered[owner[0]] += down
        made.compute[where] += copied / hardware.bandwidth
    if Phase.EXCHANGE in made.ends:
        exchange(made.ends[Phase.EXCHANGE], scattered, nodes)
        made.compute += 2 * scattered * grid.replicas / hardware.bandwidth  # a copy for each replica
    made.prepare += launches.prepare(tasks) + len(tasks) * hardware.host
    made.apply += launches.apply(tasks)
    return made


class Boxes:
    """Fragments of tasks alike, looked up once."""

    def __init__(self, placed: Mapping[str, Placed]) -> None:
        self.placed = placed
        self._shares: dict[object, Floats] = {}
        self._bytes: dict[object, Floats] = {}

    def share(self, task: Task) -> Floats:
        """Of the matrix's elements that every shard has."""
        key = id(task.layout.boxes)
        if key not in self._shares:
            whole = max(1, math.prod(task.shape))
            self._shares[key] = np.array([box.numel / whole for box in task.layout.boxes])
        return self._shares[key]

    def bytes(self, task: Task, wires: tuple[Wire, ...]) -> Floats:
        """Of its wires that every shard has."""
        key = (id(task.layout.boxes), wires)
        if key not in self._bytes:
            sizes = [sum(w.box(box).numel * w.itemsize for w in wires) for box in task.layout.boxes]
            self._bytes[key] = np.array(sizes, dtype=np.float64)
        return self._bytes[key]


class Launches:
    """What operators cost beside their work, in seconds.

    Each is launched once per batch where tasks are stacked, once per task where they are looped over, and once per list
    of tasks alike where kernels take lists (CUDA's foreach; on CPU that is a loop). On CPU a loop over tasks, and the
    view that a copy needs, take as long as another operator.
    """

    def __init__(
        self, step: Step, group: MicroGroup, times: Mapping[str, PlacedTime], hardware: Hardware
    ) -> None:
        self.times, self.hardware = times, hardware
        self.loops = hardware.device == "cpu"
        self.joins = {e.phase for e in group.exchanges}
        self.batches = {name: batch for batch in group.batches for name in batch.tasks}
        self.graphs = {p.name: p.stacked.graph for p in step.placed if p.stacked is not None}
        self.counts: dict[str, tuple[int, int]] = {}

    def compute(self, task: Task) -> float:
        """Of a task on its owner, unpacking and packing included."""
        time, batch = self.times[task.placed].compute, self.batches[task.name]
        alike = len(batch.tasks) if batch.stacked or not self.loops else 1
        pieces = sum(1 for box in task.layout.boxes if box.numel) if self.loops else 1
        copies = pieces * ((Phase.GATHER in self.joins) + (1 + self.loops) * bool(self.joins - {Phase.GATHER})) / alike
        if not batch.stacked:
            return (time.calls + self.loops + copies) * self.hardware.launch + time.product_calls(self.hardware)
        shared, own = self.stacked(task.placed)
        together = shared * self.hardware.launch + time.product_calls(self.hardware)
        return (own + copies) * self.hardware.launch + together / len(batch.tasks)

    def stacked(self, placed: str) -> tuple[int, int]:
        """Launches of a stacked graph: for all of its tasks together, and for each."""
        if placed not in self.counts:
            shared = own = 0
            for node in self.graphs[placed].nodes:
                if node.op != "call_function" or product(node):
                    continue
                each = node.target is instructions.each
                target = node.args[0] if each else node.target
                view = isinstance(target, torch._ops.OpOverload) and target.is_view
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
        """Of a group, with the copies into the send buffer."""
        return self.elementwise(
            (t, self.times[t.placed].prepare, t.layout.grid.shards if t.owner is None else 1) for t in tasks
        )

    def apply(self, tasks: Sequence[Task]) -> float:
        return self.elementwise((t, self.times[t.placed].apply, int(self.times[t.placed].kept > 0)) for t in tasks)

    def elementwise(self, works: Iterable[tuple[Task, GraphTime, int]]) -> float:
        """Of graphs over lists, each with some copies."""
        seconds = {
            t.name if self.loops else t.placed: time.launches(self.hardware) + copies * self.hardware.launch
            for t, time, copies in works
        }
        return sum(seconds.values())


def gather(ends: Ends, owner: tuple[int, int] | None, size: Floats, nodes: NDArray[np.int64]) -> None:
    """Fragments to one owner of their replica, or to every rank of each."""
    if owner is None:
        shards = len(size)
        for r, row in enumerate(nodes):
            same = (row[:, None] == row[None, :]).astype(float)
            mates = same.sum(1) - 1
            ends.sent_node[r] += size * mates
            ends.sent_network[r] += size * (shards - 1 - mates)
            ends.received_node[r] += same @ size - size
            ends.received_network[r] += (1 - same) @ size
        ends.send_buffer += size * shards
        ends.receive_buffer += size.sum()
        return
    r, s = owner
    near = nodes[r] == nodes[r, s]
    others = size.copy()
    others[s] = 0
    ends.sent_node[r] += others * near
    ends.sent_network[r] += others * ~near
    ends.received_node[owner] += (others * near).sum()
    ends.received_network[owner] += (others * ~near).sum()
    ends.send_buffer[r] += size
    ends.receive_buffer[owner] += size.sum()


def scatter(ends: Ends, owner: tuple[int, int], size: Floats, nodes: NDArray[np.int64]) -> None:
    """The other way round."""
    back = Ends(
        ends.received_node,
        ends.received_network,
        ends.sent_node,
        ends.sent_network,
        ends.receive_buffer,
        ends.send_buffer,
    )
    gather(back, owner, size, nodes)


def exchange(ends: Ends, size: Floats, nodes: NDArray[np.int64]) -> None:
    """What each replica's owners computed, to the same shard of all other replicas."""
    replicas = len(size)
    for s in range(size.shape[1]):
        own = size[:, s]
        by_node: dict[int, tuple[int, float]] = {}
        for node, bytes_ in zip(nodes[:, s].tolist(), own.tolist(), strict=True):
            count, total = by_node.get(node, (0, 0.0))
            by_node[node] = count + 1, total + bytes_
        mates = np.array([by_node[node][0] - 1 for node in nodes[:, s].tolist()])
        there = np.array([by_node[node][1] for node in nodes[:, s].tolist()])
        ends.sent_node[:, s] += own * mates
        ends.sent_network[:, s] += own * (replicas - 1 - mates)
        ends.received_node[:, s] += there - own
        ends.received_network[:, s] += own.sum() - there
        ends.send_buffer[:, s] += own * replicas
        ends.receive_buffer[:, s] += own.sum()
