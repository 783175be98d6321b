"""Write the program of one rank, from a step that is the same on all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from canzona_compile.ir import program_ops, storage
from canzona_compile.ir.fx_utils import outputs
from canzona_compile.ir.program import (
    Bytes,
    Group,
    Indices,
    View,
    Views,
    Watcher,
    Whole,
)
from canzona_compile.ir.step import (
    Act,
    Batch,
    BufferUse,
    Event,
    Form,
    Phase,
    Placed,
    Step,
    Wire,
)
from canzona_compile.lowering.batch_graph import lift_apply, lift_prepare
from canzona_compile.lowering.builder import ProgramBuilder
from canzona_compile.lowering.elementwise_kernels import Kernels
from canzona_compile.lowering.memory_plan import RankMemory
from canzona_compile.lowering.rank_view import GroupView, TaskSegment, runs
from canzona_compile.lowering.stream_sync import CALLER, COMPUTE, PACK, STATE, stream_of_lane


@dataclass(frozen=True, slots=True)
class Emit:
    """Write the program of `rank`: an FX graph over lists of tensors, one entry per task.

    The program addresses send and receive buffers through views that are made once, and packs straight into them.
    Elementwise graphs run once per list, and compute graphs once per batch. Only the `apply` of a micro-group writes
    the parameters and the state that the micro-group changes.

    With `generate` (for CUDA), elementwise graphs become generated kernels. A micro-group then has one launch for
    prepare, one for apply, and one each for the copies before and after compute. Prepare then also writes the state
    whose new value it computes and which apply would only store.
    """

    rank: int
    generate: bool = False

    name: ClassVar[str] = "emit"
    requires: ClassVar[Form] = Form.SCHEDULED
    ensures: ClassVar[Form] = Form.EMITTED

    def __call__(self, step: Step) -> Step:
        writer = ProgramWriter(step, self.rank, self.generate)
        for event in step.schedule:
            writer.write(event)
        program = writer.program(writer.memory.slot_sizes())
        if writer.kernels is not None:
            program = replace(program, eager=writer.kernels.eager)
        return replace(step, form=Form.EMITTED, program=program)


def has_work(placed: Placed) -> bool:
    """Whether the owner has something to compute."""
    return bool(placed.gather or placed.scatter or placed.owner_writes)


def is_stacked(placed: Placed, batch: Batch, place: int) -> bool:
    """Whether a batch computes result `place` as one tensor [n, ...] and not as a list of n tensors."""
    return batch.stacked and not placed.kind.lead and placed.stacked is not None and placed.stacked.outputs[place]


class ProgramWriter(ProgramBuilder):
    """Writes the rank program event by event."""

    def __init__(self, step: Step, rank: int, generate: bool = False) -> None:
        super().__init__(step)
        self.memory = RankMemory(step)
        self.views = {g.index: GroupView(step, g, rank, self.memory) for g in step.micro_groups}
        self.foreach = step.machine.device == "cpu"
        self.kernels = Kernels(self) if generate else None

    def write(self, event: Event) -> None:
        actions: dict[Act, Callable[[GroupView], None]] = {
            Act.MEET: self.meet,
            Act.FETCH: self.fetch,
            Act.PREPARE: self.prepare,
            Act.START_GATHER: lambda g: self.start(g, Phase.GATHER),
            Act.WAIT_GATHER: lambda g: self.finish(g, Phase.GATHER),
            Act.COMPUTE: self.compute,
            Act.START_SCATTER: lambda g: self.start(g, Phase.SCATTER),
            Act.WAIT_SCATTER: lambda g: self.finish(g, Phase.SCATTER),
            Act.START_EXCHANGE: lambda g: self.start(g, Phase.EXCHANGE),
            Act.WAIT_EXCHANGE: lambda g: self.finish(g, Phase.EXCHANGE),
            Act.APPLY: self.apply,
            Act.STORE: self.store,
        }
        group, self.event = self.views[event.micro_group], event
        with self.on(self.lane(event.act, group)):
            actions[event.act](group)

    def lane(self, act: Act, g: GroupView) -> str:
        """The stream of an event. Computation does not wait for copies of other micro-groups; a micro-group
        without exchanges runs on one stream."""
        if self.step.machine.device == "cpu" or act is Act.MEET:
            return CALLER
        if act in (Act.FETCH, Act.STORE):
            return STATE
        received = Phase.GATHER in g.exchanges
        if not g.exchanges or act in (Act.COMPUTE, Act.START_SCATTER) or (act is Act.PREPARE and not received):
            return COMPUTE
        return COMPUTE if act is Act.START_EXCHANGE and Phase.SCATTER not in g.exchanges else PACK

    def in_lane(self, batch: Batch) -> AbstractContextManager[None]:
        """A context in which calls are added on the stream on which a batch computes."""
        return self.on(stream_of_lane(batch.lane) if self.stream == COMPUTE else self.stream)

    def copy(self, targets: fx.Node, sources: fx.Node, to: torch.dtype, given: torch.dtype | None = None) -> None:
        """Copy lists of tensors from dtype `given` (by default `to`) to dtype `to`, now or in the next `launch`."""
        if self.kernels is not None:
            self.kernels.copy(targets, sources, to, given or to)
        else:
            self.call(program_ops.copy, targets, sources)

    def launch(self, g: GroupView, stage: str) -> None:
        """Write the call of one generated kernel for all work since the last one, if kernels are generated."""
        if self.kernels is not None:
            self.kernels.launch(f"g{g.group.index}_{stage}")

    # -- events ----------------------------------------------------------------------------------

    def fetch(self, g: GroupView) -> None:
        """Open the stored leaves of a micro-group: those of fragments, and those that this rank has as owner."""
        for placed, group, names, leaf, where, inside in self.stored(g):
            self.open_leaf(placed, group, names, leaf, where, inside=inside)

    def store(self, g: GroupView) -> None:
        """Store the leaves of a micro-group that have new values."""
        for stored, values in self.fetched[g.group.index].items():
            if stored in self.written_leaves:
                self.call(storage.store, stored, values)

    def stored(self, g: GroupView) -> Iterator[tuple[Placed, int, tuple[str, ...], str, str, bool]]:
        """The stored leaves of a micro-group that this rank needs: the arguments of `open_leaf`."""
        for i, own in enumerate(g.segments):
            opened = self.kernels.opens(g, own) if self.kernels is not None else ()
            for name in (n for n in own.placed.opened if n not in own.placed.resident):
                yield own.placed, own.group, own.names, name, f"g{g.group.index}_s{i}", name in opened
        cuts = {placed.name: placed for placed in self.step.placed}
        for b, batch in enumerate(g.group.batches):
            placed = cuts[batch.placed]
            for name in placed.opened if batch.owner in (None, g.at) else ():
                if name in placed.resident:
                    yield placed, batch.param_group, batch.tasks, name, f"g{g.group.index}_b{b}", False

    def meet(self, g: GroupView) -> None:
        ranks = self.bind("ranks", Group(g.grid.members()))
        work = self.call(program_ops.start_meeting, self.step.machine.device, ranks)
        self.call(program_ops.finish, work, self.bind("watch", Watcher()))
        self.collectives += 1

    def prepare(self, g: GroupView) -> None:
        for i, segment in enumerate(g.segments):
            placed, packs = segment.placed, segment.near and Phase.GATHER in g.exchanges
            if not placed.kept and not (segment.near and placed.gather):
                continue
            if self.kernels is not None and self.kernels.prepare(g, i, segment):
                continue
            where = f"g{g.group.index}_s{i}"
            sharded = placed.kind.sharded

            def build(placed: Placed = placed, sharded: bool = sharded) -> fx.Graph:
                casting = len(placed.gather) if sharded else 0
                return lift_prepare(placed.prepare, placed.template.numbers, foreach=self.foreach, casting=casting)

            def lookup(name: str, segment: TaskSegment = segment, where: str = where) -> fx.Node:
                return self.leaf(segment.placed, segment.group, segment.names, name, where)

            out = self.module(f"{placed.name}_prepare", build, lookup)
            names = [w.name for w in placed.gather] + list(placed.kept)
            for name, node in zip(names, self.items(out, len(names)), strict=True):
                g.wires[i, name] = node
            if packs:
                for wire in placed.gather:
                    self.pack_prepared(g, i, segment, wire)
        self.launch(g, "prepare")

    def pack_prepared(self, g: GroupView, i: int, segment: TaskSegment, wire: Wire) -> None:
        """Copy a wire of all tasks of a segment to all of its places in the send buffer."""
        for c, views in enumerate(g.sends(Phase.GATHER, segment, wire)):
            sent = self.bind(f"g{g.group.index}_s{i}_{wire.name}_send{c}", views)
            self.call(program_ops.copy, sent, g.wires[i, wire.name])

    def start(self, g: GroupView, phase: Phase) -> None:
        if phase is Phase.EXCHANGE and Phase.SCATTER in g.exchanges:
            self.forward(g)
            self.launch(g, "forward")
        label = f"g{g.group.index}_{phase.value}"
        ends = []
        for use, name in ((BufferUse.RECEIVE, "received"), (BufferUse.SEND, "sent")):
            whole = self.memory.exchange_buffer(g.group.index, phase, use, sum(g.byte_counts(phase, use)))
            ends.append(self.bind(f"{label}_{name}", Whole(whole)))
        counts = [
            self.bind(f"{label}_bytes_{name}", Bytes(g.byte_counts(phase, use)))
            for use, name in ((BufferUse.RECEIVE, "in"), (BufferUse.SEND, "out"))
        ]
        ranks = tuple(g.grid.ranks[r][s] for r, s in g.peers(phase))
        group = self.bind(f"ranks_{'_'.join(map(str, ranks[:4]))}", Group(ranks))
        g.work[phase] = self.call(program_ops.start_all_to_all, *ends, *counts, group)
        self.collectives += 1

    def finish(self, g: GroupView, phase: Phase) -> None:
        self.call(program_ops.finish, g.work[phase], self.bind("watch", Watcher()))

    def compute(self, g: GroupView) -> None:
        own = [
            (b, batch, placed)
            for b, batch in enumerate(g.group.batches)
            if batch.owner in (None, g.at)
            for placed in self.step.placed
            if placed.name == batch.placed and has_work(placed)  # other variants are elementwise
        ]
        if self.kernels is None:
            for b, batch, placed in own:
                with self.in_lane(batch):
                    self.compute_batch(g, b, batch, placed, self.gathered(g, b, batch, placed))
        else:  # one launch copies for all batches before they compute, and one afterwards
            ready = [self.gathered(g, *one) for one in own]
            with self.on(CALLER if self.stream == CALLER else PACK):
                self.launch(g, "unpack")
            for one, inputs in zip(own, ready, strict=True):
                with self.in_lane(one[1]):
                    self.compute_batch(g, *one, inputs)
            self.launch(g, "pack")

    def gathered(self, g: GroupView, b: int, batch: Batch, placed: Placed) -> dict[str, fx.Node]:
        """The whole wire values of a batch, by name: stacks, where the graph of the batch takes stacks."""
        if Phase.GATHER in g.exchanges:
            return {wire.name: self.unpack(g, batch, wire, f"g{g.group.index}_b{b}") for wire in placed.gather}
        segment = (batch.placed, batch.param_group)
        i = next((i for i, s in enumerate(g.segments) if s.near and (s.placed.name, s.group) == segment), -1)
        ready = {wire.name: g.stacks.get((i, wire.name)) or g.wires[i, wire.name] for wire in placed.gather}
        for name in placed.stacked.inputs if batch.stacked and placed.stacked and not placed.kind.lead else ():
            if (i, name) not in g.stacks:
                ready[name] = self.call(program_ops.stack, ready[name])
        return ready

    def compute_batch(self, g: GroupView, b: int, batch: Batch, placed: Placed, inputs: dict[str, fx.Node]) -> None:
        where = f"g{g.group.index}_b{b}"

        def lookup(name: str) -> fx.Node:
            given = inputs.get(name) or self.leaf(placed, batch.param_group, batch.tasks, name, where)
            return self.of_matrices(placed, batch, name, given)

        precision = placed.template.precision
        before = self.call(program_ops.set_matmul_precision, precision) if precision else None
        if batch.stacked and placed.stacked is not None:
            whole = placed.stacked.graph
            out = self.module(f"{placed.name}_compute_stacked", lambda: copy.deepcopy(whole), lookup)
        else:  # the tasks run one after the other, so intermediate values of only one exist at a time
            out = self.loop(f"{placed.name}_compute", placed.compute, lookup)
        if before is not None:
            self.call(program_ops.put_precision_back, before)
        results = self.items(out, len(placed.scatter) + len(placed.owner_writes))
        if lead := placed.kind.lead:
            results = [self.call(program_ops.divide, value, lead, len(batch.tasks)) for value in results]
        for name in batch.tasks:
            g.results[name] = (batch, tuple(results))
        self.commit_later(g, placed, batch, results[len(placed.scatter) :], where)
        phase = next((p for p in (Phase.SCATTER, Phase.EXCHANGE) if p in g.exchanges), None)
        if phase is not None and batch.owner is not None:
            for place, (wire, node) in enumerate(zip(placed.scatter, results, strict=False)):
                self.pack_computed(g, phase, batch.tasks, wire, node, where, is_stacked(placed, batch, place))

    def of_matrices(self, placed: Placed, batch: Batch, name: str, values: fx.Node) -> fx.Node:
        """What the compute graph of a batch reads: the values of the matrices, if tasks are stacks of them."""
        lead, wire = placed.kind.lead, any(wire.name == name for wire in placed.gather)
        if not lead or name in placed.template.numbers:
            return values
        if wire and batch.stacked:
            return self.call(program_ops.join, values, len(lead))
        if wire or name in placed.resident:
            return self.call(program_ops.matrices, values, len(lead))
        return self.call(program_ops.for_each, values, math.prod(lead))

    def unpack(self, g: GroupView, batch: Batch, wire: Wire, where: str) -> fx.Node:
        """Assemble a batch's whole wire values [n, ...] from the receive buffer."""
        n = len(batch.tasks)
        stack = self.memory.gathered(g.group.index, wire.dtype, (n, *wire.shape), not batch.stacked)
        places = [g.places(Phase.GATHER, BufferUse.RECEIVE, name, wire) for name in batch.tasks]
        targets, sources = [], []
        if together := runs(places, wire.itemsize):
            for start, box, count in together:
                targets.append(replace(stack, index=(slice(None), *box.slices())))
                sources.append(g.view(Phase.GATHER, BufferUse.RECEIVE, start, wire.dtype, (count, *box.size)))
        else:
            for i, own in enumerate(places):
                for start, box in own:
                    targets.append(replace(stack, index=(slice(i, i + 1), *box.slices())))
                    sources.append(g.view(Phase.GATHER, BufferUse.RECEIVE, start, wire.dtype, (1, *box.size)))
        label = f"{where}_{wire.name}"
        with self.on(CALLER if self.stream == CALLER else PACK):
            whole = self.bind(f"{label}_whole", Views(tuple(targets)))
            self.copy(whole, self.bind(f"{label}_recv", Views(tuple(sources))), wire.dtype)
        if batch.stacked:
            return self.bind(f"{label}_stack", Whole(stack))
        return self.bind(f"{label}_list", Views(stack.rows()))

    def pack_computed(
        self,
        g: GroupView,
        phase: Phase,
        tasks: Sequence[str],
        wire: Wire,
        node: fx.Node,
        where: str,
        stacked: bool,
    ) -> None:
        """Copy the parts of a computed value into the send buffer of a phase."""
        places = [g.places(phase, BufferUse.SEND, name, wire) for name in tasks]
        views: list[View] = []
        index: list[tuple[Any, ...]] = []
        together = runs(places, wire.itemsize) if stacked else None
        if together:
            for start, box, count in together:
                views.append(g.view(phase, BufferUse.SEND, start, wire.dtype, (count, *box.size)))
                index.append((slice(None), *box.slices()))
        else:
            for i, own in enumerate(places):
                for start, box in own:
                    views.append(g.view(phase, BufferUse.SEND, start, wire.dtype, box.size))
                    index.append((i, *box.slices()))
        label = f"{where}_{wire.name}"
        found = self.call(program_ops.parts, node, self.bind(f"{label}_parts", Indices(tuple(index))))
        self.copy(self.bind(f"{label}_send", Views(tuple(views))), found, wire.dtype)

    def forward(self, g: GroupView) -> None:
        """Copy the fragments that owners in this replica computed into the send buffer of the exchange."""
        for i, segment in enumerate(g.segments):
            sends = segment.near and not segment.empty and segment.tasks[0].owner is not None
            for wire in segment.placed.scatter if sends else ():
                here = [g.places(Phase.SCATTER, BufferUse.RECEIVE, t.name, wire)[0] for t in segment.tasks]
                sources = tuple(g.view(Phase.SCATTER, BufferUse.RECEIVE, o, wire.dtype, b.size) for o, b in here)
                label = f"g{g.group.index}_s{i}_{wire.name}"
                for c, targets in enumerate(g.sends(Phase.EXCHANGE, segment, wire)):
                    sent = self.bind(f"{label}_forward{c}", targets)
                    self.copy(sent, self.bind(f"{label}_scattered", Views(sources)), wire.dtype)

    def commit_later(self, g: GroupView, placed: Placed, batch: Batch, values: Sequence[fx.Node], where: str) -> None:
        """Remember the new resident state of a batch. The micro-group's apply writes it."""
        for place, (name, node) in enumerate(zip(placed.owner_writes, values, strict=True)):
            if is_stacked(placed, batch, len(placed.scatter) + place):
                node = self.call(program_ops.unstack, node)
            value = outputs(placed.compute)[len(placed.scatter) + place].meta["val"]
            known = {leaf.name: leaf.dtype for leaf in (*placed.template.state, *placed.template.inputs)}
            target = self.leaf(placed, batch.param_group, batch.tasks, name, where)
            g.commits.append((target, node, known.get(name) or value.dtype, value.dtype))

    def apply(self, g: GroupView) -> None:
        last = next((p for p in (Phase.EXCHANGE, Phase.SCATTER) if p in g.exchanges), None)
        counting: list[tuple[TaskSegment, Callable[[str], fx.Node]]] = []
        for i, segment in enumerate(g.segments):
            placed = segment.placed
            where = f"g{g.group.index}_s{i}"
            wires: dict[str, fx.Node] = {}
            for j, wire in enumerate(placed.scatter):
                if last is not None and segment.tasks[0].owner is not None:
                    here = [g.received(last, t, wire) for t in segment.tasks]
                    views = tuple(g.view(last, BufferUse.RECEIVE, o, wire.dtype, b.size) for o, b in here)
                    wires[wire.name] = self.bind(f"{where}_{wire.name}_recv", Views(views))
                else:
                    wires[wire.name] = self.own_part(g, segment, wire, j, where)

            def build(placed: Placed = placed) -> fx.Graph:
                return lift_apply(placed.apply, placed.fragment_writes, placed.template.numbers, foreach=self.foreach)

            def lookup(
                name: str,
                i: int = i,
                wires: dict[str, fx.Node] = wires,
                segment: TaskSegment = segment,
                where: str = where,
            ) -> fx.Node:
                ready = wires.get(name) or g.wires.get((i, name))
                return ready or self.leaf(segment.placed, segment.group, segment.names, name, where)

            if self.kernels is not None and self.kernels.apply(g, i, segment, lookup):
                counting.append((segment, lookup))
            else:
                self.module(f"{placed.name}_apply", build, lookup)
        for target, value, to, given in g.commits:
            self.copy(target, value, to, given)
        self.launch(g, "apply")
        if self.kernels is not None:
            for counted, find in counting:
                self.kernels.counters(counted, find)

    def own_part(self, g: GroupView, segment: TaskSegment, wire: Wire, j: int, where: str) -> fx.Node:
        """This rank's fragments of a wire that this rank computed itself."""
        batch, results = g.results[segment.names[0]]
        boxes = [wire.box(t.layout.boxes[g.at[1]]) for t in segment.tasks]
        index = tuple((batch.tasks.index(t.name), *b.slices()) for t, b in zip(segment.tasks, boxes, strict=True))
        found = self.call(program_ops.parts, results[j], self.bind(f"{where}_{wire.name}_parts", Indices(index)))
        return self.call(program_ops.compact, found) if g.grid.shards > 1 and self.kernels is None else found
