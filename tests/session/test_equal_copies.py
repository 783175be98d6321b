"""Ranks that must hold equal copies and do not: all of them raise at the first step, and nothing is updated."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Muon

import canzona_compile
from canzona_compile.errors import RankMismatch
from tests.harness.layouts import Case, local
from tests.harness.marks import crossed
from tests.harness.mistakes import Mistakes
from tests.harness.optimizers import shared_captures
from tests.harness.ranks import run
from tests.harness.trainer import Trainer, ready

CASES = [Case("ddp", (2,)), Case("hsdp", (2, 2)), Case("tp_ddp", (2, 2)), Case("replicated", (2,))]
# The last rank differs in the first step; then it does not, and all go on as if nothing had been.
MISTAKES = Mistakes(__name__, driver=Trainer, after=ready(), when="fed", on=[-1], errors={"RankMismatch"})
other = partial(MISTAKES, "replicate= needs identical copies", options={"good": 0}, goes_on=True)


@other("the parameter differs", "second")
def permuted_rows(trainer: Trainer) -> None:
    own = local(trainer.params[1])
    own.copy_(own.roll(1, 0))


@other("the gradient differs", "third")
def other_gradient(trainer: Trainer) -> None:
    local(trainer.params[2].grad).add_(0.5)  # type: ignore[arg-type]


@other("the parameter differs", "second")
def other_parameter(trainer: Trainer) -> None:
    local(trainer.params[1]).add_(0.5)


@pytest.mark.parametrize(("name", "case"), crossed(MISTAKES.names(), CASES, most=2), ids=str)
def test_one_copy_differs(name: str, case: Case) -> None:
    assert [found.later for found in MISTAKES.check(name, case)] == [[]] * case.world


def experts_among_copies(equal: bool) -> str:
    """A matrix of which ranks hold copies, and an expert: theirs differ, in values or in gradients alone."""
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(8, 6, generator=random) for _ in range(3)]
    own = values[1] if equal else values[1 + dist.get_rank()]
    grads = [torch.ones(8, 6), torch.ones(8, 6) * (1 + dist.get_rank())]

    def made() -> Any:
        params: Any = [nn.Parameter(values[0].clone()), nn.Parameter(own.clone())]
        params[1].allreduce = False
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        return params

    params, plain = made(), made()
    with shared_captures(), pytest.raises(RankMismatch) as error:
        canzona_compile.wrap(
            Muon([*zip(["up", "expert"], params, strict=True)], lr=0.1), replicate=dist.group.WORLD
        ).step()
    wrap, expert, others = (
        canzona_compile.wrap,
        Muon([("expert", params[1])], lr=0.1),
        Muon([("up", params[0])], lr=0.1),
    )
    with shared_captures():
        canzona_compile.chain(wrap(expert), wrap(others, replicate=dist.group.WORLD)).step()
    Muon(plain, lr=0.1).step()
    assert all(torch.equal(one, two) for one, two in zip(params, plain, strict=True))
    return str(error.value)


@pytest.mark.parametrize(("equal", "what"), [(False, "the parameter differs"), (True, "the gradient differs")])
def test_experts_are_no_copies_and_the_hint_says_what_to_do(equal: bool, what: str) -> None:
    for said in run(2, experts_among_copies, equal):
        assert re.search(rf"(?s){what}.*expert.*chain\(wrap\(Muon\(experts\)\)", said), said
        assert equal or "broadcast" not in said
