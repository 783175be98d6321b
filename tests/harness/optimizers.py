"""Optimizers to test with: torch's Muon with every kind of group, and small Muons of stacks [experts, m, n]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import guards
from torch.optim import Muon, Optimizer

from canzona_compile.capture.templates import Capture
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.replica.homes import signature
from canzona_compile.session import planning, rates

Shape = tuple[int, ...]
SHARED_BY = rates.shared_by


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A parameter group: its matrices and its hyperparameters."""

    shapes: tuple[Shape, ...]
    options: dict[str, Any] = field(default_factory=dict)


# Every pair of nesterov and adjust_lr_fn, each with a shape of its own: six templates. Rows that two
# ranks cannot share evenly, fewer rows than ranks, columns likewise, and shapes that batch.
MUON_GROUPS = (
    GroupSpec(((64, 48),) * 3, {"nesterov": True, "adjust_lr_fn": None}),
    GroupSpec(((31, 17),), {"nesterov": False, "adjust_lr_fn": None, "weight_decay": 0.0}),
    GroupSpec(((2, 30),), {"nesterov": True, "adjust_lr_fn": "match_rms_adamw"}),
    GroupSpec(((48, 64),) * 2, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "lr": 3e-3}),
    GroupSpec(((17, 31),), {"nesterov": True, "adjust_lr_fn": "original", "momentum": 0.8}),
    GroupSpec(((5, 40),), {"nesterov": False, "adjust_lr_fn": "original", "weight_decay": 0.3}),
)
# Rows that divide by 2, 3 and 4, and rows that do not.
EVEN, UNEVEN = ((48, 24), (24, 60), (12, 36)), ((31, 17), (17, 31), (5, 40))
# Stacks of experts: entries that ranks cannot share evenly, or fewer than there are ranks. Their dims are
# such that a batched product of any number of entries gives the bits of the single ones.
STACK_GROUPS = (
    GroupSpec(((8, 64, 32),) * 2, {"nesterov": True}),
    GroupSpec(((6, 32, 48),), {"nesterov": False}),
    GroupSpec(((3, 32, 64),), {"nesterov": True, "weight_decay": 0.0}),
)


def shapes_of(groups: Sequence[GroupSpec]) -> list[Shape]:
    return [shape for group in groups for shape in group.shapes]


def param_groups(groups: Sequence[GroupSpec], params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, in the order of `shapes_of`."""
    left = iter(params)
    return [{"params": [next(left) for _ in g.shapes], **g.options} for g in groups]


class Scheduler:
    """Changes on every step what a schedule may change: lr, momentum and weight decay."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = optimizer.param_groups
        names = ("lr", "momentum", "weight_decay")
        self.first = [{name: group[name] for name in names} for group in self.groups]

    def set(self, step: int) -> None:
        for i, (group, first) in enumerate(zip(self.groups, self.first, strict=True)):
            group["lr"] = first["lr"] * (0.3 + abs((step + i) % 9 - 4) / 4)
            group["momentum"] = first["momentum"] * (1 - 0.01 * (step % 7))
            group["weight_decay"] = first["weight_decay"] * (1 + 0.1 * step)


def muon(params: Iterable[dict[str, Any]]) -> Optimizer:
    return Muon(params, lr=2e-2, weight_decay=0.1)


class StackMuon(Optimizer):
    """Muon of stacks of matrices: one device, batched products, no loop over the experts."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 2e-2,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def rate(self, lr: float, shape: Shape) -> float:
        return float(lr * max(1.0, shape[-2] / shape[-1]) ** 0.5)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        average = state["momentum_buffer"]
        average.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(orthogonal(update), alpha=-self.rate(group["lr"], tuple(param.shape)))


class BatchedMuon(Optimizer):
    """Muon that stacks matrices of one shape, as optimuon does: products of stacks round otherwise, mostly odd ones.

    Args:
        clip: the most that the norm of all gradients may be.
        average: divide updates by their number.
        largest: a number of elements. Larger matrices are divided by the norm of all that have their shape.
        dtype: of products.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        clip: float = 0.0,
        average: bool = False,
        largest: float = math.inf,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.clip, self.average, self.largest, self.dtype = clip, average, largest, dtype
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[Shape, list[Tensor]] = {}
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                alike.setdefault(tuple(param.shape), []).append(param)
                average = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                average.lerp_(param.grad, 0.1)
            if self.clip:
                norm = torch.stack(torch._foreach_norm([param.grad for param in params])).norm()
                torch._foreach_mul_([self.state[param]["momentum_buffer"] for param in params], self.clip / norm)
            for shape, own in alike.items():
                updates = torch.stack([self.state[param]["momentum_buffer"] for param in own])
                if len(shape) == 2:  # one matrix alone is no stack
                    updates = orthogonal_of_any(updates if len(own) > 1 else updates[0], self.dtype).view(-1, *shape)
                if own[0].numel() > self.largest:
                    updates = updates / updates.norm()
                for param, update in zip(own, updates.unbind(), strict=True):
                    param.sub_(update, alpha=group["lr"] / (len(params) if self.average else 1))


class EntriesMuon(StackMuon):
    """Steps further the more entries a stack has: a part of the stack is not to be taken for the whole."""

    def rate(self, lr: float, shape: Shape) -> float:
        return float(lr * shape[0] ** 0.5)


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz on every matrix of a stack, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-2, -1) if tall else x
    x = x / x.square().sum(dim=(-2, -1), keepdim=True).sqrt().clamp(min=1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(-2, -1))
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.transpose(-2, -1) if tall else x


def orthogonal_of_any(x: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """Newton-Schulz on one matrix, or on every matrix of a stack, by the products of each."""
    a, b, c = 3.4445, -4.7750, 2.0315
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    x = x.to(dtype)
    x = x / (x.norm() if x.ndim == 2 else x.flatten(1).norm(dim=1)[:, None, None])
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


# -- shared captures -------------------------------------------------------------------------------

PARTS = ("kinds", "counts", "_separable", "_rehearsals")  # of a Capture
# Attributes that every optimizer has, or that wrap() and schedulers add.
STANDARD = {*vars(Optimizer([torch.nn.Parameter(torch.zeros(1))], {})), "canzona", "step"}
Shared = dict[Any, Any]  # by class, attributes and groups: what optimizers alike captured
SHARED: Shared = {}


def share_captures(optimizer: Any, among: Shared = SHARED) -> None:
    """Let a wrapped optimizer use what others like it captured in this process.

    A capture takes a third of a second, that of an optimizer with periodic work many; it depends on no layout, and
    tests need the same ones over and over. All ranks must do the same, as templates are numbered. What this must not
    hide: tests that count captures, or change how they are made, do without.

    Args:
        among: those that may share, for tests to whom the numbers of templates matter.
    """
    for one in getattr(optimizer, "optimizers", [optimizer]):  # of a chain
        adopt(one.canzona.session.capture, among)


@contextmanager
def shared_captures(among: Shared = SHARED) -> Iterator[None]:
    """Inside this context, optimizers share captures from the moment that they are wrapped: `zero1` captures then."""

    def shared(optimizer: Optimizer, maker: Any = None) -> Capture:
        capture = Capture(optimizer, maker)
        if "param_groups" in vars(optimizer):  # a copy gets them later, see `share_captures`
            adopt(capture, among)
        return capture

    with mock.patch.object(planning, "Capture", shared):
        yield


def offline_capture(optimizer: Optimizer) -> Capture:
    """A `Capture` as `plan()` makes one, that shares as well."""
    capture = Capture(optimizer)
    adopt(capture, _offline)
    return capture


_offline: Shared = {}


def attributes_of(optimizer: Optimizer) -> tuple[tuple[str, str], ...] | None:
    """Attributes of its own, as a key; None if there are some on which its step may depend in any way."""
    own = {k: v for k, v in vars(optimizer).items() if k not in STANDARD}
    simple = all(isinstance(v, int | float | str | None) for v in own.values())
    return tuple(sorted((k, repr(v)) for k, v in own.items())) if simple else None


def adopt(capture: Capture, among: Shared) -> None:
    """Replace what a capture has learned by what others have; the first one of its like gives its own."""
    optimizer = capture.optimizer
    attributes = attributes_of(optimizer)
    if attributes is None or capture.maker is not None:
        return
    groups = frozenset(signature(group) for group in optimizer.param_groups)
    key = (plain_class(optimizer), attributes, groups)
    parts = among.setdefault(key, [getattr(capture, name) for name in PARTS])
    for name, part in zip(PARTS, parts, strict=True):
        setattr(capture, name, part)


def plans_share_captures() -> mock._patch[Any]:
    """A patch: plans made offline need the same captures over and over, and all captures the same checks."""
    from canzona_compile.tools.planning import offline

    return mock.patch.object(offline, "Capture", offline_capture)


forgotten = 0  # how often a capture of this process forgot its kinds, see `keep_what_is_shared`


def keep_what_is_shared() -> None:
    """For the whole process, and those that are forked from it: what one capture forgets, those that share it keep.

    After an error ranks forget, and capture anew if they go on. Without this, whatever came after the error on these
    ranks would do so too, rank by rank.
    """
    forget = Capture.forget_kinds

    def forget_kinds(self: Capture) -> None:
        global forgotten
        forgotten += 1
        self.kinds, self._separable = dict(self.kinds), dict(self._separable)
        forget(self)

    Capture.forget_kinds = forget_kinds  # type: ignore[method-assign]


def leave_guards_unmeasured() -> None:
    """For the whole process, and those that are forked from it: Dynamo does not measure how long its guards take.

    For that measurement, which goes to a log that no test reads, it flushes the cache of the processor.
    """
    guards.profile_guard_manager = lambda *_: 0.0


def leave_rates_assumed() -> None:
    """The same: ranks measure no rates before they plan, so that plans are the same in each run."""
    rates.shared_by = lambda _: set()


@contextmanager
def rates_measured() -> Iterator[None]:
    """Inside this context, ranks measure as they do for users."""
    rates.shared_by = SHARED_BY
    try:
        yield
    finally:
        leave_rates_assumed()
