"""Modules, optimizers and other holders of tensors on the optimizer, which the step reads or writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap

FAMILY = "modules"


def linear() -> nn.Linear:
    """A module whose weights are the same in every run."""
    module = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.arange(9.0).view(3, 3) / 10)
    return module


class Holding(PerParameter):
    """Base of optimizers that hold something with tensors."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.held: Any = self.hold(params)

    def hold(self, params: Params) -> Any:
        return linear()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])

    def after(self, params: Params) -> None:
        """What comes once all parameters are updated."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.after([p for group in self.param_groups for p in group["params"]])


class ClipsWeights(Holding):
    """Shrinks a module's weights, as MuonClip does to queries and keys."""

    def after(self, params: Params) -> None:
        self.held.weight.mul_(0.9)


class ClipsOwnParameter(Holding):
    """Shrinks a parameter by way of the list that holds it."""

    def hold(self, params: Params) -> Any:
        return nn.ParameterList(params)

    def after(self, params: Params) -> None:
        self.held[0].mul_(0.9)


class ClipsByLogits(PerParameter):
    """Shrinks a parameter whose attribute, set by the model, says that logits are large."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"])
        logit = getattr(param, "max_logit", 0.0)
        if logit > 10:
            param.mul_((10 / logit) ** 0.5)


class ReadsWeights(Holding):
    """A module's weights, which the user changes, scale the update."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad) * (self.held.weight.mean() * group["lr"]))


class AsksForTraining(Holding):
    """The flag of a module counts."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * (1.0 if self.held.training else 0.1))


class Normalizes(Holding):
    """A module with running statistics normalizes all gradients."""

    def hold(self, params: Params) -> Any:
        return nn.BatchNorm1d(1, affine=False)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        flat = self.held(grad.reshape(-1, 1))
        param.sub_(flat.reshape(grad.shape) * group["lr"])


class LearnsItsRate(Holding):
    """All gradients together train the learning rate, a parameter of a module."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.held.weight.add_(grad.mean() * 0.1)
        param.sub_(cube(grad) * self.held.weight.mean() * group["lr"])


class TiedWeights(Optimizer):
    """One parameter is pulled to another one, which a module holds."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})
        self.held = nn.ParameterList(params[:1])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(cube(param.grad) * self.held[0].abs().mean() * group["lr"])


class AveragesInList(Holding):
    """Averages of parameters, in a list on the optimizer."""

    def hold(self, params: Params) -> Any:
        return [p.detach().clone() for p in params]

    def after(self, params: Params) -> None:
        for average, param in zip(self.held, params, strict=True):
            average.lerp_(param, 0.1)


class AveragesById(Holding):
    """Averages of parameters by id."""

    def hold(self, params: Params) -> Any:
        return {id(p): p.detach().clone() for p in params}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = self.held[id(param)]
        average.lerp_(param, 0.1)
        param.add_(cube(grad), alpha=-group["lr"]).lerp_(average, 0.1)


class AveragesByParameter(Holding):
    """Momentum in a dict by parameter, and not in the state."""

    def hold(self, params: Params) -> Any:
        return {}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = self.held.setdefault(param, torch.zeros_like(param))
        param.add_(cube(average.lerp_(grad, 0.3)), alpha=-group["lr"])


class SlowWeights(Holding):
    """Lookahead: every other step parameters go back half way to slow weights on the optimizer."""

    steps = 0

    def hold(self, params: Params) -> Any:
        return [p.detach().clone() for p in params]

    def after(self, params: Params) -> None:
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, param in zip(self.held, params, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


class SlowWeightsByPlace(SlowWeights):
    """The same in a dict by place."""

    def hold(self, params: Params) -> Any:
        return {i: p.detach().clone() for i, p in enumerate(params)}

    def after(self, params: Params) -> None:
        for i, param in enumerate(params):
            self.held[i].lerp_(param, 0.5)
            param.copy_(self.held[i])


class InnerOptimizer(Holding):
    """Another optimizer does part of the work."""

    def hold(self, params: Params) -> Any:
        return SGD(params, lr=0.01, momentum=0.9)

    def after(self, params: Params) -> None:
        self.held.step()


class ModulePerParameter(Holding):
    """A module for every parameter, by id, as HeavyBall keeps its compiled maps."""

    def hold(self, params: Params) -> Any:
        modules = {id(p): linear() for p in params}
        for i, module in enumerate(modules.values()):
            module.weight.data.add_(i)
        return modules

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad) * (self.held[id(param)].weight.mean() * group["lr"]))


class Scaler(Holding):
    """An object has the scale of gradients, as mixed precision has it."""

    def hold(self, params: Params) -> Any:
        return SimpleNamespace(scale=torch.tensor(2.0))

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad / self.held.scale), alpha=-group["lr"])


class Factor:
    """A preconditioner."""

    def __init__(self, rows: int) -> None:
        self.matrix = torch.eye(rows)
        self.updates = 0

    def apply(self, grad: Tensor) -> Tensor:
        self.updates += 1
        self.matrix.lerp_(grad @ grad.T, 0.1 / self.updates)
        return self.matrix @ grad


class FactorInState(PerParameter):
    """A preconditioner in the state."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["factor"] = Factor(len(param))
        param.add_(state["factor"].apply(grad), alpha=-group["lr"])


class FactorOnItself(Holding):
    """Preconditioners on the optimizer, by id."""

    def hold(self, params: Params) -> Any:
        return {id(p): Factor(len(p)) for p in params}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(self.held[id(param)].apply(grad), alpha=-group["lr"])


class Tracking(Holding):
    """Sums norms for a log, and never reads them."""

    def hold(self, params: Params) -> Any:
        return SimpleNamespace(total=torch.zeros(()), norms=[])

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.held.total.add_(grad.abs().max())
        param.add_(cube(grad), alpha=-group["lr"])


class Logging(Tracking):
    """The same in a list of numbers."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.held.norms.append(grad.abs().max().item())
        param.add_(cube(grad), alpha=-group["lr"])


# -- edits -----------------------------------------------------------------------------------------


def change_weights(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.held.weight.data.mul_(3)


def change_mode(optimizer: Any, params: Params, step: int) -> None:
    optimizer.held.train(step < 2)


def change_scale(optimizer: Any, params: Params, step: int) -> None:
    optimizer.held.scale.fill_(2.0 + step)


def replace_scale(optimizer: Any, params: Params, step: int) -> None:
    optimizer.held.scale = torch.tensor(2.0 + step)


def report_logits(optimizer: Any, params: Params, step: int) -> None:
    for i, param in enumerate(params):
        param.max_logit = 10.0 * i * step


HELD = ("held",)

TRAPS = (
    Trap("module-written", FAMILY, ClipsWeights, "refused", HELD, seen=lambda o: o.held.weight),
    Trap("own-parameter-written-by-module", FAMILY, ClipsOwnParameter, "either"),
    Trap("logits-on-parameter", FAMILY, ClipsByLogits, "equal", edit=report_logits),
    Trap("module-read", FAMILY, ReadsWeights, "either", HELD, edit=change_weights),
    Trap("module-mode", FAMILY, AsksForTraining, "either", HELD, edit=change_mode),
    Trap("module-with-statistics", FAMILY, Normalizes, "refused", HELD),
    Trap("module-learns-rate", FAMILY, LearnsItsRate, "refused", HELD),
    Trap("module-ties-parameters", FAMILY, TiedWeights, "either"),
    Trap("averages-in-list", FAMILY, AveragesInList, "either", HELD, seen=lambda o: o.held),
    Trap("averages-by-id", FAMILY, AveragesById, "either", HELD, seen=lambda o: list(o.held.values())),
    Trap("momentum-in-dict-on-itself", FAMILY, AveragesByParameter, "either", HELD),
    Trap("slow-weights", FAMILY, SlowWeights, "either", HELD, seen=lambda o: o.held),
    Trap("slow-weights-by-place", FAMILY, SlowWeightsByPlace, "either", HELD, seen=lambda o: o.held),
    Trap("inner-optimizer", FAMILY, InnerOptimizer, "either"),
    Trap("module-per-parameter", FAMILY, ModulePerParameter, "either", HELD),
    Trap("scaler-written", FAMILY, Scaler, "either", HELD, edit=change_scale),
    Trap("scaler-replaced", FAMILY, Scaler, "either", HELD, edit=replace_scale),
    Trap("factor-in-state", FAMILY, FactorInState, "either"),
    Trap("factor-on-itself", FAMILY, FactorOnItself, "either", HELD),
    Trap("norms-summed", FAMILY, Tracking, "either", HELD, seen=lambda o: o.held.total),
    Trap("norms-logged", FAMILY, Logging, "either", HELD, seen=lambda o: list(o.held.norms)),
)
