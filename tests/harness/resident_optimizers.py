"""Optimizers that keep on themselves what belongs to parameters, as published ones do, and some that draw.

None of them can be stepped on a twin. Those that are independent run as one object per matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.replica.randomness import MatrixGenerators
from tests.harness.toy_optimizers import PerParameter, State, cube


class MomentsByParameter(Optimizer):
    """A map whose keys are the parameters themselves, filled when they first step."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.moments: dict[Tensor, Tensor] = {}
        self.steps_of: dict[int, int] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                moment = self.moments.setdefault(param, torch.zeros_like(param))
                self.steps_of[id(param)] = self.steps_of.get(id(param), 0) + 1
                moment.lerp_(param.grad, 1 - group["beta"])
                corrected = moment / (1 - group["beta"] ** self.steps_of[id(param)])
                param.add_(cube(corrected), alpha=-group["lr"])


class MomentsByIndex(Optimizer):
    """A list in the order of the parameters, made in the constructor; a counter for all of them together."""

    def __init__(self, params: Iterable[Any], lr: float, *, decay: float = 0.8) -> None:
        super().__init__(params, {"lr": lr})
        self.decay, self.count = decay, 0
        self.moments = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.count += 1
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        for (param, group), moment in zip(params, self.moments, strict=True):
            if param.grad is not None:
                moment.mul_(self.decay).add_(param.grad)
                param.add_(cube(moment), alpha=-group["lr"] / self.count)


class CountingTogether(MomentsByParameter):
    """Counts for all parameters, and steps less the later it is."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.clock = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.clock["steps"] += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(self.clock["steps"])
        super().step()


@dataclass(frozen=True)
class BlockConfig:
    """Options in an object of their own."""

    size: int = 3
    every: int = 2


class BlockPreconditioner:
    """The two factors of one block of a matrix, and their roots."""

    def __init__(self, rows: int, columns: int, config: BlockConfig) -> None:
        self.config = config
        self.factors = [torch.zeros(rows, rows), torch.zeros(columns, columns)]
        self.roots = [torch.eye(rows), torch.eye(columns)]
        self.step = torch.tensor(0)
        self.phase = "fresh"

    def precondition(self, grad: Tensor) -> Tensor:
        self.factors[0].add_(grad @ grad.T)
        self.factors[1].add_(grad.T @ grad)
        if int(self.step) % self.config.every == 0:
            for i, factor in enumerate(self.factors):
                values, vectors = torch.linalg.eigh(factor + 1e-3 * torch.eye(len(factor)))
                self.roots[i] = vectors @ torch.diag(values.clamp(min=1e-6).rsqrt().sqrt()) @ vectors.T
            self.phase = "rooted"
        self.step += 1
        return self.roots[0] @ grad @ self.roots[1]


class BlockedShampoo(Optimizer):
    """Lists of blocks with helper objects, all made in the constructor for the shapes that there are."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, config: BlockConfig | None = None) -> None:
        self.config = config or BlockConfig()
        super().__init__(params, {"lr": lr, "beta": 0.9})
        self.blocks: list[list[BlockPreconditioner]] = []
        for group in self.param_groups:
            for param in group["params"]:
                parts = [part for rows in param.split(self.config.size) for part in rows.split(self.config.size, dim=1)]
                self.blocks.append([BlockPreconditioner(*part.shape, self.config) for part in parts])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        for (param, group), blocks in zip(params, self.blocks, strict=True):
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["average"] = torch.zeros_like(param)
            state["average"].lerp_(param.grad, 1 - group["beta"])
            left = iter(blocks)
            rows = [
                torch.cat([next(left).precondition(part) for part in row.split(self.config.size, dim=1)], dim=1)
                for row in state["average"].split(self.config.size)
            ]
            param.add_(torch.cat(rows), alpha=-group["lr"])


class Probing(PerParameter):
    """Draws a vector on every step, and sometimes refreshes its factor, as PSGD does."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["factor"] = torch.eye(len(param), dtype=param.dtype)
        probe = torch.randn(len(param), dtype=param.dtype)
        if torch.rand(()).item() < 0.6:
            state["factor"].addr_(probe, grad @ grad.T @ probe, alpha=-0.01)
        param.add_(state["factor"] @ grad, alpha=-group["lr"])


class ProbingByParameter(MomentsByParameter):
    """Draws, and keeps what it does on itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(torch.randn_like(param), alpha=0.1)
        super().step()


class Forgetful(MomentsByParameter):
    """Forgets an argument of its constructor."""

    def __init__(self, params: Iterable[Any], basis: float, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.scales = {"all": basis * 2}


class Renaming(MomentsByParameter):
    """Keeps an argument that has a default under another name."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, power: float = 1.0) -> None:
        super().__init__(params, lr)
        self.powers = [power]


class SharedBuffer(MomentsByIndex):
    """Its parameters add to one buffer, which all of them read."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.shared = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.shared.add_(param.grad.square().sum())
                    param.grad.div_(1 + self.shared)
        super().step()


class Anchored(MomentsByParameter):
    """Keeps the values that parameters had at the beginning."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.anchors = {id(p): p.detach().clone() for group in self.param_groups for p in group["params"]}


class Logging(MomentsByParameter):
    """Keeps a log that grows."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step()
        self.norms.append(sum(float(p.norm()) for group in self.param_groups for p in group["params"]))


MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "by parameter": lambda params: MomentsByParameter(params, lr=0.05),
    "by index": lambda params: MomentsByIndex(params, 0.05, decay=0.7),
    "blocked": lambda params: BlockedShampoo(params, config=BlockConfig(4, 3)),
    "probing": lambda params: Probing(params, lr=0.05),
    "probing by parameter": lambda params: ProbingByParameter(params, lr=0.05),
    "counting": CountingTogether,
}
DRAWING = {"probing", "probing by parameter"}


class Oracle:
    """What a run has to give: the plain optimizer of all parameters, or one per matrix if it draws random numbers."""

    def __init__(self, name: str, values: list[Tensor]) -> None:
        self.params = [nn.Parameter(value.clone()) for value in values]
        apart = name in DRAWING
        self.generators = [
            MatrixGenerators(f"group0.param{i}", torch.device("cpu")) for i in range(len(values) if apart else 1)
        ]
        self.optimizers = []
        for i, generators in enumerate(self.generators):
            with generators.in_use():
                self.optimizers.append(MAKERS[name](self.params[i : i + 1] if apart else list(self.params)))

    def set(self, name: str, value: Any) -> None:
        """Change a hyperparameter."""
        for optimizer in self.optimizers:
            optimizer.param_groups[0][name] = value

    def step(self, grads: list[Tensor]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        for optimizer, generators in zip(self.optimizers, self.generators, strict=True):
            with generators.in_use():
                optimizer.step()
