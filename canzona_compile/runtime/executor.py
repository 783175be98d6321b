"""Run a rank program: own its memory and bind its inputs, and do nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from canzona_compile.compat.matmul_precision import put_back_on_error
from canzona_compile.ir.program import (
    Bytes,
    EagerTasks,
    Fragments,
    Group,
    Indices,
    Input,
    Program,
    Residents,
    ScalarInput,
    StreamSet,
    View,
    Views,
    Watcher,
    Whole,
)
from canzona_compile.ir.program_ops import EagerContext, EagerTask, Watch
from canzona_compile.ir.step import Role
from canzona_compile.ir.storage import Stored
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.cuda_graph import Replay
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.step_clock import StepClock
from canzona_compile.runtime.streams import streams_for
from canzona_compile.runtime.timed_program import TimedProgram


class Tensors(Protocol):
    """Where a program finds its tensors on each step."""

    def fragment(self, role: Role, leaf: str, task: str) -> Tensor | Stored:
        """This rank's fragment of a parameter, gradient or state leaf of a task."""

    def resident(self, leaf: str, task: str) -> Tensor | Stored:
        """The whole tensor of a state leaf, for a task that this rank owns."""


class Numbers(Protocol):
    """Where a program finds its hyperparameters on each step."""

    def number(self, template: str, label: int, name: str) -> Any:
        """The value of a hyperparameter on this step.

        Args:
            label: the index of the param group, or another number if the tasks of a param group read several values.
        """


@dataclass(frozen=True, eq=False, slots=True)
class Sources:
    """What the inputs of programs are bound to on this rank.

    Attributes:
        device: the device of parameters and buffers.
    """

    device: torch.device
    groups: Groups
    watch: Watch
    tensors: Tensors
    numbers: Numbers
    eager: EagerContext


class Executor:
    """One program, bound to memory.

    The program may share its memory with others, which never run at the same time. The executor makes all views of
    buffers once, and again when another program needs larger buffers. On each run it looks up only parameters,
    gradients, state and numbers.

    Args:
        cuda_graphs: whether the program may be recorded as a CUDA graph. It counts on CUDA only.
    """

    def __init__(self, program: Program, sources: Sources, memory: SharedSlots, cuda_graphs: bool = True) -> None:
        device = sources.device
        self.program, self.sources = program, sources
        self._shared = memory.of(program.slots, device)
        self.slots = [slot.memory for slot in self._shared]
        wanted = next((v for v in program.inputs.values() if isinstance(v, StreamSet)), None)
        self.streams = streams_for(wanted, device)
        self.replay: Replay | None = None
        self._timed: TimedProgram | None = None
        self._guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device.type == "cuda":
            self.replay = Replay(program, device, self.streams, wanted=cuda_graphs)
            self._guard = torch.cuda.device(device)
        self._arguments: list[Any] = []
        self._lookups: list[tuple[int, Callable[[], Any]]] = []
        for i, value in enumerate(program.inputs.values()):
            lookup = self._lookup(value)
            self._arguments.append(self._bound(value) if lookup is None else None)
            if lookup is not None:
                self._lookups.append((i, lookup))

    def follow(self) -> None:
        """Take the slots that have grown since, so that nothing holds what they were. Recordings of it are dropped."""
        grown = [slot.memory for slot in self._shared]
        if all(a is b for a, b in zip(grown, self.slots, strict=True)):
            return
        self.slots = grown
        for i, value in enumerate(self.program.inputs.values()):
            if isinstance(value, Views | Whole):
                self._arguments[i] = self._bound(value)
        if self.replay is not None:
            self.replay.moved()

    def arguments(self) -> list[Any]:
        """Look up the program's arguments for this step."""
        for i, lookup in self._lookups:
            self._arguments[i] = lookup()
        return self._arguments

    def run(self) -> None:
        """Run the program once. It writes parameters and state in place."""
        self._run(self.program.module if self.replay is None else self._replayed)

    def _replayed(self, *arguments: Any) -> None:
        assert self.replay is not None
        self.replay.run(arguments)

    def run_timed(self, clock: StepClock) -> None:
        """Run the program once, with a clock that notes when which act runs. On CUDA it runs call by call."""
        timed = self.timed()

        def launch(*arguments: Any) -> None:
            with self.streams.entered():
                timed.run(clock, arguments)

        self._run(launch)

    def _run(self, launch: Callable[..., None]) -> None:
        arguments = self.arguments()
        try:
            with torch.no_grad(), self._guard, put_back_on_error():
                launch(*arguments)
        finally:
            for i, _ in self._lookups:  # gradients must not stay alive between steps
                arguments[i] = None

    def timed(self) -> TimedProgram:
        """The program that runs with a clock, made on first use."""
        if self._timed is None:
            self._timed = TimedProgram(self.program)
        return self._timed

    @property
    def how(self) -> str:
        """How the program runs on its device, in words for reports."""
        return "call by call" if self.replay is None else self.replay.how

    def view(self, view: View) -> Tensor:
        """Make a view of this program's memory."""
        return view.of(self.slots)

    def _bound(self, value: Input) -> Any:
        """The argument for an input that is the same on every step."""
        sources = self.sources
        match value:
            case Views(views):
                return [self.view(v) for v in views]
            case Whole(view):
                return self.view(view)
            case Indices(index):
                return list(index)
            case Bytes(counts):
                return list(counts)
            case EagerTasks(tasks):
                return [EagerTask(name, sources.eager) for name in tasks]
            case Group(ranks):
                sources.groups.warm_up(ranks, sources.device, sources.watch)
                return sources.groups.of(ranks)
            case Watcher():
                return sources.watch
            case StreamSet():
                return self.streams
        raise AssertionError(value)

    def _lookup(self, value: Input) -> Callable[[], Any] | None:
        """The function that finds the argument for an input on each step; None if the argument never changes."""
        tensors, numbers = self.sources.tensors, self.sources.numbers
        match value:
            case Fragments(role, leaf, tasks):
                return lambda: [tensors.fragment(role, leaf, t) for t in tasks]
            case Residents(leaf, tasks):
                return lambda: [tensors.resident(leaf, t) for t in tasks]
            case ScalarInput(template, label, name):
                return lambda: numbers.number(template, label, name)
        return None
