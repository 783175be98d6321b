"""Runs a rank program: owns its memory, binds its inputs, nothing else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from canzona_compile.ir.program import (
    Bytes,
    Fragments,
    Group,
    Indices,
    Input,
    Names,
    Number,
    Program,
    Residents,
    StreamSet,
    View,
    Views,
    Watcher,
    Whole,
)
from canzona_compile.ir.program_ops import Watch
from canzona_compile.ir.step import Role
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.cuda_graph import Replay
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.streams import streams_for


class Tensors(Protocol):
    """Where a program's tensors and numbers come from on each step."""

    def fragment(self, role: Role, leaf: str, task: str) -> Tensor: ...
    def resident(self, leaf: str, task: str) -> Tensor: ...
    def number_of(self, template: str, group: int, name: str) -> Any: ...


class Executor:
    """One program, bound to memory, which it may share with others that do not run meanwhile.

    All views of buffers are made here once. On each run only parameters, gradients, state
    and numbers are looked up.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        groups: Groups,
        watch: Watch,
        tensors: Tensors,
        memory: SharedSlots,
        cuda_graphs: bool = True,
    ) -> None:
        self.program, self.tensors, self.watch = program, tensors, watch
        self.slots = memory.of(program.slots, device)
        wanted = next((v for v in program.inputs.values() if isinstance(v, StreamSet)), None)
        self.streams = streams_for(wanted, device)
        self.replay: Replay | None = None
        self._guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device.type == "cuda":
            self.replay = Replay(program, device, self.streams.entered, wanted=cuda_graphs)
            self._guard = torch.cuda.device(device)
        self._arguments: list[Any] = []
        self._lookups: list[tuple[int, Callable[[], Any]]] = []
        for i, value in enumerate(program.inputs.values()):
            lookup = self._lookup(value)
            self._arguments.append(self._bound(value, groups, device) if lookup is None else None)
            if lookup is not None:
                self._lookups.append((i, lookup))

    def arguments(self) -> list[Any]:
        """What the program takes on this step."""
        for i, lookup in self._lookups:
            self._arguments[i] = lookup()
        return self._arguments

    def run(self) -> None:
        """Run the program once. Parameters and state are written in place."""
        arguments = self.arguments()
        try:
            with torch.no_grad(), self._guard:
                if self.replay is None:
                    self.program.module(*arguments)
                else:
                    self.replay.run(arguments)
        finally:
            for i, _ in self._lookups:  # do not keep gradients alive between steps
                arguments[i] = None

    @property
    def how(self) -> str:
        """How the program runs on its device, in words."""
        return "call by call" if self.replay is None else self.replay.how

    def view(self, view: View) -> Tensor:
        size = math.prod(view.shape) * view.dtype.itemsize
        whole = self.slots[view.slot][view.offset : view.offset + size].view(view.dtype).view(view.shape)
        return whole if view.index is None else whole[view.index]

    def _bound(self, value: Input, groups: Groups, device: torch.device) -> Any:
        match value:
            case Views(views):
                return [self.view(v) for v in views]
            case Whole(view):
                return self.view(view)
            case Indices(index):
                return list(index)
            case Bytes(counts):
                return list(counts)
            case Names(tasks):
                return list(tasks)
            case Group(ranks):
                groups.warm_up(ranks, device)
                return groups.of(ranks)
            case Watcher():
                return self.watch
            case StreamSet():
                return self.streams
        raise AssertionError(value)

    def _lookup(self, value: Input) -> Callable[[], Any] | None:
        tensors = self.tensors
        match value:
            case Fragments(role, leaf, tasks):
                return lambda: [tensors.fragment(role, leaf, t) for t in tasks]
            case Residents(leaf, tasks):
                return lambda: [tensors.resident(leaf, t) for t in tasks]
            case Number(template, group, name):
                return lambda: tensors.number_of(template, group, name)
        return None
