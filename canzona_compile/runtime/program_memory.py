"""Predict the memory of a rank program: run it on fake tensors, and count the bytes that are alive.

Nothing is computed. Fake tensors have sizes and no values, so this works for programs of any size and device, and for
those of other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.compat.torch_private import FakeTensorMode, TorchDispatchMode
from canzona_compile.ir import program_ops
from canzona_compile.ir.program import (
    Bytes,
    EagerTasks,
    Fragments,
    Indices,
    Input,
    Residents,
    ScalarInput,
    Views,
    Whole,
)
from canzona_compile.ir.step import Role, Step
from canzona_compile.runtime.stretches import CONNECTING, CutProgram, ProgramStretch

BLOCK = 512  # bytes: torch's CUDA allocator rounds every tensor up to a multiple of it
NUMBER = 0.5  # stands for every hyperparameter; sizes do not depend on them


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """The bytes that a program needs on its rank beside parameters, gradients and state.

    Attributes:
        buffers: of its send, receive and gathered buffers, which stay between steps.
        values: the most bytes of computed values that are alive at one time. A program that runs call by call gives
            them back; recorded CUDA graphs keep them.
    """

    buffers: int
    values: int


def memory_of(step: Step, rank: int, recorded: bool) -> ProgramMemory:
    """Predict the memory of the program of an emitted step.

    Scratch memory of libraries, within one operator, is not counted.

    Args:
        step: a step of form EMITTED.
        rank: the global rank that the program is for.
        recorded: whether the program is recorded as CUDA graphs; then values that cross streams are never freed.

    Raises:
        ValueError: the optimizer's own code runs in the program.
    """
    program = step.program
    if any(isinstance(value, EagerTasks) for value in program.inputs.values()):
        raise ValueError("the optimizer's own code runs in the program, which nothing predicts")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        arguments = ProgramTensors(step, rank)
        given = [arguments.of(value) for value in program.inputs.values()]
        with LiveBytes(given) as live:
            if recorded:
                CutProgram(program.module).run(given, launched, lambda node, values: None)
            else:
                FakeWalk(program.module).run(*given)
    return ProgramMemory(sum(program.slots), live.most)


class ProgramTensors:
    """Tensors and numbers for the inputs of a program, of the right shapes and dtypes; their values mean nothing.

    Args:
        step: a step of form EMITTED.
        rank: the global rank that the program is for.
    """

    def __init__(self, step: Step, rank: int) -> None:
        self.step, self.rank = step, rank
        self.slots = [torch.zeros(size, dtype=torch.uint8) for size in step.program.slots]
        self._leaves: dict[tuple[str, str], Tensor] = {}

    def of(self, value: Input) -> Any:
        """The argument for an input; None for process groups and what waits for them."""
        match value:
            case Views(views):
                return [v.of(self.slots) for v in views]
            case Whole(view):
                return view.of(self.slots)
            case Indices(index):
                return list(index)
            case Bytes(counts):
                return list(counts)
            case Fragments(_, leaf, tasks):
                return [self.leaf(leaf, task, whole=False) for task in tasks]
            case Residents(leaf, tasks):
                return [self.leaf(leaf, task, whole=True) for task in tasks]
            case ScalarInput():
                return NUMBER
        return None

    def leaf(self, name: str, task: str, whole: bool) -> Tensor:
        """Make a leaf of a task: this rank's fragment of it, or all of it.

        Args:
            name: the name of the leaf.
            task: the name of the task.
            whole: whether to make all of it.
        """
        if (task, name) not in self._leaves:
            own = self.step.task(task)
            placed = self.step.placed_of(own)
            leaf = next(n for n in (*placed.template.state, *placed.template.inputs) if n.name == name)
            box = own.layout.boxes[own.layout.grid.find(self.rank)[1]]
            shape = box.size if leaf.shape == own.shape and not whole else leaf.shape
            made = torch.ones(shape, dtype=leaf.dtype)
            if leaf.role is Role.STATE and len(shape) == 2 and shape[0] == shape[1]:
                made = torch.eye(shape[0], dtype=leaf.dtype)  # what decompositions take
            self._leaves[task, name] = made
        return self._leaves[task, name]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make and something still holds.

    Args:
        given: tensors that were there before, nested in lists. They are not counted.

    Attributes:
        most: the most bytes at one time so far.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known = {t.untyped_storage()._cdata for t in program_ops.tensors_in(list(given))}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in program_ops.tensors_in(result):
            self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class FakeWalk(fx.Interpreter):
    """Runs what computes in a program, and neither collectives nor generated kernels, which make no tensors."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result if n.users or n.op == "output" else None  # `Interpreter` would keep it

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None if target in CONNECTING else super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        kernel = isinstance(self.fetch_attr(target), GroupedKernel)
        return None if kernel else super().call_module(target, args, kwargs)


def launched(stretch: ProgramStretch, inputs: Sequence[Any]) -> Sequence[Any]:
    """Run a stretch as `FakeWalk` does."""
    found: Sequence[Any] = FakeWalk(stretch.module).run(*inputs)
    return found
