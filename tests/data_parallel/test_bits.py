"""Training under zero1 gives the bits of plain optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from canzona_compile.capture.templates import Capture
from canzona_compile.compat.duplex import SECOND
from canzona_compile.data_parallel import model_plan
from canzona_compile.data_parallel.collectives import Pending
from canzona_compile.runtime import process_groups
from canzona_compile.session.rates import agreed_link
from tests.data_parallel.models import MAKERS
from tests.data_parallel.runs import compare, set_up, step_alone
from tests.harness.marks import crossed
from tests.harness.model_pairs import under_zero1
from tests.harness.ranks import run
from tests.harness.toys import NewData

STEPS = 12
BUCKETS = 40_000  # bytes: several buckets, uniform and uneven ones
DTYPES = [torch.float32, torch.bfloat16]
LIKE_USERS: dict[str, Any] = {"clip": 0.5, "accumulate": 2, "bucket_bytes": BUCKETS}  # beside a schedule


@pytest.mark.parametrize(("make", "dtype", "gather"), crossed(list(MAKERS), DTYPES, ["step", "forward"], most=1))
def test_two_ranks_train_as_under_ddp(make: str, dtype: torch.dtype, gather: str) -> None:
    """A sum of two gradients has no order, so the whole run is that of DDP with the plain optimizer, bit for bit."""
    after = partial(step_alone, make, dtype)
    for found in run(2, compare, make, STEPS, dtype, ddp=True, gather=gather, after=after, **LIKE_USERS):
        assert found == []


@pytest.mark.parametrize(("world", "make", "dtype"), crossed([3, 4], list(MAKERS), DTYPES, most=1))
def test_reduced_gradients_give_the_plain_step(world: int, make: str, dtype: torch.dtype) -> None:
    after = partial(step_alone, make, dtype)
    for found in run(world, compare, make, STEPS, dtype, after=after, **LIKE_USERS):
        assert found == []


def both_ways(make: str, **options: Any) -> list[str]:
    """What differs if gradients and parameters go both ways at once."""
    with mock.patch.object(process_groups, "LARGE", 0):
        found = compare(make, 3, **options)
    return found if SECOND else ["no second process group"]


@pytest.mark.parametrize(("world", "options"), [(2, {"ddp": True, "gather": "forward"}), (3, {}), (4, {"replicas": 2})])
def test_what_goes_both_ways_at_once_has_the_same_bits(world: int, options: dict[str, Any]) -> None:
    after = partial(step_alone, "muon and adamw", torch.float32)
    for found in run(world, both_ways, "muon and adamw", fresh=True, after=after, **LIKE_USERS, **options):
        assert found == []


def by_link() -> tuple[list[str], int]:
    """What differs if ranks choose the size of buckets, and how often they measured their link."""
    with (
        mock.patch.object(model_plan, "LEAST_BUCKET_BYTES", 0),
        mock.patch.object(model_plan, "agreed_link") as measured,
    ):
        measured.side_effect = agreed_link
        return compare("muon and adamw", 3, ddp=True, clip=0.5, bucket_bytes=None), measured.call_count


@pytest.mark.parametrize(("world", "measured"), [(1, 0), (2, 1)])
def test_ranks_choose_the_size_of_buckets(world: int, measured: int) -> None:
    found = run(world, by_link, after=partial(step_alone, "muon and adamw", torch.float32))
    assert found == [([], measured)] * world


def forgets_a_rank(pending: Pending) -> Tensor:
    """Sum what all ranks sent but the last one."""
    if pending.parts is not None:
        pending.parts = pending.parts[:-1]
    return complete(pending)


complete = Pending.complete


def without_a_rank() -> list[str]:
    with mock.patch.object(Pending, "complete", forgets_a_rank):
        return compare("adamw", 1, bucket_bytes=BUCKETS)


def test_the_part_of_a_rank_that_is_lost_is_found() -> None:
    assert all(run(3, without_a_rank, after=partial(step_alone, "adamw", torch.float32)))


@pytest.mark.parametrize(
    ("make", "mesh", "dtype"),
    crossed(list(MAKERS), [{"tp": 2}, {"replicas": 2}, {"tp": 2, "gather": "forward"}], DTYPES, most=1),
)
def test_beside_tensor_parallelism_and_in_replicas(make: str, mesh: dict[str, Any], dtype: torch.dtype) -> None:
    after = partial(step_alone, make, dtype)
    for found in run(4, compare, make, STEPS, dtype, after=after, **LIKE_USERS, **mesh):
        assert found == []


@pytest.mark.full
def test_one_rank_alone() -> None:
    assert run(1, compare, "muon and adamw", 3, clip=0.5, bucket_bytes=BUCKETS) == [[]]


@pytest.mark.full
def test_the_norm_has_the_bits_of_torch_s_where_no_parameter_is_cut() -> None:
    for found in run(2, compare, "muon and adamw", STEPS, ddp=True, vocabulary=200, **LIKE_USERS):
        assert found == []


def new_data(of: str) -> list[str]:
    """What differs after steps that assign to `.data`, from a plain model with the same gradients."""
    torch.manual_seed(0)
    pair = under_zero1(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)),
        lambda m: [NewData(m.parameters(), of=of)],
        lambda m, step, _: m(torch.arange(30.0).view(5, 6) + step).square().mean(),
    )
    pair.train(*range(3))
    return pair.different()


@pytest.mark.parametrize("of", ["param", "state"])
def test_new_data_reaches_buckets(of: str) -> None:
    assert run(2, new_data, of) == [[], []]


def captured_anew() -> int:
    with mock.patch.object(Capture, "_capture", autospec=True, side_effect=Capture._capture) as captured:
        set_up()
    return captured.call_count


def test_ranks_share_what_was_captured_before_the_fork() -> None:
    """All but some elements of a matrix alone, by which zero1 finds whether it may be cut."""
    assert run(2, captured_anew, fresh=True, after=partial(step_alone)) == [1, 1]
