"""What a plan is asked for, and how its steps are simulated for figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canzona_compile.ir.hardware import Hardware
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Step
from canzona_compile.options import Options
from canzona_compile.passes import relowering_passes
from canzona_compile.tools.planning.mesh import Mesh
from canzona_compile.tools.planning.weights import Model
from canzona_compile.tools.simulation.figures import Simulation
from canzona_compile.tools.simulation.simulate import simulate


@dataclass(frozen=True, slots=True)
class Request:
    """What a forecast is asked for, beside the step.

    Attributes:
        updates: who applies updates over replicas: "ddp", all of them, or "zero1", the owner's alone.
        rank: a rank whose timeline is wanted, global.
        elementwise: how many matrices the optimizer updates elementwise; they are not in the step.
    """

    model: Model
    mesh: Mesh
    hardware: Hardware
    options: Options
    updates: str
    rank: int | None
    elementwise: int


def simulated(step: Step, request: Request, shown: Sequence[int] = ()) -> Simulation:
    """Simulate a step as `request.updates` says: all of it, or what a framework with ZeRO-1 leaves of it.

    Args:
        step: SCHEDULED.
        shown: ranks whose spans are wanted.
    """
    if request.updates == "zero1":
        step, _ = run(step, relowering_passes(request.options, owner_replica=True))
    return simulate(step, request.hardware, shown=shown)
