"""After good steps one rank differs, or fails: every rank hears of it within a step, with nothing updated, or follows.

After an error ranks go on only if none of them has begun the step: else data of two steps would mix.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer

from canzona_compile.runtime import channel
from canzona_compile.session.step_driver import StepDriver
from tests.harness.layouts import Case, local
from tests.harness.marks import crossed
from tests.harness.pairs import params_of
from tests.harness.ranks import Died, run
from tests.harness.trainer import ALIKE, Outcome, Trainer, check, ready

CASES = [Case("fsdp", (3,)), Case("ddp", (2,))]
Edit = Callable[[Trainer], None]


def set_hyper(trainer: Trainer, name: str, value: Any) -> None:
    trainer.optimizer.param_groups[0][name] = value


def tensor_rate(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


def clear_state(trainer: Trainer) -> None:
    trainer.optimizer.state.clear()


def replace_leaf(trainer: Trainer) -> None:
    state = trainer.optimizer.state[trainer.params[1]]
    state["momentum_buffer"] = torch.zeros(24, 60)


def measured(trainer: Trainer) -> None:
    trainer.optimizer.canzona.measure()


def wrong_gradient(trainer: Trainer) -> None:
    trainer.params[2].grad = None
    param = trainer.params[2]
    zeros = torch.zeros_like(local(param), dtype=torch.float64)
    if isinstance(param, DTensor):
        zeros = DTensor.from_local(zeros, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
    param.grad_dtype = torch.float64
    param.grad = zeros


# -- one rank alone --------------------------------------------------------------------------------


def differs(case: Case, edit: Edit) -> Outcome:
    trainer = Trainer(case)
    trainer.go(3)
    trainer.feed()
    if dist.get_rank() == 1:
        edit(trainer)
    return trainer.last_step()


DIFFERENCES = [
    (partial(set_hyper, name="lr", value=0.5), {"RankMismatch"}, ("lr=0.5", "lr=0.02")),
    (partial(set_hyper, name="weight_decay", value=0.7), {"RankMismatch"}, ("weight_decay=0.7",)),
    (partial(set_hyper, name="note", value="more"), {"RankMismatch"}, ("note",)),
    (measured, {"RankMismatch"}, ("measure() has measured 0 of 5 steps",)),
    (tensor_rate, {"RankMismatch", "InvalidGradient"}, ()),
    (clear_state, {"RankMismatch"}, ("rank 0: no change", "the state of first")),
    (replace_leaf, {"RankMismatch", "CanzonaError"}, ("second", "replaced or removed")),
    (wrong_gradient, {"RankMismatch", "InvalidGradient"}, ("third", "float64")),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "difference"),
    crossed(CASES, DIFFERENCES),
    ids=lambda v: str(v) if isinstance(v, Case) else getattr(v[0], "__name__", "hyper"),
)
def test_one_rank_differs(case: Case, difference: tuple[Edit, set[str], tuple[str, ...]]) -> None:
    edit, errors, words = difference
    check(run(case.world, differs, case, edit, after=ready()), errors, *words)


def die(trainer: Trainer) -> None:
    os._exit(7)


def differs_by_rows_and_columns(case: Case, edit: Edit) -> Outcome:
    """Four ranks that announce as many do, in a pool of their own."""
    channel.MANY = case.world
    return differs(case, edit)


@pytest.mark.ranks
@pytest.mark.parametrize("difference", [DIFFERENCES[0], DIFFERENCES[-1]])
def test_one_of_many_ranks_differs(difference: tuple[Edit, set[str], tuple[str, ...]]) -> None:
    edit, errors, words = difference
    check(run(4, differs_by_rows_and_columns, Case("fsdp", (4,)), edit, fresh=True, after=ready()), errors, *words)


@pytest.mark.ranks
def test_one_of_many_ranks_dies() -> None:
    found = run(4, differs_by_rows_and_columns, Case("fsdp", (4,)), die, dying=[1], after=ready())
    assert found.pop(1) == Died(7)
    check(found, {"CanzonaError", "RankMismatch"}, "no answer from rank 1")


def unsummed_gradient(case: Case) -> Outcome:
    trainer = Trainer(case)
    trainer.go(3)
    trainer.feed()
    param: Any = trainer.params[2]
    placements = [Partial() if p.is_replicate() else p for p in param.placements]
    param.grad = DTensor.from_local(
        local(param.grad), param.device_mesh, placements, shape=param.shape, stride=param.stride()
    )
    return trainer.last_step()


@pytest.mark.ranks
def test_gradients_that_become_partial_are_refused() -> None:
    """Their fragments have the shapes that the plan was made for, and other values than the plan takes them for."""
    case = Case("hsdp", (2, 1))
    check(run(case.world, unsummed_gradient, case, after=ready()), {"InvalidGradient"}, "third", "Partial")


class Callback:
    """An object whose `repr` tells its address."""


def holds_an_object(case: Case) -> str:
    trainer = Trainer(case)
    trainer.go(2)
    # Objects that stay alive, so that the same line makes one at another address on every rank.
    others = [Callback() for _ in range(100 * dist.get_rank())]
    set_hyper(trainer, "callback", Callback())
    assert len(others) == 100 * dist.get_rank()
    return trainer.last_step().error


@pytest.mark.ranks
def test_addresses_of_objects_do_not_differ() -> None:
    """Ranks are processes of their own: what a group holds beside numbers lies elsewhere in each."""
    case = Case("fsdp", (2,))
    assert run(case.world, holds_an_object, case, after=ready()) == ["", ""]


def goes_on(case: Case, edit: Edit) -> str:
    """One rank has a wrong gradient once; all catch the error and go on."""
    trainer = Trainer(case, shapes=ALIKE)
    trainer.go(2)
    trainer.feed()
    if dist.get_rank() == 1:
        edit(trainer)
    error = trainer.last_step().error
    for param in trainer.params:
        param.grad = None
        param.grad_dtype = param.dtype
    trainer.share()
    trainer.take()
    trainer.go(2)
    trainer.check()
    return error


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_after_a_refused_gradient_all_go_on(case: Case) -> None:
    assert {*run(case.world, goes_on, case, wrong_gradient, after=ready())} <= {"RankMismatch", "InvalidGradient"}


# -- all ranks alike -------------------------------------------------------------------------------


def replace_memory(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        part = param._local_tensor if isinstance(param, DTensor) else param
        part.data = part.detach().clone()


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def delete_one(optimizer: Optimizer) -> None:
    del optimizer.state[params_of(optimizer)[1]]


def pop_one(optimizer: Optimizer) -> None:
    optimizer.state.pop(params_of(optimizer)[1])


def halve_one(optimizer: Optimizer) -> None:
    for value in optimizer.state[params_of(optimizer)[1]].values():
        if value is not None:  # it lies on an owner elsewhere
            value.mul_(0.5)


def follows(case: Case, edit: Callable[[Optimizer], None]) -> None:
    """The plain optimizer and the wrapped one are edited alike."""
    trainer = Trainer(case)
    trainer.go(3)
    for optimizer in trainer.both:
        edit(optimizer)
    trainer.go(3)
    trainer.check()


@pytest.mark.ranks
@pytest.mark.parametrize("edit", [replace_memory, clear, delete_one, pop_one, halve_one])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_change_alike(case: Case, edit: Callable[[Optimizer], None]) -> None:
    run(case.world, follows, case, edit, after=ready())


# -- errors on the way -----------------------------------------------------------------------------


def interrupted(case: Case, error: type[BaseException]) -> list[str]:
    """Rank 1 is interrupted when all exchanges of a step are behind it; then all try to go on."""
    trainer = Trainer(case)
    trainer.go(2)
    trainer.feed()
    found = []
    original = StepDriver.step

    def stopped(driver: StepDriver) -> bool:
        original(driver)
        raise error("stopped")

    if dist.get_rank() == 1:
        StepDriver.step = stopped  # type: ignore[method-assign]
    for _ in range(3):
        try:
            trainer.optimizer.step()
            found.append("")
        except BaseException as caught:
            found.append("\n".join([str(caught), *getattr(caught, "__notes__", ())]))
        StepDriver.step = original  # type: ignore[method-assign]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_ends_on_its_way_is_the_last(error: type[BaseException]) -> None:
    case = CASES[0]
    found = run(case.world, interrupted, case, error, fresh=True, after=ready())
    told = "\ncanzona_compile: this was raised by the step of rank 1" if error is ValueError else ""
    assert found[1][0] == f"stopped{told}"
    assert "failed midway" in found[1][1]
    for own in (found[0], found[2]):
        assert own[0] == ""  # it had nothing to wait for
        assert "failed on rank 1" in own[1]
        assert "failed midway" in own[2]
