"""Every scheduler of torch drives a wrapped optimizer as it drives the plain one, and costs no captures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from tests.harness.marks import first
from tests.harness.pairs import Pair, same_bits
from tests.harness.traps.grammar import toy

STEPS = 12
ONE_SHAPE = ((6, 4),)


# Reads two betas, as Adam does, but works on whole matrices: schedules that cycle momentum cycle the first.
Betas = toy("betas", hypers="lr=0.05, betas=(0.9, 0.99)")("""
    if not state:
        state.update(mean=torch.zeros_like(param), square=torch.zeros_like(param))
    first, second = group["betas"]
    state["mean"].lerp_(grad, 1 - first)
    state["square"].mul_(second).addcmul_(grad, grad, value=1 - second)
    update = state["mean"] / (state["square"].sqrt() + 1e-8)
    param.add_(cube(update / update.norm()), alpha=-group["lr"])
""")


def halves(step: int) -> float:
    return 0.5 ** (step % 4)


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, halves),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7 + 0.1 * (step % 4)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5, 9], gamma=0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, T_max=20)], milestones=[5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=8),
}
REACH_ZERO = {"PolynomialLR", "CosineAnnealingLR"}
CYCLE_MOMENTUM = ("CyclicLR", "OneCycleLR")


def of_torch() -> set[str]:
    """The schedulers that this torch has; the two left out are bases."""
    found = [k for _, k in inspect.getmembers(lr_scheduler, inspect.isclass) if issubclass(k, LRScheduler)]
    return {kind.__name__ for kind in found} - {"LRScheduler", "_LRScheduler"}


def hypers(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def drive(pair: Pair, make: Callable[[Optimizer], LRScheduler]) -> tuple[list[dict[str, Any]], list[int]]:
    """Steps under a schedule: the hyperparameters that each step saw, and captures after each step.

    Captures are shared between the tests, to be quick: a capture per value would show all the same, as every
    schedule has values of its own.
    """
    schedulers: list[Any] = [make(optimizer) for optimizer in pair.both]
    seen, captures = [], []
    for step in range(STEPS):
        # Tensors among them would be written in place later.
        seen.append({k: v.item() if isinstance(v, Tensor) else v for k, v in hypers(pair.wrapped)[0].items()})
        pair.step()
        captures.append(pair.report.captures)
        for scheduler in schedulers:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(float(max(5 - step, 3)))
            else:
                scheduler.step()
        plain, wrapped = (hypers(o)[0] for o in pair.both)
        assert plain.keys() == wrapped.keys()
        assert [name for name in plain if not same_bits(plain[name], wrapped[name])] == []
    assert pair.report.fallbacks == {}
    return seen, captures


def test_every_scheduler_of_torch_is_listed() -> None:
    assert of_torch() | {"SWALR"} == SCHEDULERS.keys()


@pytest.mark.parametrize("name", first(SCHEDULERS, 6))
def test_muon(name: str) -> None:
    """A hyperparameter of zero is another kind of step, as optimizers branch on it: one more capture for all zeros."""
    pair = Pair(shapes=ONE_SHAPE)
    seen, captures = drive(pair, SCHEDULERS[name])
    assert len({hyper["lr"] for hyper in seen}) >= 2
    assert any(hyper["lr"] == 0 for hyper in seen) == (name in REACH_ZERO)
    assert captures[1] > 0
    assert captures[-1] <= captures[1] + (name in REACH_ZERO)


@pytest.mark.parametrize("name", first(["LambdaLR", "PolynomialLR", "OneCycleLR", "ReduceLROnPlateau"]))
def test_a_tensor_as_rate(name: str) -> None:
    """Schedulers fill such a rate in place: no assignment tells of the change. A zero in it is no other kind."""
    pair = Pair(lambda params: AdamW(params, lr=torch.tensor(0.1)), ONE_SHAPE)
    seen, captures = drive(pair, SCHEDULERS[name])
    assert len({hyper["lr"] for hyper in seen}) >= 2
    assert captures[-1] == captures[1] > 0


@pytest.mark.parametrize("name", CYCLE_MOMENTUM)
def test_momentum_is_cycled(name: str) -> None:
    seen, _ = drive(Pair(shapes=ONE_SHAPE), SCHEDULERS[name])
    assert len({hyper["momentum"] for hyper in seen}) >= 4


@pytest.mark.parametrize("make", [Betas, AdamW], ids=["matrices", "elementwise"])
@pytest.mark.parametrize("name", first(CYCLE_MOMENTUM))
def test_betas_are_cycled(name: str, make: Callable[[list[Any]], Optimizer]) -> None:
    pair = Pair(make, ONE_SHAPE)
    seen, captures = drive(pair, SCHEDULERS[name])
    assert len({hyper["betas"] for hyper in seen}) >= 4
    assert len({hyper["betas"][1] for hyper in seen}) == 1
    if make is AdamW and torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 does not trace a number that changes to the power of a tensor: many captures")
    assert captures[-1] == captures[1] > 0


def test_a_schedule_goes_on_from_its_saved_state() -> None:
    make = SCHEDULERS["OneCycleLR"]
    pair = Pair(shapes=ONE_SHAPE)
    schedulers = [make(optimizer) for optimizer in pair.both]
    for step in range(STEPS):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        if step == 5:
            saved = [(o.state_dict(), s.state_dict()) for o, s in zip(pair.both, schedulers, strict=True)]
            schedulers = [make(optimizer) for optimizer in pair.both]
            assert pair.wrapped.param_groups[0]["lr"] != saved[1][0]["param_groups"][0]["lr"], "nothing to restore"
            for optimizer, scheduler, (state, schedule) in zip(pair.both, schedulers, saved, strict=True):
                optimizer.load_state_dict(state)
                scheduler.load_state_dict(schedule)
        assert hypers(pair.wrapped) == hypers(pair.plain)
    assert pair.report.fallbacks == {}
