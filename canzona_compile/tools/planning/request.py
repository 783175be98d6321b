"""The request for a forecast, and the simulation of a step as the request asks for it."""

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
    """What the user asked a forecast for, beside the step.

    Attributes:
        updates: who applies updates over replicas: "ddp", all of them, or "zero1", the owner's alone.
        rank: a global rank whose timeline to show.
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
    """Simulate a step as `request.updates` says: all of it, or the part that is left with ZeRO-1.

    Args:
        step: SCHEDULED.
        shown: ranks whose spans to keep.
    """
    if request.updates == "zero1":
        step, _ = run(step, relowering_passes(request.options, owner_replica=True))
    return simulate(step, request.hardware, shown=shown)
