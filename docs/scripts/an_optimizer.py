"""An optimizer of your own: python -m canzona_compile verify docs.scripts.an_optimizer:build --ranks 2"""

import torch
from torch import nn


class NormalizedMomentum(torch.optim.Optimizer):
    """Steps of a fixed length: the momentum of each matrix, divided by its norm."""

    def __init__(self, params, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].mul_(group["momentum"]).add_(param.grad)
                param.sub_(state["momentum"] / state["momentum"].norm(), alpha=group["lr"])


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its plain optimizer."""
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32, bias=False))
    return model, NormalizedMomentum(model.parameters())
