"""Write generated kernels into rank programs: decide which work of a micro-group shares a launch, and bind operands.

`Kernels` collects parts (the prepare graph of equal tasks, a list of copies) until `launch` writes one call for all of
them. Work for which no kernel can be generated stays in lifted torch graphs, and `Kernels.eager` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.codegen.source import Expressions, PointwiseProgram, copying, expressions, opening
from canzona_compile.codegen.values import Unsupported
from canzona_compile.ir import program_ops, storage
from canzona_compile.ir.fx_utils import outputs, placeholders, subgraph, tensor_value
from canzona_compile.ir.program import Views, Whole
from canzona_compile.ir.step import Phase, Placed, Role
from canzona_compile.lowering.batch_graph import lift_apply
from canzona_compile.lowering.builder import ProgramBuilder
from canzona_compile.lowering.rank_view import GroupView, TaskSegment

Lookup = Callable[[str], fx.Node]


@dataclass(frozen=True, eq=False, slots=True)
class CutKernels:
    """How generated kernels run a cut.

    Attributes:
        apply: positions of the results of apply that kernels write. The other results are written early or are 0-d
            counters. torch writes the counters, because all blocks of a kernel may read them.
        early: maps a kept value to a state leaf of which it is the new value and which apply does not read. Prepare
            writes the value into that leaf.
    """

    apply: tuple[int, ...]
    early: dict[str, str]


def kernel_of(placed: Placed) -> CutKernels | str:
    """How generated kernels run a cut, or the reason why they cannot."""
    shape = placed.template.shape
    early = early_commits(placed)
    apply = []
    for i, node in enumerate(outputs(placed.apply)):
        value = tensor_value(node) if isinstance(node, fx.Node) else None
        if value is None:
            return f"new {placed.fragment_writes[i]} is not a tensor"
        if tuple(value.shape) == shape:
            apply += [] if early.get(getattr(node, "target", "")) == placed.fragment_writes[i] else [i]
        elif value.ndim:
            return f"new {placed.fragment_writes[i]} has another shape than its matrix"
    try:
        one_device(placed)
        expressions(placed.prepare, range(len(outputs(placed.prepare))), shape)
        expressions(placed.apply, apply, shape)
    except Unsupported as why:
        return str(why)
    return CutKernels(tuple(apply), early)


def one_device(placed: Placed) -> None:
    """Check that all tensors of a cut are on one device.

    Counters of torch's optimizers, for example, may be on the CPU. The check includes 0-d CPU tensors that a graph
    makes itself: beside CUDA tensors, ATen treats them as numbers, which it rounds in another way than tensors.
    """
    nodes = (*placed.prepare.nodes, *placed.apply.nodes)
    kinds = {v.device.type for n in nodes if (v := tensor_value(n)) is not None}
    if len(kinds) > 1:
        raise Unsupported(f"tensors on {' and '.join(sorted(kinds))}")


def early_commits(placed: Placed) -> dict[str, str]:
    """The kept values that prepare may write into a state leaf, each with the name of that leaf (see `CutKernels`)."""
    read = {str(n.target) for n in placeholders(placed.apply) if n.users}
    state = {leaf.name: leaf for leaf in placed.template.state}
    state |= {leaf.name: leaf for leaf in placed.template.inputs if leaf.role is Role.STATE}
    found: dict[str, str] = {}
    for name, node in zip(placed.fragment_writes, outputs(placed.apply), strict=True):
        kept = str(node.target) if isinstance(node, fx.Node) and node.op == "placeholder" else ""
        value = tensor_value(node) if kept else None
        fits = (
            value is not None and name in state and (state[name].dtype, state[name].shape) == (value.dtype, value.shape)
        )
        if kept in placed.kept and kept not in found and fits and name not in read:
            found[kept] = name
    return found


class Kernels:
    """Writes the generated kernels of a rank program."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program, self.step = program, program.step
        self.eager: dict[str, str] = {}
        self._made: dict[str, CutKernels | None] = {}
        self._numbered: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        self._parts: list[tuple[PointwiseProgram, tuple[fx.Node, ...], fx.Node | tuple[()]]] = []

    def of(self, segment: TaskSegment) -> CutKernels | None:
        """The kernels of a segment's cut; None if torch runs the segment, as it does if the fragments are empty."""
        placed = segment.placed
        if placed.name not in self._made:
            made = kernel_of(placed)
            if isinstance(made, str):
                self.eager[placed.name] = made
            self._made[placed.name] = made if isinstance(made, CutKernels) else None
        return None if segment.empty else self._made[placed.name]

    def opens(self, g: GroupView, segment: TaskSegment, name: str) -> bool:
        """Whether prepare reads a stored leaf as it is stored: one on the device, of which it writes new values."""
        kernel, kept = self.of(segment), segment.placed.stored[name]
        dtypes = [leaf.dtype for leaf in segment.placed.leaves if leaf.name == name]
        if kernel is None or kept.host or dtypes != [torch.float32] or name not in kernel.early.values():
            return False
        columns = {task.layout.boxes[g.at[1]].size[-1] for task in segment.tasks}
        return kept.dtype != "int8" or not any(n % storage.BLOCK for n in columns)

    # -- stages --------------------------------------------------------------------------------------

    def prepare(self, g: GroupView, i: int, segment: TaskSegment) -> bool:
        """Add the prepare graph of a segment to the next launch.

        Returns:
            False if torch has to run the graph.
        """
        kernel, placed = self.of(segment), segment.placed
        if kernel is None:
            return False
        where = f"g{g.group.index}_s{i}"
        packs = segment.near and Phase.GATHER in g.exchanges
        names = [w.name for w in placed.gather] + list(placed.kept)
        wanted: list[int] = []
        targets: list[list[fx.Node]] = []
        for n, node in enumerate(outputs(placed.prepare)):
            is_wire = n < len(placed.gather)
            if is_wire and not segment.near:
                continue
            if is_wire and packs:
                own = self._send_places(g, segment, n, f"{where}_{names[n]}_send")
            elif names[n] in kernel.early and not is_wire:
                own = [self._leaf(segment, kernel.early[names[n]], where)]
            elif node.op == "placeholder" and str(node.target) not in placed.fragment_writes:
                # The leaf itself is the wire. A leaf that a kernel will write is copied instead, because the owner
                # may make a transposed view of it.
                g.wires[i, names[n]] = self._leaf(segment, str(node.target), where)
                continue
            else:
                own = [self._prepared(g, i, names[n], node)]
            if own:
                g.wires[i, names[n]] = own[0]
                wanted.append(n)
                targets.append(own)
        if wanted:
            self._add(segment, "prepare", placed.prepare, wanted, targets, lambda n: self._leaf(segment, n, where))
        return True

    def apply(self, g: GroupView, i: int, segment: TaskSegment, lookup: Lookup) -> bool:
        """Add the apply graph of a segment to the next launch.

        Returns:
            False if torch has to run the graph.
        """
        kernel, placed = self.of(segment), segment.placed
        if kernel is None:
            return False
        where = f"g{g.group.index}_s{i}"
        if kernel.apply:
            targets = [[self._leaf(segment, placed.fragment_writes[n], where)] for n in kernel.apply]
            self._add(segment, "apply", placed.apply, kernel.apply, targets, lookup)
        return True

    def counters(self, segment: TaskSegment, lookup: Lookup) -> None:
        """Let torch write the 0-d state of a segment, after the kernel that may read it."""
        kernel, placed = self.of(segment), segment.placed
        if kernel is None:
            return
        small = [
            n
            for n, name in enumerate(placed.fragment_writes)
            if n not in kernel.apply and name not in kernel.early.values()
        ]
        if small:
            part = subgraph(placed.apply, [], [outputs(placed.apply)[n] for n in small])
            writes = [placed.fragment_writes[n] for n in small]
            build = lambda: lift_apply(part, writes, placed.template.numbers, foreach=False)  # noqa: E731
            self.program.module(f"{placed.name}_counters", build, lookup)

    def copy(self, targets: fx.Node, sources: fx.Node, to: torch.dtype, given: torch.dtype) -> None:
        """Add copies to the next launch, from tensors of dtype `given` to tensors of dtype `to`."""
        try:
            program = PointwiseProgram("copy", copying(given, to), ((to,),))
        except Unsupported:
            self.program.call(program_ops.copy, targets, sources)
            return
        self._parts.append((program, (sources, targets), ()))

    def launch(self, name: str) -> None:
        """Write one call, named `name`, for all parts that were added since the last one."""
        if not self._parts:
            return
        programs: dict[str, PointwiseProgram] = {}
        for program, _, _ in self._parts:
            programs.setdefault(program.key, program)
        order = list(programs)
        module = GroupedKernel(
            f"{name.replace('_', ' ')} of {self.step.optimizer}, one launch",
            list(programs.values()),
            [order.index(program.key) for program, _, _ in self._parts],
        )
        self.program.root.add_module(name, module)
        parts = tuple((lists, numbers) for _, lists, numbers in self._parts)
        call = self.program.placed(self.program.graph.call_module(name, parts))
        self.program.written[call] = [n for program, lists, _ in self._parts for n in lists[program.reads :]]
        self._parts = []

    # -- operands ------------------------------------------------------------------------------------

    def _add(
        self,
        segment: TaskSegment,
        stage: str,
        graph: fx.Graph,
        wanted: Sequence[int],
        targets: Sequence[Sequence[fx.Node]],
        lookup: Lookup,
    ) -> None:
        placed = segment.placed
        by_name = {n.name: n for n in graph.nodes}
        made = expressions(graph, wanted, placed.template.shape)
        found = {load.name: lookup(str(by_name[load.name].target)) for load in made.loads}
        codes = {name: node.args[0] for name, node in found.items() if node.target is storage.room}
        halves = [name for name, node in found.items() if node.target is storage.part]
        made = opening(made, codes, halves, [own[0].target is storage.part for own in targets])
        dtypes = tuple((dtype,) * len(own) for (_, dtype), own in zip(made.results, targets, strict=True))
        program = PointwiseProgram(f"{placed.name}_{stage}", made, dtypes)

        def operands(name: str) -> list[fx.Node]:
            if name in codes:
                return [self.program.call(storage.part, codes[name], i) for i in range(2)]
            single = str(by_name[name].target) in placed.template.numbers
            return [self.program.call(program_ops.repeated, found[name], len(segment.tasks)) if single else found[name]]

        lists = [node for name in found for node in operands(name)]
        lists += [node for own in targets for node in own]
        self._parts.append((program, tuple(lists), self._numbers(placed, stage, graph, made, lookup)))

    def _numbers(
        self, placed: Placed, stage: str, graph: fx.Graph, made: Expressions, lookup: Lookup
    ) -> fx.Node | tuple[()]:
        """Write the graph that computes a kernel's numbers from hyperparameters on the host."""
        if not made.numbers:
            return ()
        names = tuple(number.source for number in made.numbers)
        known = self._numbered.setdefault((placed.name, stage), [])  # segments without wires need other numbers
        if names not in known:
            known.append(names)
        label = f"{placed.name}_{stage}_numbers{known.index(names) or ''}"
        return self.program.module(label, lambda: numbers_of(graph, names), lookup)

    def _leaf(self, segment: TaskSegment, name: str, where: str) -> fx.Node:
        return self.program.leaf(segment.placed, segment.group, segment.names, name, where)

    def _send_places(self, g: GroupView, segment: TaskSegment, n: int, label: str) -> list[fx.Node]:
        """For each place of a wire in the send buffer, the placeholder of a list of views, one per task."""
        places = enumerate(g.sends(Phase.GATHER, segment, segment.placed.gather[n]))
        return [self.program.bind(f"{label}{c}", views) for c, views in places]

    def _prepared(self, g: GroupView, i: int, name: str, node: fx.Node) -> fx.Node:
        """Memory of the program for a prepared value that this rank itself uses: one stack, if compute takes one."""
        value, segment = tensor_value(node), g.segments[i]
        assert value is not None
        sizes = [task.layout.boxes[g.at[1]].size for task in segment.tasks]
        label, stacked = f"g{g.group.index}_s{i}_{name}", segment.placed.stacked
        if stacked and name in stacked.inputs and any(b.stacked and b.tasks == segment.names for b in g.group.batches):
            stack = g.memory.prepared(g.group.index, value.dtype, (len(sizes), *sizes[0]))
            g.stacks[i, name] = self.program.bind(f"{label}_stack", Whole(stack))
            return self.program.bind(f"{label}_prepared", Views(stack.rows()))
        views = tuple(g.memory.prepared(g.group.index, value.dtype, size) for size in sizes)
        return self.program.bind(f"{label}_prepared", Views(views))


def numbers_of(graph: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """The part of a graph that computes the numbers of these nodes."""
    by_name = {n.name: n for n in graph.nodes}
    return subgraph(graph, [], [by_name[name] for name in names])
