"""Cut a rank program into stretches that can be recorded, and the calls between them.

A stretch is a run of calls on one stream. Between stretches stand the calls that connect streams and ranks: changes of
the stream, events, starts and ends of collectives. These are made again on every step, so each rank may decide by
itself whether it replays its stretches or runs them call by call: its peers see the same collectives in the same
order, and NCCL never waits for one that was recorded on one rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.ir import program_ops, storage
from canzona_compile.ir.program import Fragments, Program, Residents, ScalarInput
from canzona_compile.lowering.stream_sync import CALLER, LOOKS

# What is called again on every step.
CONNECTING = (
    program_ops.start_all_to_all,
    program_ops.start_meeting,
    program_ops.finish,
    program_ops.on_stream,
    program_ops.record,
    program_ops.wait,
    program_ops.keep,
)

# ATen operators that make the host wait for a value from the device. Families are given by the start of the name, and
# LAUNCHING has the exceptions, which launch kernels only.
WAITING = ("nonzero", "_local_scalar_dense", "item", "equal", "masked_select", "geqrf", "ormqr")
WAITING_FAMILIES = ("linalg_", "_linalg_", "unique", "_unique", "svd", "_svd", "cholesky")
LAUNCHING = frozenset({"linalg_vector_norm", "linalg_matrix_exp", "linalg_cross", "linalg_diagonal"})

OURS = (program_ops.__name__, storage.__name__)  # modules whose functions may be recorded


@dataclass(frozen=True, eq=False, slots=True)
class KernelCall:
    """A call of a generated kernel, which takes addresses and numbers from words.

    Attributes:
        operands: the lists of tensors among its operands that are inputs of the program: for each one, the index of
            the input, the part of the call, and the index of the list among those of the part.
        numbers: for each part that reads numbers, the graph that computes them on the host, and the inputs that it
            takes. None if any number comes from elsewhere.
    """

    kernel: GroupedKernel
    operands: tuple[tuple[int, int, int], ...]
    numbers: tuple[tuple[fx.GraphModule, tuple[int, ...]], ...] | None


@dataclass(frozen=True, eq=False, slots=True)
class ProgramStretch:
    """Calls of a program that run one after the other on one stream.

    Attributes:
        module: takes the values of `inputs` and returns a tuple of those of `outputs`.
        launches: whether any call gives the device something to do; the others only look at tensors.
        over: the values that nothing after this stretch reads. What `keep` names is never among them: so no other
            stretch of the program gets its memory. Other programs do: between programs, all streams wait for one
            another.
        kept: the program's inputs that anything else in it reads, by index: tensors, whose addresses a recording keeps,
            and numbers, which it keeps, too.
        obstacle: why it cannot be recorded, as far as its code shows; empty if nothing speaks against it.
    """

    module: fx.GraphModule
    stream: str
    launches: bool
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    over: tuple[fx.Node, ...]
    kernels: tuple[KernelCall, ...]
    kept: frozenset[int]
    obstacle: str

    def give(self, values: dict[fx.Node, Any], found: Sequence[Any]) -> None:
        """Add what it computed to the values of the program, and let go of what is over."""
        values.update(zip(self.outputs, found, strict=True))
        for node in self.over:
            values.pop(node, None)


class CutProgram:
    """A program as stretches and the calls between them."""

    def __init__(self, program: Program) -> None:
        self.placeholders = [n for n in program.module.graph.nodes if n.op == "placeholder"]
        self.parts = list(_Cutter(program).parts())
        self.stretches = [part for part in self.parts if isinstance(part, ProgramStretch)]

    def run(self, arguments: Sequence[Any], launch: Callable[[ProgramStretch, dict[fx.Node, Any]], None]) -> None:
        """Run the program once. Values that `keep` names are there until the end.

        Args:
            launch: runs a stretch, given the values so far, and adds to them what later calls need.
        """
        values = dict(zip(self.placeholders, arguments, strict=True))
        for part in self.parts:
            if isinstance(part, ProgramStretch):
                launch(part, values)
            elif part.target is not program_ops.keep:
                args, kwargs = fx.map_arg((part.args, part.kwargs), values.__getitem__)
                values[part] = part.target(*args, **kwargs)  # type: ignore[operator]


class _Cutter:
    """Cuts one program."""

    def __init__(self, program: Program) -> None:
        self.module, self.nodes = program.module, list(program.module.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        index = {name: i for i, name in enumerate(program.inputs)}
        moving = (Fragments, Residents)
        self.tensors = {n: index[n.name] for n in self.nodes if isinstance(program.inputs.get(n.name), moving)}
        self.numbers = {n: index[n.name] for n in self.nodes if isinstance(program.inputs.get(n.name), ScalarInput)}

    def parts(self) -> Iterator[ProgramStretch | fx.Node]:
        """The stretches and the calls between them, in order."""
        stream, calls = CALLER, list[fx.Node]()
        for node in self.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            if node.target not in CONNECTING:
                calls.append(node)
                continue
            if calls:
                yield self.stretch(stream, calls)
                calls = []
            yield node
            if node.target is program_ops.on_stream:
                stream = node.args[1]
        if calls:
            yield self.stretch(stream, calls)

    def stretch(self, stream: str, calls: list[fx.Node]) -> ProgramStretch:
        """Make a stretch of some calls that follow each other."""
        own = set(calls)
        used = dict.fromkeys(n for call in calls for n in call.all_input_nodes if n not in own)
        inputs = tuple(n for n in used if n.op != "get_attr")
        outputs = tuple(c for c in calls if any(user not in own for user in c.users))
        graph = fx.Graph()
        new = {n: graph.placeholder(n.name) for n in inputs}
        new |= {n: graph.get_attr(str(n.target)) for n in used if n.op == "get_attr"}
        for call in calls:
            new[call] = graph.node_copy(call, new.__getitem__)
        graph.output(tuple(new[n] for n in outputs))
        last = self.order[calls[-1]]
        ended = (n for n in dict.fromkeys((*inputs, *outputs)) if n.op != "placeholder")
        over = tuple(n for n in ended if all(self.order[user] <= last for user in n.users))
        launches = any(call.target not in LOOKS for call in calls)
        kernels = {call: kernel for call in calls if (kernel := self.kernel_of(call)) is not None}
        others = [call for call in calls if call not in kernels and not self.serves_kernels(call)]
        bound = self.tensors | self.numbers
        kept = {bound[n] for call in others for n in call.all_input_nodes if n in bound}
        module = fx.GraphModule(self.module, graph, class_name="Stretch")
        found = tuple(self.kernel_call(call, kernel) for call, kernel in kernels.items())
        why = obstacle(module)
        if any(own.numbers is None for own in found):
            why = "numbers of its kernels are computed on the device"
        return ProgramStretch(module, stream, launches, inputs, outputs, over, found, frozenset(kept), why)

    def kernel_of(self, node: fx.Node) -> GroupedKernel | None:
        """The generated kernel that a node calls; None if it calls something else."""
        called = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        return called if isinstance(called, GroupedKernel) else None

    def serves_kernels(self, node: fx.Node) -> bool:
        """Whether a node computes numbers on the host, and for generated kernels only."""
        return self.counted(node) is not None and any(node is own for user in node.users for _, own in parts_of(user))

    def counted(self, node: fx.Node) -> tuple[fx.GraphModule, tuple[int, ...]] | None:
        """The graph that computes numbers from hyperparameters alone, and the inputs that it takes; None if a node
        calls nothing like that."""
        called = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        found = tuple(self.numbers[arg] for arg in node.args if isinstance(arg, fx.Node) and arg in self.numbers)
        return (called, found) if isinstance(called, fx.GraphModule) and len(found) == len(node.args) else None

    def kernel_call(self, node: fx.Node, kernel: GroupedKernel) -> KernelCall:
        """Find what a call of a generated kernel reads."""
        operands, numbers = list[tuple[int, int, int]](), list[Any]()
        for part, (lists, own) in enumerate(parts_of(node)):
            operands += [(self.tensors[n], part, i) for i, n in enumerate(lists) if n in self.tensors]
            numbers += [self.counted(own)] if isinstance(own, fx.Node) else []
        return KernelCall(kernel, tuple(operands), None if None in numbers else tuple(numbers))


def parts_of(node: fx.Node) -> list[tuple[tuple[Any, ...], Any]]:
    """The parts of a call of a generated kernel: lists of tensors, and the node of their numbers. Others have none."""
    return [part for part in node.args if isinstance(part, tuple) and len(part) == 2]  # type: ignore[misc]


def obstacle(module: fx.GraphModule) -> str:
    """Why some calls cannot be recorded, as far as their code shows; empty if nothing speaks against it."""
    for own in module.modules():
        if not isinstance(own, fx.GraphModule | GroupedKernel):
            return f"it calls {type(own).__name__}, which may not be recorded"
    for target in targets(module):
        if why := obstacle_in(target):
            return why
    return ""


def targets(module: fx.GraphModule) -> Iterator[Any]:
    """Every function that a program calls, directly or for each of several tasks."""
    for own in module.modules():
        for node in own.graph.nodes if isinstance(own, fx.GraphModule) else ():
            if node.op == "call_function":
                yield node.target
                if node.target is program_ops.each and not isinstance(node.args[0], fx.Node):
                    yield node.args[0]


def obstacle_in(target: Any) -> str:
    """Why a call cannot be recorded; empty if it can."""
    if isinstance(target, OpOverload):
        name = target._schema.name.partition("::")[2]
        waits = name in WAITING or name.startswith(WAITING_FAMILIES)
        return f"{name} makes the host wait" if waits and name not in LAUNCHING else ""
    home = str(getattr(target, "__module__", ""))
    ours = home in OURS or home.partition(".")[0] in ("_operator", "builtins", "math", "torch")
    return "" if ours else f"it calls {getattr(target, '__name__', type(target).__name__)}, which may not be recorded"
