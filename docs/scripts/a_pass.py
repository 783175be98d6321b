"""A pass, run on a real step, and what it changed: python docs/scripts/a_pass.py"""

# --8<-- [start:pass]
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

import canzona_compile
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.printer import differences, show
from canzona_compile.ir.step import Form, Step
from canzona_compile.passes import Reopen


@dataclass(frozen=True, slots=True)
class OwnedByOne:
    """Give every matrix that has an owner to the same one. It is bad for speed, and easy to see.

    Attributes:
        shard: the column of the owner in the grid.
    """

    name: ClassVar[str] = "owned-by-one"
    requires: ClassVar[Form] = Form.OWNED
    ensures: ClassVar[Form] = Form.OWNED
    shard: int = 0

    def __call__(self, step: Step) -> Step:
        return replace(step, tasks=tuple(replace(t, owner=t.owner and (0, self.shard)) for t in step.tasks))


# --8<-- [end:pass]
# --8<-- [start:run]
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False, device="meta") for _ in range(4)])
muon = torch.optim.Muon(model.named_parameters())
planned = canzona_compile.plan(model, mesh={"fsdp": 2}, optimizer=muon).step
after, history = run(planned, [Reopen(), OwnedByOne(shard=1)])  # the verifier looks after each of them
print(differences(show(history.step_at("reopen")), show(after)))
# --8<-- [end:run]
