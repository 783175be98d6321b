"""The request for a forecast."""

from __future__ import annotations

from dataclasses import dataclass

from canzona_compile.ir.bucket import BUCKET_BYTES
from canzona_compile.machine.hardware import Hardware
from canzona_compile.options import Options
from canzona_compile.tools.planning.mesh import Mesh
from canzona_compile.tools.planning.passes import Passes
from canzona_compile.tools.planning.weights import Model


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked a forecast for, beside the step.

    Attributes:
        updates: who applies updates over replicas: "ddp", all of them, or "zero1", the owner's alone.
        passes: the passes of the model; None unless updates are "zero1".
        bucket_bytes: the size at which a bucket closes.
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
    passes: Passes | None = None
    bucket_bytes: int = BUCKET_BYTES
