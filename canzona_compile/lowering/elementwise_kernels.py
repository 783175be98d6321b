"""Write generated kernels into rank programs: decide which work of a micro-group shares a launch, and bind operands.

`Kernels` collects parts (the prepare graph of equal tasks, a list of copies) until `launch` writes one call for all of
them. Work for which no kernel can be generated stays in lifted torch graphs, and `Kernels.eager` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
        early: maps a kept value to a state leaf of which it is the new value and whose old value apply does not read.
            Prepare writes the new value into that leaf.
        openable: the dtypes that store the leaves that prepare may open itself, see `opened_by_prepare`.
    """

    apply: tuple[int, ...]
    early: dict[str, str]
    openable: dict[str, str]

    def opens(self, columns: Collection[int]) -> dict[str, str]:
        """The leaves that prepare opens of fragments with so many columns: codes are made of whole blocks."""
        whole = not any(n % storage.BLOCK for n in columns)
        return {name: dtype for name, dtype in self.openable.items() if whole or dtype != "int8"}


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
    return CutKernels(tuple(apply), early, opened_by_prepare(placed, early))


def opened_by_kernels(placed: Placed, columns: Collection[int]) -> dict[str, str]:
    """The stored leaves that prepare opens itself where kernels are generated, see `CutKernels.opens`."""
    kernel = kernel_of(placed) if placed.stored else ""
    return kernel.opens(columns) if isinstance(kernel, CutKernels) else {}


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


def opened_by_prepare(placed: Placed, early: Mapping[str, str]) -> dict[str, str]:
    """The stored leaves that prepare may read and write as they are stored, each with the dtype that stores it.

    They are on the device and of float32. Prepare writes their new values, and apply does nothing else with these: what
    is stored is not what it would read. Owners read wires, which have memory of their own.
    """
    dtypes = {leaf.name: leaf.dtype for leaf in placed.leaves}
    made = outputs(placed.apply)
    alone = {str(n.target) for n in placeholders(placed.apply) if len(n.users) == 1 and made.count(n) == 1}
    found = {name: placed.stored[name] for kept, name in early.items() if kept in alone and name in placed.stored}
    return {
        name: own.dtype for name, own in found.items() if own.dtype and not own.host and dtypes[name] is torch.float32
    }


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

    def opens(self, g: GroupView, segment: TaskSegment) -> dict[str, str]:
        """The stored leaves of a segment that prepare opens itself, each with the dtype that stores it."""
        kernel = self.of(segment)
        return kernel.opens({t.layout.boxes[g.at[1]].size[-1] for t in segment.tasks}) if kernel else {}

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
        opened = self.opens(g, segment)
        wanted: list[int] = []
        rounded: list[bool] = []
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
                wanted.append(n)
                rounded.append(not is_wire and opened.get(kernel.early.get(names[n], "")) == "bfloat16")
                targets.append(own)
                if not rounded[-1]:  # else a wire of the same name, which the owner reads, is not what is stored
                    g.wires[i, names[n]] = own[0]
        if wanted:
            lookup = lambda name: self._leaf(segment, name, where)  # noqa: E731
            made, reads = self._read(segment, placed.prepare, wanted, lookup, opened)
            by_leaf = {str(n.target): n.name for n in placeholders(placed.prepare)}
            made = opening(made, {by_leaf[leaf]: dtype for leaf, dtype in opened.items() if leaf in by_leaf}, rounded)
            self._add(segment, "prepare", placed.prepare, made, reads, targets, lookup)
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
            made, reads = self._read(segment, placed.apply, kernel.apply, lookup, {})
            self._add(segment, "apply", placed.apply, made, reads, targets, lookup)
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

    def _read(
        self,
        segment: TaskSegment,
        graph: fx.Graph,
        wanted: Sequence[int],
        lookup: Lookup,
        opened: Mapping[str, str],
    ) -> tuple[Expressions, list[fx.Node]]:
        """Some results of a graph, and the lists of tensors that they load: of codes, those and their scales."""
        made, placed = expressions(graph, wanted, segment.placed.template.shape), segment.placed
        leaves = {n.name: str(n.target) for n in placeholders(graph)}
        lists: list[fx.Node] = []
        for leaf in (leaves[load.name] for load in made.loads):
            own = lookup(leaf)
            if opened.get(leaf) == "int8":  # `own` is `storage.room(stored)`: this loads what `stored` holds
                lists += [self.program.call(storage.part, own.args[0], i) for i in range(2)]
            elif leaf in placed.template.numbers:
                lists.append(self.program.call(program_ops.repeated, own, len(segment.tasks)))
            else:
                lists.append(own)
        return made, lists

    def _add(
        self,
        segment: TaskSegment,
        stage: str,
        graph: fx.Graph,
        made: Expressions,
        reads: Sequence[fx.Node],
        targets: Sequence[Sequence[fx.Node]],
        lookup: Lookup,
    ) -> None:
        placed = segment.placed
        dtypes = tuple((dtype,) * len(own) for (_, dtype), own in zip(made.results, targets, strict=True))
        program = PointwiseProgram(f"{placed.name}_{stage}", made, dtypes)
        lists = (*reads, *(node for own in targets for node in own))
        self._parts.append((program, lists, self._numbers(placed, stage, graph, made, lookup)))

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
