"""Ranks that go different ways under zero1 all raise before data moves, and go on as one or refuse to."""

from __future__ import annotations

import re
from functools import partial

import pytest

from tests.data_parallel.astray import READS, SOON, astray, reads_after_a_refusal
from tests.data_parallel.mistakes import step_alone
from tests.harness.marks import crossed
from tests.harness.ranks import run

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
        assert course.seconds < SOON
        assert course.apart == []
        assert way in HALF or course.wrong == []


@pytest.mark.parametrize("way", list(REFUSED))
def test_both_ranks_raise_and_refuse_to_go_on(way: str) -> None:
    make = "muon and adamw" if way in STATEFUL else "sgd"
    for course in run(2, astray, way, "step", make, fresh=True, after=partial(step_alone, make)):
        assert any(re.search(REFUSED[way], said, re.DOTALL) for said in course.said), course.said
        assert len([said for said in course.said if said.startswith("going on")]) == 2, course.said
        assert course.seconds < SOON
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
