"""What a rank's program for CUDA moves: launches, bytes and scattered elements of its stages, counted on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canzona_compile.codegen.launch import GroupedKernel, LaunchPart
from canzona_compile.codegen.tables import segment_of
from canzona_compile.codegen.values import Spread
from canzona_compile.ir import program_ops, storage
from canzona_compile.ir.step import Step
from tests.lowering.emitted_steps import ProgramTensors

SKIPPED = {
    program_ops.on_stream,
    program_ops.record,
    program_ops.wait,
    program_ops.finish,
    program_ops.start_all_to_all,
    program_ops.start_meeting,
    program_ops.set_matmul_precision,
    program_ops.put_precision_back,
}
ELEMENTWISE = ("prepare", "unpack", "pack", "forward", "apply")


@dataclass(slots=True)
class Traffic:
    """What the calls of a stage do.

    Attributes:
        launches: kernels, of which a foreach function counts as one.
        products: how many of them multiply matrices. Their bytes are left out: caches decide them.
        moved: bytes that all others read and write.
        scattered: elements that are read or written at other strides than those next to them.
    """

    launches: int = 0
    products: int = 0
    moved: int = 0
    scattered: int = 0


class Counter(fx.Interpreter):
    """Runs a program on tensors whose values mean nothing. Generated kernels are described and not run."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.program.module)
        self.stages: dict[str, Traffic] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in SKIPPED:
            return None
        if target in (storage.fetch, storage.store):  # on GPUs a kernel each, for each leaf
            result = super().call_function(target, args, kwargs)
            stored, values = args if target is storage.store else (args[0], result)
            self.stage("state").launches += len(stored)
            self.stage("state").moved += sum(own.nbytes for own in (*stored, *values))
            return result
        with Operators(self.stage("compute")):
            return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if not isinstance(module, GroupedKernel):
            with Operators(self.stage("compute")):
                return super().call_module(target, args, kwargs)
        own = self.stage(next(name for name in ELEMENTWISE if target.endswith(f"_{name}")))
        own.launches += 1
        for moved, scattered in described(module, args):
            own.moved += moved
            own.scattered += scattered
        return None

    def stage(self, name: str) -> Traffic:
        return self.stages.setdefault(name, Traffic())


def described(kernel: GroupedKernel, parts: Sequence[LaunchPart]) -> Iterator[tuple[int, int]]:
    """The bytes and the scattered elements of each fragment."""
    for part, ((lists, _), number) in enumerate(zip(parts, kernel.parts, strict=True)):
        program = kernel.programs[number]
        for entry, operands in enumerate(zip(*lists, strict=True)):
            segment = segment_of(program, part, entry, operands)
            if segment is None:
                continue
            elements = math.prod(segment.sizes)
            full = [i for i, spread in enumerate(program.spreads) if spread is Spread.FULL]
            scales = [i for i, spread in enumerate(program.spreads) if spread is Spread.BLOCKS]
            yield (
                elements * sum(operands[i].itemsize for i in full) + sum(operands[i].nbytes for i in scales),
                elements * sum(segment.strides[i][-1] != 1 for i in full),
            )


class Operators(TorchDispatchMode):
    """Counts what operators of torch and of this package do. Views do nothing."""

    def __init__(self, own: Traffic) -> None:
        super().__init__()
        self.own = own

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        made = op(*args, **(kwargs or {}))
        results = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in given}
        if results and not op._schema.is_mutable and all(t.untyped_storage().data_ptr() in storages for t in results):
            return made
        if "empty" in op.name():
            return made
        alike = [(t, one) for t in given for one in results if t.shape == one.shape]
        self.own.launches += 1
        if any(word in op.name() for word in ("mm", "gemm")):
            self.own.products += 1
            alike = [(t, one) for t, one in alike if t.shape[-1] != t.shape[-2]]  # others may be factors
        else:
            self.own.moved += sum(t.numel() * t.itemsize for t in (*given, *results))
        self.own.scattered += sum(t.numel() for t, one in alike if turned(t) != turned(one))
        return made


def turned(tensor: Tensor) -> bool:
    """Whether columns, and not rows, are contiguous."""
    return tensor.ndim > 1 and tensor.numel() > 1 and tensor.stride(-1) != 1 and tensor.stride(-2) == 1


def traffic(step: Step, rank: int = 0) -> dict[str, Traffic]:
    """Count what a program does, by stage: those of generated kernels, and "compute" for all else."""
    bound, counter = ProgramTensors(step, rank), Counter(step)
    with torch.no_grad():
        counter.run(*(bound.of(value) for value in step.program.inputs.values()))
    return counter.stages
