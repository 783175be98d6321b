"""Optimizers that keep on themselves what belongs to parameters, as published ones do, and one that draws.

None of them can be stepped on a twin, but one per matrix can, and its `state_dict` holds all that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.replica.randomness import MatrixGenerators
from tests.harness.toy_optimizers import cube
from tests.harness.traps.grammar import toy

Params = list[Any]


class ByAddress(Optimizer):
    """In the manner of HeavyBall: views by address, state by their number, counters in the group and on itself."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "every": 3})
        self.views: dict[int, tuple[Tensor, int]] = {}
        self.inner = {"rate": 1.0}
        self.register_state_dict_post_hook(self.saved)
        self.register_load_state_dict_pre_hook(self.loaded)

    @staticmethod
    def saved(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["ours"] = {"inner": dict(optimizer.inner), "schedule": b"\x00every"}

    @staticmethod
    def loaded(optimizer: Any, state_dict: dict[str, Any]) -> None:
        ours = state_dict.get("ours", {"inner": optimizer.inner, "schedule": b"\x00every"})
        assert ours["schedule"] == b"\x00every"
        optimizer.inner = dict(ours["inner"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.inner["rate"] *= 0.9
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                whole, _ = self.views.setdefault(param.data_ptr(), (param, 0))
                state = self.state[whole].setdefault(0, {})
                if not state:
                    state["moment"], state["factors"] = torch.zeros_like(param), [torch.eye(len(param)), None]
                    state["wide"] = torch.zeros(len(param), dtype=torch.float64)
                state["moment"].lerp_(param.grad, 1 - group["beta"])
                state["wide"] += param.grad.double().sum(1) / 3
                if group["steps"] % group["every"] == 0:
                    state["factors"][0] = state["moment"] @ state["moment"].T + torch.eye(len(param))
                update = state["factors"][0] @ state["moment"] + state["wide"][:, None].float()
                param.add_(update, alpha=-group["lr"] * self.inner["rate"])


class ByIndex(Optimizer):
    """A list in the order of the parameters, made in the constructor, in a state dict of its own; reads the values."""

    def __init__(self, params: Iterable[Any], lr: float, *, decay: float = 0.8) -> None:
        super().__init__(params, {"lr": lr})
        self.decay, self.count = decay, 0
        self.moments = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        self.first = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kept": (self.count, [*self.moments, *self.first])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "kept"})
        self.count, kept = state_dict["kept"]
        self.moments, self.first = kept[: len(kept) // 2], kept[len(kept) // 2 :]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.count += 1
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        for (param, group), moment, first in zip(params, self.moments, self.first, strict=True):
            if param.grad is not None:
                moment.mul_(self.decay).add_(param.grad)
                param.add_(cube(moment) + 0.1 * (param - first), alpha=-group["lr"] / self.count)


# Draws a vector on every step, and sometimes refreshes its factor, as PSGD does.
Probing = toy("probing")("""
    if not state:
        state["factor"] = torch.eye(len(param), dtype=param.dtype)
    probe = torch.randn(len(param), dtype=param.dtype)
    if torch.rand(()).item() < 0.6:
        state["factor"].addr_(probe, grad @ grad.T @ probe, alpha=-0.01)
    param.add_(state["factor"] @ grad, alpha=-group["lr"])
""")
MAKERS: dict[str, Callable[[Params], Optimizer]] = {
    "by address": lambda params: ByAddress(params, lr=0.05),
    "by index": lambda params: ByIndex(params, 0.05, decay=0.7),
    "probing": lambda params: Probing(params, lr=0.05),
}


class Oracle:
    """What a run has to give: a plain optimizer per matrix, which draws from generators of the matrix."""

    def __init__(self, name: str, values: list[Tensor]) -> None:
        self.params = [nn.Parameter(value.clone()) for value in values]
        device = torch.device("cpu")
        self.generators = [MatrixGenerators(f"group0.param{i}", device) for i in range(len(values))]
        self.optimizers = []
        for param, generators in zip(self.params, self.generators, strict=True):
            with generators.in_use():
                self.optimizers.append(MAKERS[name]([param]))

    def set(self, name: str, value: Any) -> None:
        """Change a hyperparameter."""
        for optimizer in self.optimizers:
            optimizer.param_groups[0][name] = value

    def step(self, grads: list[Tensor | None]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        for param, optimizer, generators in zip(self.params, self.optimizers, self.generators, strict=True):
            if param.grad is not None:
                with generators.in_use():
                    optimizer.step()
