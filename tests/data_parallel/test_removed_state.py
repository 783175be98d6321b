"""Under zero1, state of single parameters may be removed on all ranks, and is not changed or read in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from tests.data_parallel.models import different
from tests.harness.marks import crossed
from tests.harness.mistakes import attempt
from tests.harness.model_pairs import ModelPair, under_zero1
from tests.harness.ranks import run

Change = Callable[[Optimizer, Any], object]
MAKES, GATHERS = ["two", "chain"], ["step", "forward"]


def made(model: Any, make: str) -> Any:
    """Muon for the first two matrices and AdamW for all else, as a chain or not."""
    matrices = [model[0].weight, model[1].weight]
    ids = set(map(id, matrices))
    others = AdamW([p for p in model.parameters() if id(p) not in ids], lr=0.01)
    muon = Muon(matrices, lr=0.05)
    return canzona_compile.chain(muon, others) if make == "chain" else [muon, others]


# For each, the position of the optimizer, and what is done to it before the third step.
REMOVED: dict[str, tuple[int, Change]] = {
    "a matrix": (0, lambda own, model: own.state.pop(model[1].weight, None)),
    "a matrix, deleted": (0, lambda own, model: own.state.__delitem__(model[0].weight)),
    "a matrix, emptied": (0, lambda own, model: own.state.update({model[1].weight: {}})),
    "a table that is cut, and a vector": (1, lambda own, model: [own.state.pop(p) for p in model[2].parameters()]),
    "all": (1, lambda own, _: own.state.clear()),
}
REFUSED: dict[str, tuple[int, Change]] = {
    "replaced": (0, lambda own, model: own.state.update({model[0].weight: {"momentum_buffer": model[0].weight}})),
    "read": (0, lambda own, model: own.state[model[0].weight]["momentum_buffer"]),
    "asked for": (1, lambda own, model: own.state.get(model[2].weight)),
    "any item": (0, lambda own, _: own.state.popitem()),
    "made": (0, lambda own, model: own.state.setdefault(model[0].weight, {})),
}


def start(make: str, gather: str) -> ModelPair:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 4096))
    return under_zero1(model, lambda m: made(m, make), loss_of, gather=gather, bucket_bytes=10_000)


def loss_of(model: Any, step: int, _: int) -> Tensor:
    """It is equal on all ranks."""
    found: Tensor = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean()
    return found


def removed(what: str, make: str, gather: str) -> list[str]:
    """What differs from plain optimizers after both lost the same state."""
    pair = start(make, gather)
    at, change = REMOVED[what]
    pair.train(0, 1)
    for own, optimizers in ((pair.plain, pair.expected), (pair.model, pair.optimizers)):
        change(optimizers[min(at, len(optimizers) - 1)], own)
    pair.train(2, 3)
    return pair.different()


def alone(make: str, gather: str) -> tuple[str, list[str]]:
    """What is said if only the second rank removes state; and what was updated all the same."""
    pair = start(make, gather)
    pair.train(0, 1)
    pair.handle.synchronize()
    if dist.get_rank() == 1:
        pair.optimizers[0].state.pop(pair.model[0].weight)
    return attempt(lambda: pair.train(2)).said, different(pair.model, pair.plain)


def refused(make: str, gather: str) -> dict[str, str]:
    """What is said of all that is refused; in between, training goes on."""
    pair = start(make, gather)
    said = {}
    for step, (what, (at, change)) in enumerate(reversed(REFUSED.items())):
        pair.train(step)
        said[what] = attempt(lambda: (change(pair.optimizers[at], pair.model), pair.train(9))).said  # noqa: B023
    return said


@pytest.mark.parametrize(("what", "make", "gather"), crossed(list(REMOVED), MAKES, GATHERS))
def test_removed_state_begins_anew_as_in_the_plain_optimizer(what: str, make: str, gather: str) -> None:
    assert run(2, removed, what, make, gather) == [[], []]


@pytest.mark.parametrize(("make", "gather"), crossed(MAKES, GATHERS))
def test_state_that_one_rank_removes_is_an_error_on_all(make: str, gather: str) -> None:
    for said, updated in run(2, alone, make, gather):
        assert "the optimizer state differs between ranks" in said
        assert "removed for 0.weight" in said
        assert updated == []


def test_state_that_owners_hold_is_not_read_or_replaced() -> None:
    for said in run(2, refused, "two", "forward"):
        assert said.keys() == REFUSED.keys()
        assert all("owners hold it" in text or "popitem" in text for text in said.values()), said
