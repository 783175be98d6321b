"""`audit=` under zero1: owners look again, and all ranks hear what one of them finds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from canzona_compile import Split
from canzona_compile.errors import CanzonaError
from tests.data_parallel.test_checkpoints import given_loss, train
from tests.harness.model_pairs import train_alone, zero1
from tests.harness.pairs import muon
from tests.harness.ranks import run
from tests.session.test_audit import CoupledLate


class Three(nn.Module):
    """Two matrices and a fused one."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        shapes = ((8, 6), (6, 8), (12, 6))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes)


def steps(model: nn.Module, optimizer: Any, start: int, stop: int) -> tuple[int, str]:
    """Train; the number of the step that raised, and what."""
    for step in range(start, stop):
        try:
            train(model, optimizer, step)
        except CanzonaError as error:
            return step, str(error)
    return stop, ""


def begins_late() -> tuple[int, str]:
    model = Three()
    return steps(model, zero1(model, CoupledLate(model.parameters()), audit=5), 0, 60)


SPLIT = {"weights.2": Split({"gate": 6, "up": 6}, interleaved=2)}


def alone() -> None:
    """Capture in one process what ranks need."""
    model = Three()
    train_alone(
        model, [muon(list(model.parameters()))], lambda m, step, _: given_loss(m, step), model=model, split=SPLIT
    )


def wrong_bit() -> tuple[int, str]:
    """Training goes well until a bit is wrong on one rank, in a matrix that it owns."""
    model = Three()
    optimizer = muon(list(model.parameters()))
    found = zero1(model, optimizer, audit=2, split=SPLIT)
    good = steps(model, found, 0, 7)
    assert good == (7, ""), good
    driver = found.canzona.session.driver
    executor, run_program = driver.last.executor, driver.last.executor.run
    if dist.get_rank() == 1:

        def off() -> None:
            run_program()
            for param in driver.store.params.values():
                param.data[0, 0] += 1e-6

        executor.run = off
    return steps(model, found, 7, 9)


@pytest.mark.full
def test_what_begins_after_the_rehearsal_is_found() -> None:
    for good, says in run(2, begins_late, fresh=True):
        assert 40 <= good < 50, says
        assert "updates parameters together" in says


def test_a_wrong_bit_on_its_owner_is_found_by_all() -> None:
    for step, says in run(2, wrong_bit, fresh=True, after=partial(alone)):
        assert step <= 8
        assert "1 of " in says, says
        assert "elements differ" in says, says
