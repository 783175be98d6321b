"""What a step driver says of the next step: nothing in a steady state, else a change that ranks can compare."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from canzona_compile.errors import InvalidGradient
from canzona_compile.replica.watch import ChangeWatch
from canzona_compile.session.step_driver import ChangeKind, StepChange, StepDriver
from tests.harness import toys
from tests.harness.pairs import Pair, feed, params_of


def stepped(kind: Any = toys.Counting, steps: int = 3) -> tuple[Pair, StepDriver]:
    """A pair after some steps, with gradients for the next one, and the driver of the wrapped optimizer."""
    pair = Pair(kind)
    pair.steps(steps)
    feed(pair.wrapped, steps)
    driver = pair.wrapped.canzona.session.driver
    assert isinstance(driver, StepDriver)
    return pair, driver


def test_a_steady_step_is_no_change_and_makes_no_program() -> None:
    _, driver = stepped()
    before = driver.last
    assert driver.look() is None
    assert driver.step() is False
    assert driver.last is before is not None


def test_first_steps_are_told_and_the_next_program_is_known() -> None:
    _, driver = stepped(steps=1)
    assert len(driver.programs) == 1, "first steps are not kept; the next step's program is made ahead"
    assert driver.last is next(iter(driver.programs))
    assert driver.look() is None
    driver.step()
    assert len(driver.programs) == 1


def test_missing_gradients_change_what_shared_tasks_take_part() -> None:
    """As on ranks: alone, a rank has nobody to tell."""
    pair, driver = stepped()
    first, second = driver.store.params
    params_of(pair.wrapped)[0].grad = None
    assert driver.look() is None
    driver._shared = dict.fromkeys((first, second), (0, 1))
    text = f"no gradient for {first}"
    assert driver.look() == StepChange(ChangeKind.PRESENCE, text, {(0, 1): text}, "other gradients are there")


def test_new_variants_of_shared_tasks_are_a_change_once() -> None:
    _, driver = stepped()
    driver._shared, driver._met = dict.fromkeys(driver.store.params, (0, 1)), set()
    driver._assignment = ()
    change = driver.look()
    assert change is not None
    assert change.kind is ChangeKind.VARIANTS
    assert change.text.startswith("new code for group0.param0 and 0 more")
    driver.step()
    assert driver.look() is None


def test_other_parameters_need_another_plan() -> None:
    pair, driver = stepped()
    pair.wrapped.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(6, 4))
    assert driver.look() == StepChange(ChangeKind.REPLAN, "re-plan: the parameters changed")


def test_the_same_memory_in_another_form_needs_another_plan() -> None:
    pair, driver = stepped()
    param = params_of(pair.wrapped)[0]
    param.grad = None
    param.data = param.data.view(-1)
    told = "re-plan: the memory or the attributes of parameters were replaced"
    assert driver.look() == StepChange(ChangeKind.REPLAN, told)


def test_state_that_users_remove_is_freed() -> None:
    """The plan does not need the state of a parameter that steps elementwise, so it must not keep it alive."""
    vector = torch.nn.Parameter(torch.ones(4))
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(4, 4)), vector], lr=0.1, momentum=0.9)
    held = ChangeWatch(optimizer)
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param] = {"momentum_buffer": torch.ones_like(param)}
    matrix = optimizer.param_groups[0]["params"][0]
    held.hold_state({"matrix": matrix})
    buffer = weakref.ref(optimizer.state.pop(vector)["momentum_buffer"])
    assert buffer() is None
    assert held.cleared() == held.cleared() == []
    optimizer.state[matrix] = {}
    assert held.cleared() == ["matrix"]


def test_other_gradients_are_refused() -> None:
    pair, driver = stepped()
    param = params_of(pair.wrapped)[0]
    param.grad = None
    param.grad_dtype = torch.float64
    param.grad = torch.ones(param.shape, dtype=torch.float64)
    with pytest.raises(InvalidGradient, match="float64"):
        driver.look()


def test_forgotten_programs_are_made_anew() -> None:
    _, driver = stepped()
    driver.forget_programs()
    assert (driver.last, len(driver.programs)) == (None, 0)
    assert driver.look() is None
    driver.step()
    assert driver.last is not None
