"""Passes run in order, are verified after each, and leave a history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from canzona_compile.errors import CanzonaError, InvalidStep, PipelineError, UnsupportedOptimizer
from canzona_compile.ir.pipeline import Pass, PassHistory, PassRecord, check_order, run
from canzona_compile.ir.step import Form, Step
from tests.harness.samples import toy_step


@dataclass(frozen=True)
class Does:
    """A pass that does what a function does."""

    name: Any
    requires: Any
    ensures: Any
    work: Callable[[Step], Step]

    def __call__(self, step: Step) -> Step:
        return self.work(step)


def owned_by(owner: tuple[int, int]) -> Step:
    """The toy whose task a has this owner."""
    owned = toy_step(Form.OWNED)
    a, *others = owned.tasks
    return replace(owned, tasks=(replace(a, owner=owner), *others))


def own(owner: tuple[int, int] = (0, 0)) -> Does:
    return Does("own", Form.PLACED, Form.OWNED, lambda step: owned_by(owner))


def fail(error: Exception) -> Does:
    def work(step: Step) -> Step:
        raise error

    return Does("fail", Form.PLACED, Form.PLACED, work)


CUT = Does("cut", Form.CAPTURED, Form.PLACED, lambda step: toy_step(Form.PLACED))
FORGET = Does("forget", Form.PLACED, Form.OWNED, lambda step: step)  # what it promised


def test_run_returns_the_last_step_and_a_history() -> None:
    first = toy_step(Form.CAPTURED)
    last, history = run(first, [CUT, own()])
    assert last.form is Form.OWNED
    assert [record.name for record in history.records] == ["cut", "own"]
    assert history.records[0].before is first
    assert history.records[0].after is history.records[1].before
    assert history.records[1].after is last
    assert all(record.seconds >= 0 for record in history.records)
    assert run(first, []) == (first, PassHistory())


def test_records_count_nodes_and_operators() -> None:
    _, history = run(toy_step(Form.CAPTURED), [CUT, own()])
    cut, owned = history.records
    # Two cuts of one template: every operator once more.
    assert cut.ops == {
        "aten._to_copy.default": 1,
        "aten.add.Tensor": 1,
        "aten.lerp.Scalar": 1,
        "aten.mm.default": 2,
        "aten.mul.Tensor": 1,
        "aten.permute.default": 1,
    }
    assert cut.nodes > 0
    assert (owned.nodes, owned.ops) == (0, {})


def test_history_finds_steps_by_form_and_by_pass() -> None:
    last, history = run(toy_step(Form.CAPTURED), [CUT, own()])
    assert history.step_at(Form.CAPTURED) is history.records[0].before
    assert history.step_at("placed") is history.step_at("cut") is history.records[0].after
    assert history.step_at(Form.OWNED) is history.step_at("own") is last
    with pytest.raises(CanzonaError, match="no step 'routed' was kept") as caught:
        history.step_at(Form.ROUTED)
    assert caught.value.hint == "there are cut, own, captured, placed, owned"
    with pytest.raises(CanzonaError, match="no step 'captured' was kept"):
        PassHistory().step_at("captured")


# -- order -------------------------------------------------------------------------------------


def order_error(passes: list[Pass]) -> str:
    with pytest.raises(PipelineError) as caught:
        check_order(passes, Form.CAPTURED)
    return str(caught.value)


def test_order() -> None:
    check_order([CUT, own()], Form.CAPTURED)
    check_order([], Form.EMITTED)
    assert order_error([own()]) == (
        "own needs form placed, but the step given to it is of form captured\n"
        "  hint: put a pass that ensures placed before own\n"
        "  see:  docs/troubleshooting.md#pipelineerror"
    )
    assert order_error([CUT, own(), own()]) == (
        "own needs form placed, but own leaves form owned\n"
        "  hint: put own before the passes that go beyond placed\n"
        "  see:  docs/troubleshooting.md#pipelineerror"
    )
    assert "cut needs form captured, but cut leaves form placed" in order_error([CUT, CUT])


def test_a_wrong_order_is_found_before_any_pass_runs() -> None:
    seen: list[PassRecord] = []
    with pytest.raises(PipelineError, match="cut needs form captured"):
        run(toy_step(Form.CAPTURED), [CUT, fail(ValueError()), CUT], [seen.append])
    assert not seen


# -- failures ----------------------------------------------------------------------------------


def test_a_broken_promise_names_the_pass_and_the_task() -> None:
    with pytest.raises(InvalidStep) as caught:
        run(toy_step(Form.CAPTURED), [CUT, own((5, 5))])
    assert str(caught.value) == (
        "its owner (5, 5) is outside of grid 2x2{0,1,2,3}\n"
        "  at:   a, after pass own\n"
        "  hint: a bug in own: the step before it was valid\n"
        "  see:  docs/troubleshooting.md#invalidstep"
    )
    assert isinstance(caught.value.__cause__, InvalidStep)


def test_a_broken_start_is_no_fault_of_a_pass() -> None:
    step = toy_step(Form.CAPTURED)
    broken = replace(step, templates=())
    with pytest.raises(InvalidStep, match="no template 'toy'") as caught:
        run(broken, [CUT])
    assert caught.value.__notes__ == ["before any pass ran"]


def test_a_pass_that_forgets_its_form() -> None:
    with pytest.raises(InvalidStep, match="forget promises form owned and returned placed"):
        run(toy_step(Form.PLACED), [FORGET])


def test_what_a_pass_raises_names_it_and_those_before() -> None:
    with pytest.raises(PipelineError) as caught:
        run(toy_step(Form.CAPTURED), [CUT, fail(KeyError("x"))])
    assert "fail failed: KeyError: 'x'\n  at:   pass fail, after cut" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PipelineError, match="pass fail, after no other pass"):
        run(toy_step(Form.PLACED), [fail(ValueError("x"))])


def test_errors_of_ours_pass_through_with_a_note() -> None:
    error = UnsupportedOptimizer("it looks ahead", at="w", hint="do not")
    with pytest.raises(UnsupportedOptimizer) as caught:
        run(toy_step(Form.CAPTURED), [CUT, fail(error)])
    assert caught.value is error
    assert error.__notes__ == ["in pass fail, after cut"]


# -- observers ---------------------------------------------------------------------------------


def test_observers_see_verified_steps_only() -> None:
    seen: list[PassRecord] = []
    with pytest.raises(InvalidStep):
        run(toy_step(Form.CAPTURED), [CUT, own((5, 5))], [seen.append])
    assert [record.name for record in seen] == ["cut"]
