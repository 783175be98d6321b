"""Steps of a few matrices, planned and emitted for ranks and machines that are not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from canzona_compile.capture.templates import Capture
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.program import Bytes, Fragments, Indices, Input, Residents, ScalarInput, Views, Whole
from canzona_compile.ir.step import Form, Role, Step, Task, Template
from canzona_compile.ir.storage import Stored
from canzona_compile.machine.hardware import Machine, named_hardware
from canzona_compile.passes import planning_passes
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.session.plan import emit, lower
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.samples import grid_of, rows_layout

CUDA = Machine("cuda", "nccl", 1)
# Nothing fills it, and launches cost nothing: so batches that take equally long have lanes.
ENDLESS = replace(named_hardware("h100"), name="endless", bandwidth=1e24, launch=0.0)
WITH_LANES = Machine("cuda", "nccl", 1, ENDLESS)
NUMBER = 0.5  # stands for every hyperparameter

MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {"muon": Muon, "soap": SOAP, "shampoo": Shampoo}

SHAPES: tuple[Shape, ...] = ((16, 8), (31, 47))  # the second one is padded
SIMILAR: tuple[Shape, ...] = ((32, 47), (31, 47))  # they take equally long


@cache
def templates(name: str, shape: Shape) -> tuple[Template, ...]:
    """All variants of an optimizer's step for one matrix."""
    optimizer = MAKERS[name]([torch.nn.Parameter(torch.zeros(2, 2))])
    spec = ParameterSpec(shape, torch.float32, torch.float32, torch.device("cpu"))
    kind = Capture(optimizer).kind_of(ParamExample(optimizer.param_groups[0], spec, "weight"))
    assert not kind.template.interpreted, kind.template.interpreted
    return tuple(kind.templates.values())


def emitted(
    name: str,
    grid: tuple[int, int],
    *,
    rank: int = 0,
    matrices: int = 4,
    variant: int = 0,
    machine: Machine = CUDA,
    shapes: tuple[Shape, ...] = SHAPES,
    **options: Any,
) -> Step:
    """The program of a rank, of matrices that have these shapes in turn."""
    return emit(scheduled(name, grid, matrices, variant, machine, Options(**options), shapes), rank)[0]


@cache
def scheduled(
    name: str,
    grid: tuple[int, int],
    matrices: int,
    variant: int,
    machine: Machine,
    chosen: Options,
    shapes: tuple[Shape, ...] = SHAPES,
) -> Step:
    """What all ranks emit their programs from."""
    tasks, used = [], []
    for i in range(matrices):
        shape = shapes[i % len(shapes)]
        own = templates(name, shape)
        used += own
        layout = rows_layout(shape, grid_of(*grid))
        tasks.append(Task(f"layers.{i}.weight", i, 0, own[variant % len(own)].name, layout))
    captured = Step(Form.CAPTURED, name, machine, tuple(dict.fromkeys(used)), tuple(tasks))
    owned, _ = run(captured, planning_passes(chosen))
    return lower(owned, [t.name for t in owned.tasks], chosen)[0]


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
        self._stored: dict[tuple[str, str], Stored] = {}

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
                return [self.held(leaf, task, whole=False) for task in tasks]
            case Residents(leaf, tasks):
                return [self.held(leaf, task, whole=True) for task in tasks]
            case ScalarInput():
                return NUMBER
        return None

    def held(self, name: str, task: str, whole: bool) -> Tensor | Stored:
        """A leaf of a task as its state has it."""
        storage = self.step.placed_of(self.step.task(task)).stored.get(name)
        leaf = self.leaf(name, task, whole)
        return leaf if storage is None else self._stored.setdefault((task, name), Stored(storage, leaf))

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
