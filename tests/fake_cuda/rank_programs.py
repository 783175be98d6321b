"""Programs of all ranks, bound by the real executor to tensors of the stand-in, without an optimizer around them.

That is much quicker than a training: plans are made once, and every run begins with the same tensors. What is right
is what the same programs give when each piece of work is done at once.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

import canzona_compile.passes
from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.ir.options import Options
from canzona_compile.ir.program import Program
from canzona_compile.ir.step import Role, Step
from canzona_compile.ir.storage import Stored
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.executor import Sources
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.step_clock import StepClock
from canzona_compile.session.plan import emit
from tests.fake_cuda.device import current_device
from tests.fake_cuda.on_device import DeviceExecutor, look, on_stand_in
from tests.fake_cuda.tensors import plainly
from tests.lowering.emitted_steps import CUDA, SHAPES, SIMILAR, WITH_LANES, ProgramTensors, scheduled

Plant = Callable[[fx.GraphModule], None]  # makes a mistake in the program of rank 0


@dataclass
class RankTensors:
    """Leaves of one rank, equal for every run. Implements the executor's `Tensors` and `Numbers`."""

    step: Step
    rank: int
    number_of: Callable[[str, int], float]
    at: int = 0  # the number of the step
    leaves: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    gradients: set[tuple[str, str]] = field(default_factory=set)
    stored: dict[tuple[str, str], Stored] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bound = ProgramTensors(self.step, self.rank)

    def fragment(self, role: Role, leaf: str, task: str) -> Tensor | Stored:
        if role is Role.GRAD:
            self.gradients.add((task, leaf))
        return self.held(leaf, task, False)

    def resident(self, leaf: str, task: str) -> Tensor | Stored:
        return self.held(leaf, task, True)

    def held(self, leaf: str, task: str, whole: bool) -> Tensor | Stored:
        """A leaf as it is stored; what it is stored in counts as leaves."""
        storage = self.step.placed_of(self.step.task(task)).stored.get(leaf)
        if storage is None:
            return self.leaf(leaf, task, whole)
        if (task, leaf) not in self.stored:
            made = self.stored[task, leaf] = Stored(storage, self.leaf(leaf, task, whole))
            del self.leaves[task, leaf]
            self.leaves |= {(task, f"{leaf} {i}"): tensor for i, tensor in enumerate(made.tensors)}
        return self.stored[task, leaf]

    def leaf(self, leaf: str, task: str, whole: bool) -> Tensor:
        key = task, leaf
        if key not in self.leaves:
            made = self.bound.leaf(leaf, task, whole)
            noise = torch.Generator().manual_seed(hash_of(f"{self.rank} {task} {leaf}"))
            bare = made.ndim == 2 and torch.equal(made, torch.eye(*made.shape, dtype=made.dtype))  # to be decomposed
            self.leaves[key] = made if bare else (made * torch.randn(made.shape, generator=noise)).to(made.dtype)
        return self.leaves[key]

    def number(self, template: str, label: int, name: str) -> float:
        return self.number_of(name, self.at)


def hash_of(text: str) -> int:
    """A number that depends on a text alone, in every process."""
    return random.Random(text).randrange(2**31)


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Inside this context, programs are written without generated kernels, which the interpreter runs slowly."""
    with mock.patch.object(canzona_compile.passes, "available", return_value=False):
        yield


def emitted_on(
    grid: tuple[int, int],
    name: str = "muon",
    kernels: bool = False,
    matrices: int = 4,
    lanes: bool = False,
    **options: Any,
) -> list[Step]:
    """The programs of all ranks of a grid, with batches in lanes if asked."""
    chosen = Options(strategy="owner", **options)
    machine, shapes = (WITH_LANES, SIMILAR) if lanes else (CUDA, SHAPES)
    step = scheduled(name, grid, matrices, 0, machine, chosen, shapes)
    with contextlib.nullcontext() if kernels else torch_alone():
        return [emit(step, rank)[0] for rank in range(grid[0] * grid[1])]


def steady(name: str, at: int) -> float:
    """Numbers that never change."""
    return 0.5


def falling(name: str, at: int) -> float:
    """A learning rate that changes on every step."""
    return 0.5 / (1 + at) if name == "lr" else 0.5


class ProgramRun:
    """A program on the device of a rank.

    Args:
        program: the program.
        tensors: its leaves.
        cuda_graphs: whether it may be recorded.
        moving: whether gradients are elsewhere on every step.
    """

    def __init__(self, program: Program, tensors: RankTensors, cuda_graphs: bool, moving: bool = False) -> None:
        sources = Sources(torch.device("cpu"), Groups(), mock.Mock(), tensors, tensors, mock.Mock())
        self.tensors, self.moving = tensors, moving
        for module in program.module.modules():
            if isinstance(module, GroupedKernel):
                module.table = None  # what it sent was to the device of another run, which may not have come to it
        self.executor = DeviceExecutor(program, sources, SharedSlots(), cuda_graphs)
        self.executor.arguments()  # makes all leaves
        self.first = {key: value.clone() for key, value in tensors.leaves.items()}

    def step(self, at: int, timed: bool = False) -> None:
        """Take a step, between gradients that are written and gradients that are dropped, with a clock if asked."""
        tensors = self.tensors
        tensors.at = at
        for key in sorted(tensors.gradients):
            if self.moving:
                tensors.leaves[key] = torch.full_like(self.first[key], float("nan"))
                current_device().graveyard.append(tensors.leaves[key])
            write(tensors.leaves[key], self.first[key] * (1 + at))
        if timed:
            self.executor.run_timed(StepClock(self.executor.sources.device))
        else:
            self.executor.run()
        for key in sorted(tensors.gradients):
            write(tensors.leaves[key], None)


def run_programs(
    steps: list[Step],
    seed: int | None,
    plant: Plant | None = None,
    count: int = 5,
    number_of: Callable[[str, int], float] = steady,
    cuda_graphs: bool = True,
    moving: bool = False,
    timed: Collection[int] = (),
) -> list[dict[tuple[str, str], Tensor]]:
    """Run the programs some times.

    Args:
        steps: one per rank.
        seed: decides the order of all work; None does each piece at once.
        plant: a mistake.
        count: how many steps to take.
        number_of: finds a number by its name and the number of the step.
        cuda_graphs: whether programs may be recorded.
        moving: whether gradients are elsewhere on every step.
        timed: the steps that a clock looks at, call by call.

    Returns:
        The leaves of each rank, without gradients, as the caller's stream finds them at the end.
    """

    def work(rank: int) -> dict[tuple[str, str], Tensor]:
        program: Program = steps[rank].program
        if plant is not None:
            program = planted(program, plant)
        made = ProgramRun(program, RankTensors(steps[rank], rank, number_of), cuda_graphs, moving)
        for at in range(count):
            made.step(at, at in timed)
        look()
        tensors = made.tensors
        return {k: v.clone() for k, v in tensors.leaves.items() if k not in tensors.gradients}

    with on_stand_in(seed, len(steps)) as run:
        return run(work)


def planted(program: Program, plant: Plant) -> Program:
    """A copy of a program with a mistake in it."""
    module = fx.GraphModule(program.module, copy.deepcopy(program.module.graph))
    plant(module)
    module.recompile()
    return Program(module, program.inputs, program.slots, program.collectives, program.eager)


def write(target: Tensor, value: Tensor | None) -> None:
    """Write a gradient on the caller's stream, or overwrite it with NaN."""
    kept = None if value is None else value.clone()

    def work() -> None:
        with plainly():
            if kept is None:
                target.fill_(float("nan"))
            else:
                target.copy_(kept)

    current_device().put("a gradient", work)


def same(found: list[dict[tuple[str, str], Tensor]], right: list[dict[tuple[str, str], Tensor]]) -> bool:
    """Whether all leaves of all ranks have equal bits."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for own, other in zip(found, right, strict=True)
        for a, b in ((own[key], other[key]) for key in own)
        if a.ndim
    )
