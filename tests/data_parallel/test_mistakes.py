"""Mistakes under zero1 are errors on every rank that say what is wrong, where, and what to do."""

from __future__ import annotations

import re
from functools import partial

import pytest

from tests.data_parallel.mistakes import mesh_of_one_rank, rate_set_right, said, step_alone
from tests.harness.marks import also, first, full
from tests.harness.ranks import Died, run

AFTER = partial(step_alone)

ON_BOTH = {
    "another_order": "rank 0: blocks.0.norm.weight",
    "another_shape": r"rank 1: head.weight \[301, 64\]",
    "another_trainability": "requires_grad=False not trained",
    "split_that_fits_nothing": r"'\*.qkv.weight' matches no parameter; the optimizer has blocks.0.up.weight",
    "split_of_another_size": r"(?s)= 112 entries of dim 0, but the parameter has shape \[96, 64\].*blocks.0.up.weight",
    "backward_twice": "(?s)backward ran again.*no_sync",
    "backward_after_a_step_without_zero_grad": "(?s)backward ran again.*zero_grad",
    "step_without_backward": "no parameter has a gradient",
    "parameter_added": r"a trained parameter of shape \[8, 8\]",
    "moved_to_another_group": "(?s)in another group of its optimizer.*blocks.1.down.weight",
    "left_its_optimizer": "(?s)or in none.*blocks.1.down.weight",
    "memory_replaced": "(?s)storage of the parameter was replaced.*blocks.0.up.weight",
    "parameters_replaced_by_a_checkpoint": "(?s)parameters of the model were replaced.*embed.weight.*assign=True",
    "unfrozen_later": "(?s)was not in the optimizer.*requires_grad",
    "under_ddp": "already wrapped in DistributedDataParallel",
    "under_fsdp": "in DDP or FSDP|already wrapped in FSDP",
    "wrapped_already": "already wrapped",
    "mesh_without_this_rank": "rank 1 is not part of|the other rank",
    "clipped_by_torch": "(?s)its norm would differ.*clip_grad_norm_",
    "clipped_by_value": "clamp_ would give a wrong result",
    "scaled_differently": "rank 0: foreach_mul by 0.5 of embed.weight and 11 more; rank 1: foreach_mul by 1.5",
    "another_rate": r"(?s)rank 0: group 0 of SGD has .*lr=0.1.*rank 1: group 0 of SGD has .*lr=0.25",
    "another_rate_between_backward_and_step": r"(?s)rank 1: group 0 of SGD has .*lr=0.25",
    "refused_on_one_rank": "backward ran again",
    "optimizer_fails_on_one_rank": "ns_steps >= 100",
    "read_too_early": "(?s)before it was gathered.*gather=",
}


# These leave a collective that one rank started and the other did not.
BREAKING = {"memory_replaced", "refused_on_one_rank", "optimizer_fails_on_one_rank", "mesh_without_this_rank"}


# Of what is alike: the other one takes seconds to show the same, or is a rarer mistake.
REPEATED = {
    "split_of_another_size",
    "backward_after_a_step_without_zero_grad",
    "parameter_added",
    "left_its_optimizer",
    "wrapped_already",
    "memory_replaced",
    "unfrozen_later",
    "clipped_by_value",
    "scaled_differently",
    "another_rate_between_backward_and_step",
    "optimizer_fails_on_one_rank",
    "read_too_early",
}


@pytest.mark.parametrize("mistake", [full(name) if name in REPEATED else name for name in ON_BOTH])
def test_both_ranks_raise(mistake: str) -> None:
    for text in run(2, said, mistake, fresh=mistake in BREAKING, after=AFTER):
        assert re.search(ON_BOTH[mistake], text), text


@pytest.mark.parametrize("gather", first(["step", "forward"]))
def test_gradients_scaled_on_one_rank_only(gather: str) -> None:
    for text in run(2, said, "scaled_on_one_rank", gather, fresh=True, after=AFTER):
        assert "scaled differently on some ranks" in text
        assert "rank 0: mul by 0.5 of embed.weight" in text


def test_ranks_train_on_once_their_numbers_are_equal_again() -> None:
    assert run(2, rate_set_right, after=AFTER) == [["RankMismatch", ""]] * 2


def test_a_hook_that_changes_the_dtype() -> None:
    """Autograd refuses it on one rank, after ranks have begun to reduce; the other one hears that."""
    one, two = run(2, said, "hook_changes_dtype", fresh=True, after=AFTER)
    assert "changed the type of value" in one
    assert "the step failed on rank 0: CanzonaError: an exception interrupted a backward pass" in two


@pytest.mark.parametrize("where", [*also(["backward"]), "step", *also(["gather"])])
def test_a_rank_that_dies(where: str) -> None:
    one, two = run(2, said, "dies", where, fresh=True, dying=[1], after=AFTER)
    assert isinstance(two, Died)
    assert "no answer from rank 1" in one


@pytest.mark.ranks
def test_a_mesh_of_one_rank_reduces_nothing_and_says_so() -> None:
    for warned in run(2, mesh_of_one_rank):
        assert [one.partition(",")[0] for one in warned] == ["tp: mesh= has one rank"]
