"""Optimizers whose update of one parameter depends on others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import cube

Params = list[Any]


def halves(params: Params) -> list[dict[str, Any]]:
    """Two groups with other rates."""
    middle = len(params) // 2
    return [{"params": params[:middle]}, {"params": params[middle:], "lr": 0.03}]


class Distance(Optimizer):
    """In the manner of D-Adaptation: a rate that all groups share, from sums over all parameters, kept in groups."""

    def __init__(self, params: Params) -> None:
        super().__init__(halves(params), {"lr": 0.1, "d": 1e-2, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first = self.param_groups[0]
        if "sums" not in first:
            for group in self.param_groups:
                group["sums"] = torch.zeros(2)
        sums: Tensor = torch.zeros(2)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["start"], state["sum"] = param.clone(), torch.zeros_like(param)
                    state["steps"] = 0
                state["steps"] += 1
                state["sum"].add_(param.grad, alpha=group["d"] * group["lr"])
                sums += torch.stack([(param.grad * (state["start"] - param)).sum(), state["sum"].abs().sum()])
        first["sums"].mul_(0.9).add_(sums)
        rate = max(first["d"], (first["sums"][0] / first["sums"][1]).item())
        for group in self.param_groups:
            group["d"], group["sums"], group["k"] = rate, first["sums"], group["k"] + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(cube(param.grad) * (rate * group["lr"]))


class NormOnItself(Optimizer):
    """Divides by an average of the norm of all gradients, which it keeps as a tensor on itself, in a log beside it."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})
        self.norm = torch.zeros(())
        self.log: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = 0.9 * self.norm + torch.stack([p.grad.norm() for p in params]).norm()
        self.log.append(self.norm.item())
        for param in params:
            param.sub_(cube(param.grad) / self.norm * self.param_groups[0]["lr"])


class Positions(Optimizer):
    """Scales by the position of a parameter among those with a gradient."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for i, param in enumerate(params):
            param.sub_(cube(param.grad) * (self.param_groups[0]["lr"] * (i + 1) / len(params)))


class AllWeights(Optimizer):
    """Divides by the norm of all parameters, also of those that have no gradient."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norm = torch.stack([p.norm() for p in params]).norm()
        for param in params:
            if param.grad is not None:
                param.sub_(cube(param.grad) / norm * self.param_groups[0]["lr"])


class Failing(NormOnItself):
    """Raises at its fourth step, where a rehearsal of other numbers sees nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0].get("fails"):
            raise RuntimeError("the fourth step")
        super().step()


class KeepsObjects(NormOnItself):
    """Keeps a new object on itself at each step, which cannot be shown to other ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.last = Holder(self.norm)


class Holder:
    """Holds a value."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


MAKERS = {"distance": Distance, "norm": NormOnItself, "positions": Positions, "weights": AllWeights}
