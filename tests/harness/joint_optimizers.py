"""Optimizers whose update of one parameter depends on others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import PerParameter, cube

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


class Positions(PerParameter):
    """Scales by the position of a parameter among those with a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for i, param in enumerate(params):
            param.sub_(cube(param.grad) * (self.param_groups[0]["lr"] * (i + 1) / len(params)))


class AllWeights(PerParameter):
    """Divides by the norm of all parameters, also of those that have no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norm = torch.stack([p.norm() for p in params]).norm()
        for param in params:
            if param.grad is not None:
                param.sub_(cube(param.grad) / norm * self.param_groups[0]["lr"])


class NormOfGroup(Optimizer):
    """Divides by an average of the norm of a group's gradients, kept in the group; counts steps on itself."""

    def __init__(self, params: Params) -> None:
        super().__init__(halves(params), {"lr": 0.1, "norm": 0.0, "k": 0})
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.k += 1
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in params]).norm().item() if params else 0.0
            group["norm"], group["k"] = 0.9 * group["norm"] + norm, group["k"] + 1
            for param in params:
                self.state[param]["seen"] = self.state[param].get("seen", 0) + 1
                param.sub_(cube(param.grad), alpha=group["lr"] / (group["k"] + group["norm"]))


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


class Scripted(Optimizer):
    """Divides by the norm of all gradients; what else it does at step k is up to its kind."""

    def __init__(self, params: Params, **hypers: Any) -> None:
        super().__init__(halves(params), {"lr": 0.1, **hypers})
        self.k = 0
        self.log: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Make attributes."""

    def after(self, norm: float) -> float:
        """Do something after the norm is known; return the factor of this step's updates."""
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.k += 1
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm().item() if grads else 0.0
        factor = self.after(norm)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(cube(param.grad), alpha=float(group["lr"]) * factor / (1 + norm))


class SharedRate(Scripted):
    """Both groups and an attribute share one tensor, which every step binds anew in one group."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, rate=torch.tensor(0.5))

    def begin(self) -> None:
        self.base = self.param_groups[0]["rate"]

    def after(self, norm: float) -> float:
        self.param_groups[0]["rate"] = self.base / self.k
        return float(self.param_groups[0]["rate"] + self.param_groups[1]["rate"] + self.base)


class Forgetful(Scripted):
    """Deletes an attribute and an entry of its groups at the fifth step, and all state at the sixth."""

    def begin(self) -> None:
        self.warm = 0.5
        for group in self.param_groups:
            group["warm"] = 0.25

    def after(self, norm: float) -> float:
        if self.k == 5:
            del self.warm
            for group in self.param_groups:
                del group["warm"]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["seen"] = self.state[param].get("seen", 0) + 1
        seen = sum(entry["seen"] for entry in self.state.values())
        if self.k == 6:
            self.state.clear()
        return float(getattr(self, "warm", 1.0) + self.param_groups[0].get("warm", 2.0) + seen)


class OddState(Scripted):
    """Keeps state under a key of its own, fills a dict at the first step, and has one list under two names."""

    def begin(self) -> None:
        self.info: dict[str, float] = {}
        self.one = self.param_groups[0]["history"] = []

    def after(self, norm: float) -> float:
        odd: Any = self.state["global"]
        odd["norm"] = 0.5 * odd.get("norm", 0.0) + norm
        self.info.setdefault("first", norm)
        self.one.append(norm)
        return float(odd["norm"] + self.info["first"] + sum(self.param_groups[0]["history"]))


class LateLog(Scripted):
    """Begins a log, and another attribute, long after the rehearsal."""

    def after(self, norm: float) -> float:
        if self.k >= 50:
            self.log.append(norm)
            self.late = self.k
        return 1.0 + sum(self.log)


class ReadsAll(Scripted):
    """At every seventh step it reads parameters without gradients, and who requires one."""

    def after(self, norm: float) -> float:
        params = [p for group in self.param_groups for p in group["params"]]
        if self.k % 7:
            return 1.0
        return sum(p.norm().item() for p in params) + sum(p.requires_grad for p in params)


class MakesState(Scripted):
    """Makes state as many do: if the parameter is not in it yet, also for parameters without a gradient."""

    def after(self, norm: float) -> float:
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self.state:
                    self.state[param] = {"sum": torch.zeros_like(param)}
                if param.grad is not None:
                    self.state[param]["sum"].add_(param.grad)
        return 1.0 + sum(entry["sum"].abs().sum().item() for entry in self.state.values())


class LateObject(Scripted):
    """Keeps an object from the fiftieth step on."""

    def after(self, norm: float) -> float:
        if self.k == 50:
            self.held = Holder(torch.ones(2))
        return 1.0


class Reducing(Scripted):
    """Communicates at every tenth step."""

    def after(self, norm: float) -> float:
        if self.k % 10 == 0 and dist.is_initialized():
            total = torch.tensor(norm)
            dist.all_reduce(total)
            return total.item()
        return 1.0


class SquaredNorm(PerParameter):
    """Divides by the norm of all gradients, of parameters of any shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in params]).sum()
        for param in params:
            param.sub_(param.grad / norm * self.param_groups[0]["lr"])


MAKERS = {
    "distance": Distance,
    "norm": NormOnItself,
    "positions": Positions,
    "weights": AllWeights,
    "groups": NormOfGroup,
}
SCRIPTED: dict[str, type[Scripted]] = {
    "shared rate": SharedRate,
    "forgetful": Forgetful,
    "odd state": OddState,
    "late log": LateLog,
    "reads all": ReadsAll,
    "makes state": MakesState,
}
