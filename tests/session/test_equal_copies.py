"""Ranks that must hold equal copies and do not: all of them raise at the first step, and nothing is updated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.harness.layouts import Case, local
from tests.harness.marks import crossed
from tests.harness.ranks import run
from tests.harness.trainer import Outcome, Trainer, check, ready

CASES = [Case("ddp", (2,)), Case("hsdp", (2, 2)), Case("tp_ddp", (2, 2)), Case("replicated", (2,))]
Edit = Callable[[Trainer], None]


def other_parameter(trainer: Trainer) -> None:
    with torch.no_grad():
        local(trainer.params[1]).add_(0.5)


def permuted_rows(trainer: Trainer) -> None:
    with torch.no_grad():
        own = local(trainer.params[1])
        own.copy_(own.roll(1, 0))


def other_gradient(trainer: Trainer) -> None:
    grad = trainer.params[2].grad
    assert grad is not None
    local(grad).add_(0.5)


def differs(case: Case, edit: Edit) -> Outcome:
    """The last rank differs in the first step; then it does not, and all go on as if nothing had been."""
    trainer = Trainer(case)
    trainer.feed()
    kept = [local(param).clone() for param in trainer.params]
    if dist.get_rank() == case.world - 1:
        edit(trainer)
    outcome = trainer.last_step()
    with torch.no_grad():
        for param, value in zip(trainer.params, kept, strict=True):
            local(param).copy_(value)
    trainer.share()
    trainer.take()
    trainer.go(2)
    trainer.check()
    return outcome


DIFFERENCES = [
    (permuted_rows, "the parameter", "second"),
    (other_gradient, "the gradient", "third"),
    (other_parameter, "the parameter", "second"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "difference"),
    crossed(CASES, DIFFERENCES, most=2),
    ids=lambda v: str(v) if isinstance(v, Case) else v[0].__name__,
)
def test_one_copy_differs(case: Case, difference: tuple[Edit, str, str]) -> None:
    edit, what, name = difference
    found = run(case.world, differs, case, edit, after=ready())
    check(found, {"RankMismatch"}, f"{what} differs", name, "replicate= needs identical copies")
