"""A rank program with calls that tell a clock which act of the schedule runs.

It makes the calls of the program in the same order, on the same streams. On CUDA it is never recorded: events in a
recording cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from canzona_compile.ir import program_ops
from canzona_compile.ir.program import Program
from canzona_compile.ir.step import Act
from canzona_compile.lowering.stream_sync import CALLER, COMPUTE, LOOKS, computes
from canzona_compile.runtime.step_clock import OTHER, StepClock

CLOCK = "canzona_step_clock"  # the placeholder
WAIT = "wait stream"  # the act of waiting for another stream


def turn(clock: StepClock, act: str, group: int, lane: str) -> None:
    """Tell the clock what the current stream does from now on."""
    clock.turn(act, group, lane)


class TimedProgram:
    """A program that runs with a clock."""

    def __init__(self, program: Program) -> None:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        clock = graph.placeholder(CLOCK)
        before = dict(turns(program))
        for node in program.module.graph.nodes:
            for act, group, lane in before.get(node, ()):
                graph.call_function(turn, (clock, act, group, lane))
            copies[node] = graph.node_copy(node, copies.__getitem__)
        self.module = fx.GraphModule(program.module, graph, class_name="TimedProgram")

    def run(self, clock: StepClock, arguments: Sequence[Any]) -> None:
        """Run the program once."""
        with clock.during(OTHER):
            self.module(clock, *arguments)


def turns(program: Program) -> Iterator[tuple[fx.Node, list[tuple[str, int, str]]]]:
    """Find what a clock has to be told before the calls of a program.

    Yields:
        A call, and the turns before it: act, micro-group and lane. An empty act ends what a lane does.
    """
    nodes = list(program.module.graph.nodes)
    following: dict[fx.Node, tuple[str, int]] = {}  # by call, its event or that of the next call that has one
    upcoming = ("", -1)
    for node in reversed(nodes):
        event = program.events.get(node.name)
        upcoming = upcoming if event is None else (str(event.act), event.micro_group)
        following[node] = upcoming
    lane, present = COMPUTE, ("", -1)
    recorded: dict[object, str] = {}  # by event, the lane that records it
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.op == "output":
            yield node, [(OTHER, -1, lane)]
            continue
        if node.target is program_ops.on_stream:
            yield node, [("", -1, lane)]
            present = ("", -1)
            lane = COMPUTE if node.args[1] in (CALLER, COMPUTE) else str(node.args[1])
            continue
        if node.target is program_ops.record:
            recorded[node.args[1]] = lane
            continue
        if node.target is program_ops.wait:
            own = recorded[node.args[1]]
            beside = lane == COMPUTE != own and computes(own)
            wanted = (str(Act.COMPUTE) if beside else WAIT, following[node][1])
        elif node.name in program.events and node.target not in LOOKS:
            wanted = following[node]
        else:  # it does nothing on a device, or ends what goes on
            continue
        if wanted != present:
            yield node, [(*wanted, lane)]
            present = wanted
