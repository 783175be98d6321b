"""Under ZeRO-1 models can be copied and saved, and nothing reads parameters that are not whole."""

from __future__ import annotations

from functools import partial

import pytest

from tests.data_parallel.copied import (
    copied_too_early,
    copies,
    read_behind_a_call,
    read_by_method,
    read_by_one,
    whole_after_each,
)
from tests.data_parallel.mistakes import step_alone
from tests.harness.marks import also, first
from tests.harness.ranks import run

AFTER = partial(step_alone)


@pytest.mark.parametrize("gather", first(["forward", "step"]))
def test_copies_are_models_of_their_own(gather: str) -> None:
    assert run(2, copies, gather, after=AFTER) == [[], []]


def test_a_copy_before_parameters_are_whole() -> None:
    for text in run(2, copied_too_early, after=AFTER):
        assert "copied before its parameters were gathered" in text


def test_a_method_that_reads_a_parameter_of_the_root() -> None:
    found = run(2, read_by_method, fresh=True)
    for text, _ in found:
        assert "before it was gathered" in text
        assert "model.encode(x)" in text
    assert any(old for _, old in found)  # a rank that does not own the parameter


def test_forward_that_reads_a_parameter_of_the_root_after_another_module() -> None:
    assert run(2, read_behind_a_call, fresh=True) == [("", False)] * 2


@pytest.mark.parametrize("how", ["state_dict", "eval", *also(["eval of a part"])])
def test_one_rank_reads_parameters_alone(how: str) -> None:
    (text, one), (_, two) = run(2, read_by_one, how, fresh=True, after=AFTER)
    assert "rank 1 did not make this call" in text
    assert "synchronize() on all of them" in text
    assert one == two == []


def test_parameters_are_whole_after_the_step_of_each_optimizer() -> None:
    assert run(2, whole_after_each, after=AFTER) == [[], []]
