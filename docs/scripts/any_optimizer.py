"""Six optimizers, and how each of them runs: python docs/scripts/any_optimizer.py"""

import torch
from torch import nn

import canzona_compile


# --8<-- [start:captured]
class Spectral(torch.optim.Optimizer):
    """Divides by the largest singular value, as power iterations estimate it."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["v"] = torch.ones(param.shape[1]) / param.shape[1] ** 0.5
                    self.update(param, param.grad, state, group["lr"])

    def update(self, param, grad, state, lr) -> None:
        u = grad @ state["v"]
        v = grad.mT @ (u / u.norm())
        state["v"].copy_(v / v.norm())
        param.add_(grad / v.norm(), alpha=-lr)


# --8<-- [end:captured]
# --8<-- [start:recorded]
class Recorded(Spectral):
    """Dynamo stops at what it may not trace, so operators are recorded one by one."""

    @torch.compiler.disable
    def update(self, param, grad, state, lr) -> None:
        super().update(param, grad, state, lr)


# --8<-- [end:recorded]
# --8<-- [start:branching]
class Branching(Spectral):
    """Asks for the value of a tensor: its owner runs the step as it is written."""

    def update(self, param, grad, state, lr) -> None:
        if grad.norm() > 1:
            super().update(param, grad, state, lr)


# --8<-- [end:branching]
# --8<-- [start:keeping]
class Keeping(Spectral):
    """Keeps what belongs to a parameter on itself."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.vectors = {p: {"v": torch.ones(p.shape[1])} for g in self.param_groups for p in g["params"]}

    def update(self, param, grad, state, lr) -> None:
        super().update(param, grad, self.vectors[param], lr)


one = nn.Parameter(torch.ones(16, 8))
wrapped = canzona_compile.wrap(
    Keeping([one], lr=0.02),
    one_per_matrix=lambda params: Keeping(params, lr=0.02),
)


# --8<-- [end:keeping]
class Coupled(Spectral):
    """Scales by the norm of all gradients together."""

    def step(self, closure=None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1e-3)
        super().step()


for kind in (Spectral, Recorded, Branching, Keeping, Coupled, torch.optim.LBFGS):
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    for row in canzona_compile.explain(kind(model.parameters())).parameters[:1]:
        print(f"{kind.__name__}: {row.how}. {row.why}")
