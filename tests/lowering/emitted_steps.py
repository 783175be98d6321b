"""Steps of a few matrices, planned and emitted for ranks and machines that are not here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim import Muon, Optimizer

from canzona_compile.capture.templates import Capture
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Form, Step, Task, Template
from canzona_compile.machine.hardware import Machine
from canzona_compile.passes import planning_passes
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.session.plan import emit, lower
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.samples import grid_of, rows_layout

CUDA = Machine("cuda", "nccl", 1)

MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {"muon": Muon, "soap": SOAP, "shampoo": Shampoo}

SHAPES: tuple[Shape, ...] = ((16, 8), (31, 47))  # the second one is padded


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
    **options: Any,
) -> Step:
    """The program of a rank, of matrices of two shapes."""
    return emit(scheduled(name, grid, matrices, variant, machine, Options(**options)), rank)[0]


@cache
def scheduled(name: str, grid: tuple[int, int], matrices: int, variant: int, machine: Machine, chosen: Options) -> Step:
    """What all ranks emit their programs from."""
    tasks, used = [], []
    for i in range(matrices):
        shape = SHAPES[i % len(SHAPES)]
        own = templates(name, shape)
        used += own
        layout = rows_layout(shape, grid_of(*grid))
        tasks.append(Task(f"layers.{i}.weight", i, 0, own[variant % len(own)].name, layout))
    captured = Step(Form.CAPTURED, name, machine, tuple(dict.fromkeys(used)), tuple(tasks))
    owned, _ = run(captured, planning_passes(chosen))
    return lower(owned, [t.name for t in owned.tasks], chosen)[0]
