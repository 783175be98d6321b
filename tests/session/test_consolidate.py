"""`state_dict` on one rank alone: it says what is missing, disturbs nothing, and works after `consolidate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import canzona_compile
from canzona_compile.runtime import meeting
from examples.optimizers.soap import SOAP
from tests.harness import marks
from tests.harness.checkpointing import EVERY, SHAPES
from tests.harness.layouts import ALONE, Case
from tests.harness.mistakes import attempt
from tests.harness.model_pairs import train, zero1
from tests.harness.pairs import Pair, unlike
from tests.harness.ranks import run

MAKERS: dict[str, Callable[..., Any]] = {
    "muon": partial(torch.optim.Muon, lr=2e-2),
    "soap": partial(SOAP, lr=1e-2, every=EVERY),
}
PATIENCE = timedelta(seconds=1)  # of a call that one rank makes alone


class Run(Pair):
    """A wrapped optimizer, and beside it the plain one on whole matrices with the same gradients."""

    def __init__(self, maker: str, case: Case) -> None:
        super().__init__(MAKERS[maker], SHAPES, case, strategy="owner")

    def equal(self, found: Mapping[str, Any], *, local: bool = False) -> bool:
        """Does a state dict equal the plain one's? `local` looks at fragments on this rank alone."""
        expected = self.plain.state_dict()["state"]

        def laid(value: Any, i: int) -> Any:
            like = local and isinstance(value, Tensor) and value.shape == SHAPES[i]
            return self.laid.like_param(value, i) if like else value

        return found["state"].keys() == expected.keys() and not any(
            unlike("", found["state"][i], {key: laid(value, i) for key, value in own.items()}, self.laid, i)
            for i, own in expected.items()
        )


def steps_alone(maker: str) -> None:
    Run(maker, ALONE).go(3)


def ready(maker: str) -> partial[Any]:
    return partial(steps_alone, maker)


def said_by(call: Callable[[], Any], patience: timedelta = meeting.PATIENCE) -> str:
    """What the call raises."""
    with mock.patch.object(meeting, "PATIENCE", patience):
        return attempt(call).said


def keys() -> int:
    return int(dist.distributed_c10d._get_default_store().num_keys())


CASES = [("muon", Case("ddp", (2,))), ("soap", Case("ddp", (2,))), ("soap", Case("fsdp", (2,)))]
named = pytest.mark.parametrize(("maker", "case"), CASES, ids=lambda v: str(v))


def alone_then_all(maker: str, case: Case) -> tuple[list[str], list[bool], int]:
    rank, made = dist.get_rank(), Run(maker, case)
    made.go(3)
    dist.barrier()
    first = keys()
    dist.barrier()
    tries, equal = [], []
    if rank == 0:
        tries += [said_by(made.wrapped.state_dict, PATIENCE), said_by(made.wrapped.state_dict, PATIENCE)]
    dist.barrier()
    equal.append(made.equal(made.wrapped.state_dict()))  # the third meeting for rank 0, the first for rank 1
    made.go(1)
    if rank == 1:
        tries.append(said_by(made.wrapped.state_dict, PATIENCE))  # rank 0 waits in the next step meanwhile
    made.go(2)
    equal.append(made.equal(made.wrapped.state_dict()))
    dist.barrier()
    left = keys() - first
    dist.barrier()
    return tries, equal, left


@pytest.mark.parametrize(("maker", "case"), [CASES[0], *(marks.full(*own) for own in CASES[1:])], ids=str)
def test_one_rank_alone(maker: str, case: Case) -> None:
    found = run(2, alone_then_all, maker, case, fresh=True, after=ready(maker))
    missing = ["rank 1 did not make this call", "rank 0 did not make this call"]
    for rank, (tries, equal, left) in enumerate(found):
        assert equal == [True, True]
        assert len(tries) == 2 - rank
        for said in tries:
            assert missing[rank] in said
            assert "consolidate(to=0)" in said
        assert left == 0, "keys are left in the store"


def consolidated(maker: str, case: Case, to: int) -> tuple[bool, str, list[str]]:
    made = Run(maker, case)
    made.go(3)
    rank = dist.get_rank()
    made.wrapped.canzona.consolidate(to=to)
    equal, refused = True, ""
    if rank == to:
        equal = made.equal(made.wrapped.state_dict(), local=True)
        equal = equal and made.equal(made.wrapped.state_dict(), local=True)
    else:
        refused = said_by(made.wrapped.state_dict)
        assert made.wrapped.canzona.session._consolidated.state is None
    made.go(1)
    stale = [said_by(made.wrapped.state_dict, PATIENCE)] if rank == to else []
    dist.barrier()
    equal = made.equal(made.wrapped.state_dict()) and equal
    made.go(1)
    made.wrapped.canzona.consolidate(to=to)
    canzona_compile.unwrap(made.wrapped)
    return made.equal(made.wrapped.state_dict()) and equal, refused, stale


@pytest.mark.parametrize(
    ("maker", "case", "to"),
    [
        given if given in ((*CASES[0], 0), (*CASES[2], 1)) else marks.full(*given)
        for given in ((*own, to) for own in CASES for to in (0, 1))
    ],
    ids=str,
)
def test_consolidate(maker: str, case: Case, to: int) -> None:
    found = run(2, consolidated, maker, case, to, after=ready(maker))
    for rank, (equal, refused, stale) in enumerate(found):
        assert equal
        if rank == to:
            assert "did not make this call" in stale[0]
        else:
            assert f"consolidated to rank {to}" in refused


def broken(case: Case) -> str:
    """Rank 1 fails on its way through a step that rank 0 has taken."""
    made = Run("muon", case)
    made.go(2)
    if dist.get_rank() == 1:
        session = made.wrapped.canzona.session
        with pytest.raises(ValueError, match="stopped"), session.telling():
            raise ValueError("stopped")
        return said_by(made.wrapped.state_dict)
    return said_by(made.wrapped.state_dict)


def test_a_meeting_ends_when_a_rank_has_failed() -> None:
    for said in run(2, broken, Case("ddp", (2,)), fresh=True, after=ready("muon")):
        assert "stopped" in said


def other_calls(case: Case) -> list[str]:
    made = Run("muon", case)
    made.go(2)
    to = dist.get_rank()
    said = [said_by(lambda: made.wrapped.canzona.consolidate(to=to))]
    made.go(1)
    return [*said, str(made.equal(made.wrapped.state_dict()))]


def test_ranks_that_call_different_things() -> None:
    for said, equal in run(2, other_calls, Case("ddp", (2,)), after=ready("muon")):
        assert "rank 0: consolidate(to=0); rank 1: consolidate(to=1)" in said
        assert equal == "True"


def local_state() -> bool:
    """Muon under FSDP2 keeps fragments: one rank alone gets its own."""
    made = Run("muon", Case("fsdp", (2,)))
    made.go(2)
    return made.equal(made.wrapped.state_dict(), local=True) if dist.get_rank() == 0 else True


def test_state_in_fragments_needs_nobody() -> None:
    assert run(2, local_state, after=ready("muon")) == [True, True]


def zero1_alone() -> tuple[list[str], bool]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 6, bias=False))
    optimizer = zero1(model, torch.optim.Muon(model.parameters(), lr=2e-2))
    train(model, [optimizer], 2, lambda model, *_: model(torch.ones(3, 6)).square().sum())
    said = [said_by(optimizer.state_dict, PATIENCE)] if dist.get_rank() == 0 else []
    dist.barrier()
    whole = optimizer.state_dict()
    optimizer.canzona.consolidate()
    return said, dist.get_rank() != 0 or not unlike("", optimizer.state_dict(), whole)


def test_zero1() -> None:
    (said, equal), _ = run(2, zero1_alone)
    assert equal
    assert "rank 1 did not make this call" in said[0]
