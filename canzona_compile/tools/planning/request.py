"""What a plan is asked for, and how its steps are lowered and played for figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from canzona_compile.ir.hardware import Hardware
from canzona_compile.ir.layout import Grid, Layout
from canzona_compile.ir.pipeline import Pass
from canzona_compile.ir.step import Step, Task
from canzona_compile.options import Options
from canzona_compile.session.plan import lowering_passes
from canzona_compile.tools.planning.mesh import Mesh
from canzona_compile.tools.planning.weights import Model
from canzona_compile.tools.simulation.figures import Simulation
from canzona_compile.tools.simulation.simulate import simulate


@dataclass(frozen=True, slots=True)
class Request:
    """What a forecast is asked for, beside the step."""

    model: Model
    mesh: Mesh
    hardware: Hardware
    options: Options
    updates: str
    rank: int | None
    elementwise: int


def played(step: Step, passes: Sequence[Pass]) -> Step:
    """Apply passes; verifying after each, as a run does, would take most of the time of a large plan."""
    for current in passes:
        step = current(step)
    return step


def simulated(step: Step, request: Request, shown: Sequence[int] = ()) -> Simulation:
    """The step as `updates` says: all of it, or what a framework with ZeRO-1 leaves of it."""
    if request.updates == "zero1":
        step = zero1(step, request.options)
    return simulate(step, request.hardware, shown=shown)


def zero1(step: Step, options: Options) -> Step:
    """The owner's replica alone gathers, computes and applies; the others get parameters in the forward pass."""
    return played(replace(step, tasks=alone(step.tasks)), lowering_passes(options))


def alone(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Tasks on the grid of their owner's replica."""
    layouts: dict[tuple[int, int], Layout] = {}

    def moved(task: Task) -> Task:
        if task.owner is None or task.layout.grid.replicas == 1:
            return task
        key = (id(task.layout), task.owner[0])
        if key not in layouts:
            layouts[key] = replace(task.layout, grid=Grid((task.layout.grid.ranks[task.owner[0]],)))
        return replace(task, layout=layouts[key], owner=(0, task.owner[1]))

    return tuple(map(moved, tasks))
