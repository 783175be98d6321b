"""Predict the memory of a rank program: run it on fake tensors, and count the bytes that are alive.

Nothing is computed. Fake tensors have sizes and no values, so this works for programs of any size and device, and for
those of other ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.codegen.step_words import StepWords
from canzona_compile.compat.torch_private import FakeTensorMode, TorchDispatchMode
from canzona_compile.ir import program_ops
from canzona_compile.ir.fx_utils import placeholders
from canzona_compile.ir.program import (
    Bytes,
    EagerTasks,
    Fragments,
    Indices,
    Input,
    Program,
    Residents,
    ScalarInput,
    Views,
    Whole,
)
from canzona_compile.ir.step import Role, Step
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM
from canzona_compile.lowering.stream_sync import COMPUTE
from canzona_compile.runtime.device_scalars import DeviceProgram
from canzona_compile.runtime.graph_recorder import work_stream
from canzona_compile.runtime.scalar_ops import FORMS, DeviceNumber, each_numbered
from canzona_compile.runtime.stretches import CONNECTING, CutProgram, ProgramStretch

BLOCK = 512  # bytes: torch's CUDA allocator rounds every tensor up to a multiple of it
NUMBER = 0.5  # stands for every hyperparameter; sizes do not depend on them


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """The bytes that a program needs on its rank in addition to parameters, gradients, state and buffers.

    Attributes:
        values: the most bytes of computed values that are alive at one time while it runs call by call. It gives them
            back.
        pool: by stream, the most bytes that its recordings take of the pool of all recordings. They keep them, and
            memory of one stream serves no other one. Empty if it is not recorded.
        tables: of the tables of its generated kernels, and of numbers that lie on the device, which stay.
    """

    values: int
    pool: Mapping[str, int]
    tables: int


# By what runs, since each report asks again of all programs of a run. A module is of one rank.
_known: WeakKeyDictionary[fx.GraphModule, ProgramMemory] = WeakKeyDictionary()


def memory_of(step: Step, rank: int, recorded: DeviceProgram | None) -> ProgramMemory:
    """Predict the memory of the program of an emitted step.

    Scratch memory of libraries, within one operator, is not counted.

    Args:
        step: a step of form EMITTED.
        rank: the global rank that the program is for.
        recorded: what of the program is recorded as CUDA graphs, once it has run call by call; None if nothing is.

    Raises:
        ValueError: the optimizer's own code runs in the program.
    """
    program = step.program
    if runs_own_code(program):
        raise ValueError("the optimizer's own code runs in the program, which nothing predicts")
    key = program.module if recorded is None else recorded.module
    if key not in _known:
        _known[key] = _predicted(step, rank, recorded)
    return _known[key]


def runs_own_code(program: Program) -> bool:
    """Whether the optimizer's own code runs in a program."""
    return any(isinstance(value, EagerTasks) for value in program.inputs.values())


def _predicted(step: Step, rank: int, recorded: DeviceProgram | None) -> ProgramMemory:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        arguments = ProgramTensors(step, rank)
        given = [arguments.of(value) for value in step.program.inputs.values()]
        with LiveBytes(given) as live:
            walk = FakeWalk(step.program.module)
            walk.run(*given)
        if recorded is None:
            return ProgramMemory(live.most, {}, walk.tables + sum(map(blocks, walk.words)))
        numbers = [NUMBER for _ in placeholders(recorded.host.graph)]
        words = StepWords(DeviceNumber.WORDS * len(recorded.kinds), torch.device("cpu"))
        kinds = enumerate(recorded.kinds)
        on_device = {i: DeviceNumber(words, DeviceNumber.WORDS * i) for i, kind in kinds if kind == "device"}
        given += [on_device.get(i, value) for i, value in enumerate(recorded.host(*numbers))]
        with LiveBytes([given, words.memory]) as cut:
            CutProgram(recorded.module).run(given, cut.launch, lambda node, values: None)
        # Stretches run call by call once before they are recorded.
        tables = walk.tables + blocks(sum(walk.words) + len(on_device) * DeviceNumber.WORDS * 8)
        return ProgramMemory(max(live.most, cut.most), dict(cut.most_on), tables)


class ProgramTensors:
    """Tensors and numbers for the inputs of a program, of the right shapes and dtypes; their values mean nothing.

    Args:
        step: a step of form EMITTED.
        rank: the global rank that the program is for.
    """

    def __init__(self, step: Step, rank: int) -> None:
        self.step, self.rank = step, rank
        self.slots = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in step.program.slots]
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
            made = torch.ones(shape, dtype=leaf.dtype, device="cpu")
            if leaf.role is Role.STATE and len(shape) == 2 and shape[0] == shape[1]:
                made = torch.eye(shape[0], dtype=leaf.dtype, device="cpu")  # what decompositions take
            self._leaves[task, name] = made
        return self._leaves[task, name]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make and something still holds.

    Args:
        given: tensors that were there before, nested in lists. They are not counted.

    Attributes:
        most: the most bytes at one time so far.
        most_on: the same for each stream that stretches are recorded on.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self.most_on: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._stream = COMPUTE
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
        size = blocks(storage.nbytes())
        stream = self._stream
        self._now[stream] += size
        self.most = max(self.most, self._now.total())
        self.most_on[stream] = max(self.most_on[stream], self._now[stream])
        weakref.finalize(storage, self._forget, storage._cdata, stream, size).atexit = False

    def _forget(self, key: int, stream: str, size: int) -> None:
        self._known.discard(key)
        self._now[stream] -= size

    def launch(self, stretch: ProgramStretch, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run a stretch as `FakeWalk` does; its tensors count for its stream."""
        self._stream = work_stream(stretch.stream)
        found: Sequence[Any] = FakeWalk(stretch.module).run(*inputs)
        return found


class FakeWalk(fx.Interpreter):
    """Runs what computes in a program, and neither collectives nor generated kernels, which make no tensors.

    Attributes:
        tables: the bytes of the tables of generated kernels so far.
        words: for each of these kernels, the bytes of its addresses and numbers.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.tables = 0
        self.words: list[int] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result if n.users or n.op == "output" else None  # `Interpreter` would keep it

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in CONNECTING:
            return None
        if target is program_ops.each and isinstance(args[0], fx.GraphModule):
            own = args[0]
            return program_ops.each(lambda *given: FakeWalk(own).run(*given), *args[1:], **kwargs)
        if target is each_numbered and args[0] in OPERATORS.values():
            return program_ops.each(*plain_numbers(args), **plain_numbers(kwargs))
        if target in OPERATORS:
            return OPERATORS[target](*plain_numbers(args), **plain_numbers(kwargs))
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        own = self.fetch_attr(target)
        if isinstance(own, GroupedKernel):
            found = own.table_bytes(args)
            self.tables += blocks(found.rows) + blocks(found.blocks)
            self.words.append(found.words)
            return None
        return (
            FakeWalk(own).run(*args) if isinstance(own, fx.GraphModule) else super().call_module(target, args, kwargs)
        )


# Forms that launch kernels of ours, which need memory, and the operators that they stand for.
OPERATORS: Mapping[Any, Any] = {form: op for op, form in FORMS.items() if op in (SYM_GEMM, GEMM_AXPBY)}


def plain_numbers(arguments: Any) -> Any:
    """The arguments of a form with plain numbers, for its operator."""
    return fx.node.map_aggregate(arguments, lambda value: NUMBER if isinstance(value, DeviceNumber) else value)


def blocks(size: int) -> int:
    """The bytes that torch's CUDA allocator gives away for a tensor of some bytes."""
    return -(-size // BLOCK) * BLOCK
