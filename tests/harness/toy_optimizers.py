"""Small optimizers, each with one trait that wrapping has to live with: counters, host reads, coupling, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Any]


class PerParameter(Optimizer):
    """Base of optimizers that update one parameter after another."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, **hypers: Any) -> None:
        super().__init__(params, {"lr": lr, **hypers})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group, self.state[param])

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        raise NotImplementedError


def cube(grad: Tensor) -> Tensor:
    """Something that needs the whole matrix."""
    return grad @ grad.T @ grad


class Cubic(PerParameter):
    """No state at all."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad) * group["lr"])


class Keeping(PerParameter):
    """Keeps the gradient of the step before, whole: a view of what was gathered. Wide matrices travel in bfloat16."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        grad = grad.to(torch.bfloat16 if param.shape[0] < param.shape[1] else torch.float32, copy=True)
        last = state.get("last", torch.zeros_like(grad.T))
        param.sub_((grad @ last @ grad).float() * group["lr"])
        state["last"] = grad.T


class TwoKinds(PerParameter):
    """Muon-like for groups with use_muon, Adam for the others: as many public Muons do it."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.05, beta=0.9, beta2=0.99, eps=1e-8, use_muon=False)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if group["use_muon"]:
            if not state:
                state["momentum"] = torch.zeros_like(param)
            state["momentum"].lerp_(grad, 1 - group["beta"])
            update = grad.lerp(state["momentum"], group["beta"]).bfloat16()
            update = update / (update.norm() + 1e-7)
            param.add_(update + cube(update), alpha=-group["lr"])
            return
        if not state:
            state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
        state["step"] += 1
        state["mean"].lerp_(grad, 1 - group["beta"])
        state["square"].mul_(group["beta2"]).addcmul_(grad, grad, value=1 - group["beta2"])
        first, second = 1 - group["beta"] ** state["step"], 1 - group["beta2"] ** state["step"]
        root = (state["square"] / second).sqrt().add_(group["eps"])
        param.addcdiv_(state["mean"], root, value=-group["lr"] / first)


class Counting(PerParameter):
    """A Python counter in the state scales the step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["step"] = state.get("step", 0) + 1
        param.add_(cube(grad), alpha=-group["lr"] / state["step"])


class Refreshing(PerParameter):
    """Every third step does more, as SOAP and Shampoo do."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(step=0, basis=torch.eye(len(param), dtype=param.dtype))
        state["step"] += 1
        if state["step"] % 3 == 0:
            state["basis"].copy_(torch.linalg.qr(grad @ grad.T + state["basis"])[0])
        param.add_(state["basis"] @ grad, alpha=-group["lr"])


class Untouching(PerParameter):
    """Has state that no step reads or writes."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(spare=torch.zeros(()), table=torch.arange(5.0), like=param.clone())
        param.add_(cube(grad), alpha=-group["lr"])


class Breaking(PerParameter):
    """Prints in the midst of its work, so that Dynamo sees two graphs."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = cube(grad)
        print(end="")
        param.add_(update, alpha=-group["lr"])


class Alternating(PerParameter):
    """Elementwise on every other step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(step=0, average=torch.zeros_like(param))
        state["step"] += 1
        state["average"].lerp_(grad, 0.1)
        update = cube(state["average"]) if state["step"] % 2 == 0 else state["average"]
        param.add_(update, alpha=-group["lr"])


class Listing(PerParameter):
    """A list of factors, one per side, as many Shampoos keep them, and a counter inside a dict."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["factors"] = [torch.eye(n) for n in param.shape]
            state["counts"] = {"step": 0}
        state["counts"]["step"] += 1
        left, right = state["factors"]
        left.lerp_(grad @ grad.T, 0.1)
        state["factors"][1] = right * 0.9 + grad.T @ grad * 0.1
        param.add_(left @ grad @ state["factors"][1], alpha=-group["lr"] / state["counts"]["step"])


class ConstantMaking(PerParameter):
    """Makes a tensor of a number in its step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad / torch.tensor(3.0)), alpha=-group["lr"])


class HostReading(PerParameter):
    """A value read on the host decides what happens: no tracer can follow."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.mul_(0.9).add_(grad)
        update = cube(average)
        if update.norm().item() > 10:
            update = update / update.norm()
        param.add_(update, alpha=-group["lr"])


@dataclass
class Tally:
    """A Python object, as preconditioner classes are."""

    steps: int = 0


class ObjectKeeping(PerParameter):
    """A Python object in the state."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        tally = state.setdefault("tally", Tally())
        tally.steps += 1
        param.add_(cube(grad), alpha=-group["lr"] / tally.steps)


class Nesting(PerParameter):
    """The state is not flat."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        inner = state.setdefault("sides", {"left": torch.zeros(len(param), len(param))})
        inner["left"].lerp_(grad @ grad.T, 0.1)
        param.add_(inner["left"] @ grad, alpha=-group["lr"])


class Replacing(PerParameter):
    """Every step puts a new tensor in the state instead of writing the old one."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state["average"] = state["average"] * 0.9 + grad if state else grad.clone()
        param.add_(cube(state["average"]), alpha=-group["lr"])


class CompilationAware(PerParameter):
    """Rounds otherwise when compiled, as torch's own Adam does."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = cube(grad) / 3 if torch.compiler.is_compiling() else cube(grad) * (1 / 3)
        param.add_(update, alpha=-group["lr"])


class CountingOnItself(PerParameter):
    """The counter is an attribute of the optimizer."""

    steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] / self.steps)


class CountingInGroup(PerParameter):
    """The counter is an entry of the parameter group."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, steps=0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(cube(param.grad), alpha=-group["lr"] / group["steps"])


class LateCounting(PerParameter):
    """The group gets its counter at the first step, as in several packages; it decides about the work."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    update = cube(param.grad) if group["step"] % 3 else param.grad
                    param.add_(update, alpha=-group["lr"] / group["step"])


class CountingPerParameter(PerParameter):
    """The group's counter counts parameters, so that they depend on one another."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        group["steps"] = group.get("steps", 0) + 1
        param.add_(cube(grad), alpha=-group["lr"] / group["steps"])


class CountingInAList(PerParameter):
    """Keeps a record on the host, so that it can only be found by running it."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.norms: list[float] = []

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.norms.append(grad.norm().item())
        param.add_(cube(grad), alpha=-group["lr"])


class AveragingOnItself(PerParameter):
    """A tensor that belongs to the optimizer."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.average = torch.zeros(())

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.average.lerp_(grad.mean(), 0.1)
        param.add_(cube(grad), alpha=-group["lr"])


class Caching(PerParameter):
    """Makes something at the first step and keeps it."""

    made: Callable[[Tensor], Tensor] | None = None

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if self.made is None:
            self.made = cube
        param.add_(self.made(grad), alpha=-group["lr"])


class GlobalNorm(PerParameter):
    """Scales every update by the norm of all gradients: parameters are coupled."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for param in params:
            param.sub_(param.grad / norm * self.defaults["lr"])


class GlobalNormOnHost(PerParameter):
    """The same, but read on the host, so that it can only be found by running it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.norm().item() for p in params)
        scale = 1 / norm if norm > 1 else 1.0
        for param in params:
            param.sub_(param.grad * scale * self.defaults["lr"])


class Communicating(PerParameter):
    """Averages the gradients itself."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = grad.clone()
        dist.all_reduce(average)
        param.sub_(average * group["lr"])


class Scratch(PerParameter):
    """Writes a product of every parameter into the same memory, whole each time."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        product = torch.empty(6, 6)
        for param in self.param_groups[0]["params"]:
            torch.mm(param.grad, param.grad.mT, out=product)
            param.sub_(product @ param.grad)
