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

from canzona_compile.ir import program_ops
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


@dataclass(frozen=True, eq=False, slots=True)
class ProgramStretch:
    """Calls of a program that run one after the other on one stream.

    Attributes:
        module: takes the values of `inputs` and returns a tuple of those of `outputs`.
        stream: the name of the stream.
        launches: whether any call gives the device something to do; the others only look at tensors.
        inputs: the values that it reads.
        outputs: the values that later calls read.
        over: the values that nothing after this stretch reads. What `keep` names is never among them: so no other
            stretch of the program gets its memory. Other programs do: between programs, all streams wait for one
            another.
    """

    module: fx.GraphModule
    stream: str
    launches: bool
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    over: tuple[fx.Node, ...]


# Runs a stretch on the values of its inputs, and returns those of its outputs.
RunStretch = Callable[[ProgramStretch, Sequence[Any]], Sequence[Any]]
Connect = Callable[[fx.Node, dict[fx.Node, Any]], Any]


def called(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The result of a call between stretches."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    return target(*args, **kwargs)


class CutProgram:
    """A program as stretches and the calls between them.

    Args:
        module: the program.

    Attributes:
        parts: the stretches and the calls, in order.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.parts = list(_parts(module))

    def run(self, arguments: Sequence[Any], launch: RunStretch, call: Connect = called) -> None:
        """Run the program once.

        Args:
            arguments: one per placeholder.
            launch: runs a stretch.
            call: makes a call between stretches, given the values so far.
        """
        values = dict(zip(self.placeholders, arguments, strict=True))
        for part in self.parts:
            if isinstance(part, fx.Node):
                values[part] = call(part, values)
                continue
            values.update(zip(part.outputs, launch(part, [values[n] for n in part.inputs]), strict=True))
            for node in part.over:
                del values[node]

    def replay(self, arguments: Sequence[Any], replays: Sequence[Callable[[], None] | None]) -> None:
        """Run the program with recordings in the place of its stretches.

        Args:
            arguments: one per placeholder.
            replays: for each stretch, what replays it; None for one that launches nothing.
        """
        values = dict(zip(self.placeholders, arguments, strict=True))
        following = iter(replays)
        for part in self.parts:
            if isinstance(part, ProgramStretch):
                replay = next(following)
                if replay is not None:
                    replay()
            elif part.target is not program_ops.keep:  # what is recorded has memory of its own
                values[part] = called(part, values)


def _parts(module: fx.GraphModule) -> Iterator[ProgramStretch | fx.Node]:
    """Cut a program."""
    stream, calls = CALLER, list[fx.Node]()
    found: list[tuple[str, list[fx.Node]] | fx.Node] = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target not in CONNECTING:
            calls.append(node)
            continue
        if calls:
            found.append((stream, calls))
            calls = []
        found.append(node)
        if node.target is program_ops.on_stream:
            stream = node.args[1]
    if calls:
        found.append((stream, calls))
    order = {n: i for i, n in enumerate(module.graph.nodes)}
    for part in found:
        yield part if isinstance(part, fx.Node) else _stretch(module, *part, order)


def _stretch(module: fx.GraphModule, stream: str, calls: list[fx.Node], order: dict[fx.Node, int]) -> ProgramStretch:
    """Make a stretch of some calls that follow each other.

    Args:
        module: the program.
        stream: the stream of the calls.
        calls: the calls.
        order: by node of the program, its place in it.
    """
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
    last = order[calls[-1]]
    ended = (n for n in dict.fromkeys((*inputs, *outputs)) if n.op != "placeholder")
    over = tuple(n for n in ended if all(order[user] <= last for user in n.users))
    launches = any(call.target not in LOOKS for call in calls)
    return ProgramStretch(fx.GraphModule(module, graph, class_name="Stretch"), stream, launches, inputs, outputs, over)
