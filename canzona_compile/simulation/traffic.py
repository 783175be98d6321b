"""What every rank of a micro-group sends, receives, computes and holds: arrays over the grid, [replicas, shards]."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from canzona_compile.hardware import Hardware
from canzona_compile.ir import MicroGroup, Phase, Placed, Step, Task, Wire
from canzona_compile.layout import Grid
from canzona_compile.timing import PlacedTime

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
        """That a rank's links within the node, and to others, are busy."""
        node = np.maximum(self.sent_node, self.received_node) / hardware.node.bandwidth
        network = np.maximum(self.sent_network, self.received_network) / hardware.network.bandwidth
        return node, network


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
    launches = Launches(step, hardware)
    scattered = np.zeros(shape)  # bytes of updates that a rank has for the other replicas
    for task in tasks:
        cut, time = placed[task.placed], times[task.placed]
        share = boxes.share(task)
        made.prepare += share * time.prepare.seconds
        made.apply += share * time.apply.seconds
        up, down = boxes.bytes(task, cut.gather), boxes.bytes(task, cut.scatter)
        owner = task.owner
        made.computed[owner or (-1, -1)].append(task.name)
        where: tuple[int, int] | slice = slice(None) if owner is None else owner
        made.compute[where] += time.compute.seconds + launches.compute(task, time)
        copied = 0
        if Phase.GATHER in made.ends:
            gather(made.ends[Phase.GATHER], owner, up, nodes)
            near = slice(None) if owner is None else owner[0]
            made.prepare[near] += 2 * up / hardware.bandwidth
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
    fixed_prepare, fixed_apply = launches.elementwise(tasks, times)
    made.prepare += fixed_prepare
    made.apply += fixed_apply
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
    """What operators cost beside their work: per batch where tasks are stacked, per task where they are looped over,
    per list of tasks alike where kernels take lists (CUDA's foreach), else per task."""

    def __init__(self, step: Step, hardware: Hardware) -> None:
        self.hardware = hardware
        self.stacked = {
            name: len(batch.tasks) for g in step.groups for batch in g.batches if batch.stacked for name in batch.tasks
        }

    def compute(self, task: Task, time: PlacedTime) -> float:
        return time.compute.calls * self.hardware.launch / self.stacked.get(task.name, 1)

    def elementwise(self, tasks: list[Task], times: Mapping[str, PlacedTime]) -> tuple[float, float]:
        """Seconds of a group's prepare and apply."""
        lists = self.hardware.device != "cpu"
        names = {t.placed for t in tasks} if lists else [t.placed for t in tasks]
        prepare = sum(times[name].prepare.calls + 1 for name in names)  # and a copy
        return prepare * self.hardware.launch, sum(times[name].apply.calls for name in names) * self.hardware.launch


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
