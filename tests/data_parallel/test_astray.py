"""Ranks that go different ways under zero1 all raise before data moves, and go on as one or refuse to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import canzona_compile
from canzona_compile.runtime import waiter
from tests.data_parallel.models import CHEAP, MAKERS, Model, batch, different
from tests.data_parallel.runs import set_up, step_alone
from tests.harness.marks import crossed
from tests.harness.ranks import run


@dataclass
class Course:
    """What became of a rank.

    Attributes:
        said: the errors that it raised, each with the name of its step.
        apart: the parameters that differ from those of the first rank at the end.
        wrong: those that differ from what plain optimizers make of all steps but the one that went wrong.
    """

    said: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Trainee:
    """A model under zero1 with two optimizers, and plain ones that take the same gradients."""

    def __init__(self, gather: str, make: str = "sgd") -> None:
        self.rank = dist.get_rank()
        self.model, self.optimizers, self.handle = set_up(make=make, gather=gather)
        self.course = Course()
        self.plain = Model()
        self.expected = {**MAKERS, **CHEAP}[make](self.plain)

    def whole_step(self, step: int) -> None:
        self.backward(step)
        self.step()
        self.zero()

    def plain_step(self, step: int) -> None:
        """What a whole step is without zero1: the mean of the gradients of two ranks, and the optimizers."""
        for rank in (0, 1):
            (0.5 * self.plain(batch(step, rank))).backward()
        for optimizer in self.expected:
            optimizer.step()
            optimizer.zero_grad()

    def backward(self, step: int) -> None:
        self.model(batch(step, self.rank)).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @contextlib.contextmanager
    def noting(self, when: str) -> Iterator[None]:
        try:
            yield
        except (canzona_compile.CanzonaError, ValueError, KeyboardInterrupt) as error:
            self.course.said.append(f"{when}: {type(error).__name__}: {error}")

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def skips_a_step(own: Trainee) -> None:
    own.backward(1)
    if own.rank == 0:
        own.step()
    own.zero()
    own.backward(2)


def steps_twice(own: Trainee) -> None:
    own.backward(1)
    if own.rank == 1:
        own.optimizers[0].step()
    own.step()


def clips_alone(own: Trainee) -> None:
    own.backward(1)
    if own.rank == 1:
        own.handle.clip_grad_norm_(1.0)
    own.step()


def clips_by_another_norm(own: Trainee) -> None:
    own.backward(1)
    own.handle.clip_grad_norm_(0.5 + own.rank)
    own.step()


def zeroes_early(own: Trainee) -> None:
    own.backward(1)
    if own.rank == 1:
        own.zero()
    own.step()


def drops_a_gradient(own: Trainee) -> None:
    """On the rank that owns the parameter."""
    own.backward(1)
    fragment = own.handle.zero1.fragments["blocks.0.up.weight"]
    if any(part.owner == own.rank for part in fragment.slices):
        fragment.param.grad = None
    own.step()


def clears_state(own: Trainee) -> None:
    own.backward(1)
    if own.rank == 1:
        own.optimizers[0].state.clear()
    own.step()


def loads_state(own: Trainee) -> None:
    states = [o.state_dict() for o in own.optimizers]
    own.backward(1)
    if own.rank == 1:
        own.optimizers[1].load_state_dict(states[1])
    own.step()


def leaves_out_the_second_optimizer(own: Trainee) -> None:
    own.backward(1)
    own.optimizers[0].step()
    if own.rank == 0:
        own.optimizers[1].step()
    own.zero()
    own.backward(2)


def forgets_to_zero(own: Trainee) -> None:
    own.backward(1)
    own.step()
    if own.rank == 0:
        own.zero()
    own.backward(2)


def asks_for_a_gradient_alone(own: Trainee) -> None:
    own.backward(1)
    if own.rank == 1:
        own.model.head.weight.grad.full_tensor()
    own.step()


def measures_alone(own: Trainee) -> None:
    own.backward(1)
    if own.rank == 1:
        own.handle.measure(2)
    own.step()


def fails_in_backward(own: Trainee) -> None:
    """After it has begun to reduce; the user catches it and skips the batch."""
    hook = None
    if own.rank == 1:
        hook = own.model.embed.register_full_backward_hook(fail)
    try:
        own.backward(1)
    except ValueError as error:
        own.course.said.append(f"user: {error}")
    if hook is not None:
        hook.remove()
    own.step()


def fail(*_: Any) -> None:
    raise ValueError("out of memory")


def fails_at_once(own: Trainee) -> None:
    """Before a gradient is there: the batch is skipped, and ranks meet in the next one."""
    if own.rank == 1:
        hook = own.model.head.register_full_backward_pre_hook(fail)
        with contextlib.suppress(ValueError):
            own.backward(1)
        hook.remove()
        own.zero()
    own.whole_step(1)


def is_interrupted(own: Trainee) -> None:
    """While it waits for a reduction."""
    own.backward(1)
    if own.rank == 1:
        waiter = own.handle.zero1.reduction.waiter
        waiter.wait = interrupt
        try:
            own.handle.clip_grad_norm_(1.0)
        finally:
            del waiter.wait
    else:
        own.handle.clip_grad_norm_(1.0)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def is_interrupted_in_backward(own: Trainee) -> None:
    if own.rank == 1:
        hook = own.model.embed.weight.register_hook(interrupt)
        try:
            own.backward(1)
        finally:
            hook.remove()
    else:
        own.backward(1)


def has_a_step_that_fails(own: Trainee) -> None:
    """Of the optimizer's own code, in its middle."""
    own.backward(1)
    if own.rank == 1:
        driver = own.optimizers[0].canzona.session.driver
        driver._step_locally = fail
    own.step()


WAYS: dict[str, Callable[[Trainee], None]] = {
    way.__name__: way
    for way in (
        skips_a_step,
        steps_twice,
        clips_alone,
        clips_by_another_norm,
        zeroes_early,
        drops_a_gradient,
        clears_state,
        loads_state,
        leaves_out_the_second_optimizer,
        forgets_to_zero,
        asks_for_a_gradient_alone,
        measures_alone,
        fails_in_backward,
        fails_at_once,
        is_interrupted,
        is_interrupted_in_backward,
        has_a_step_that_fails,
    )
}


def astray(way: str, gather: str = "step", make: str = "sgd") -> Course:
    """Train a step, go different ways in the second one, and try to go on."""
    own = Trainee(gather, make)
    own.whole_step(0)
    own.plain_step(0)
    own.handle.synchronize()
    with own.noting("astray"):
        WAYS[way](own)
    return gone_on(own)


def reads_after_a_refusal(read: str) -> Course:
    """Step again on one rank while the other one goes on, both refused; then read what is on its way, and go on."""
    own = Trainee("forward")
    own.whole_step(0)
    with mock.patch.object(waiter, "PATIENCE", timedelta(seconds=0.1)), own.noting("astray"):
        own.backward(1)
        own.step()
        if own.rank == 1:
            own.step()
        own.zero()
        own.backward(2)
    for step in (0, 1):
        own.plain_step(step)
    with own.noting("reading"):
        READS[read](own)
    return gone_on(own)


def evaluates(own: Trainee) -> None:
    with torch.no_grad():
        own.model(batch(9, own.rank))


READS: dict[str, Callable[[Trainee], object]] = {
    "synchronize()": lambda own: own.handle.synchronize(),
    "the model's state_dict()": lambda own: own.model.state_dict(),
    "an evaluation": evaluates,
}


def gone_on(own: Trainee) -> Course:
    """What became of a rank that tries to go on."""
    own.zero()
    for step in (3, 4):
        own.plain_step(step)
        with own.noting("going on"):
            own.whole_step(step)
            own.handle.synchronize()
        own.zero()
    with own.noting("end"):
        own.handle.synchronize()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own.values(), group=dist.new_group(backend="gloo"))
    pairs = zip(own.model.named_parameters(), found[0], own.values(), strict=True)
    own.course.apart = [name for (name, _), one, two in pairs if not torch.equal(one, two)]
    own.course.wrong = different(own.model, own.plain)
    return own.course


GO_ON = {  # what both ranks say; training goes on
    "skips_a_step": r"made different calls.*rank 0: step\(\) of optimizer 0 \(\w+\) of model \d+; rank 1: backward\(\)",
    "steps_twice": r"made different calls.*rank 0: step\(\) of optimizer 1 .*; rank 1: step\(\) of optimizer 0",
    "clips_alone": r"made different calls.*rank 0: step\(\).*; rank 1: clip_grad_norm_\(\)",
    "clips_by_another_norm": "different arguments on some ranks .*rank 0: max_norm=0.5.*rank 1: max_norm=1.5",
    "zeroes_early": "no parameter has a gradient",
    "drops_a_gradient": "gradients are missing on some ranks only .*no gradient for blocks.0.up.weight",
    "leaves_out_the_second_optimizer": r"made different calls.*rank 0: step\(\) of optimizer 1",
    "forgets_to_zero": "backward ran again after",
    "asks_for_a_gradient_alone": r"rank 1: full_tensor\(\) of the gradient of head.weight",
    "measures_alone": r"measure\(\) has measured 0 of 2 steps",
}
HALF = {"steps_twice", "leaves_out_the_second_optimizer", "forgets_to_zero"}  # an optimizer had stepped, on both ranks
REFUSED = {  # what both ranks say, and what they say for ever
    "clears_state": "state differs between ranks .*rank 0: loaded 0 times; rank 1: loaded 0 times, and cleared",
    "loads_state": "state differs between ranks .*rank 0: loaded 0 times; rank 1: loaded 1 times",
    "fails_in_backward": "rank 1: CanzonaError: an exception interrupted a backward pass",
    "is_interrupted": "KeyboardInterrupt",
    "is_interrupted_in_backward": "KeyboardInterrupt|an exception interrupted a backward pass",
    "has_a_step_that_fails": "out of memory",
}
STATEFUL = {"clears_state", "loads_state"}
AFTER = partial(step_alone)


@pytest.mark.parametrize(("way", "gather"), crossed(list(GO_ON), ["step", "forward"]))
def test_both_ranks_raise_and_go_on(way: str, gather: str) -> None:
    for course in run(2, astray, way, gather, after=AFTER):
        assert len(course.said) == 1, course.said
        assert re.search(GO_ON[way], course.said[0], re.DOTALL), course.said
        assert course.apart == []
        assert way in HALF or course.wrong == []


@pytest.mark.parametrize("way", list(REFUSED))
def test_both_ranks_raise_and_refuse_to_go_on(way: str) -> None:
    make = "muon and adamw" if way in STATEFUL else "sgd"
    for course in run(2, astray, way, "step", make, fresh=True, after=partial(step_alone, make)):
        assert any(re.search(REFUSED[way], said, re.DOTALL) for said in course.said), course.said
        assert len([said for said in course.said if said.startswith("going on")]) == 2, course.said
        assert way == "has_a_step_that_fails" or course.apart == []


def test_a_batch_that_is_skipped_before_a_gradient_is_there() -> None:
    """No rank has begun to reduce then, so the other one waits for the next batch."""
    for course in run(2, astray, "fails_at_once", after=AFTER):
        assert (course.said, course.apart) == ([], [])


@pytest.mark.parametrize("read", READS)
def test_parameters_are_read_after_a_call_was_refused(read: str) -> None:
    """One rank had gathered more of them than the other when it was."""
    for course in run(2, reads_after_a_refusal, read, after=AFTER):
        assert len(course.said) == 1, course.said
        assert "made different calls, and nothing was changed" in course.said[0]
        assert (course.apart, course.wrong) == ([], [])
