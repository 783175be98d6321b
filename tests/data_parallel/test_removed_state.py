"""Under zero1, state of single parameters may be removed on all ranks, and is not changed or read in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from tests.data_parallel.models import different, different_state
from tests.harness.layouts import mesh_of
from tests.harness.marks import crossed
from tests.harness.mistakes import attempt
from tests.harness.optimizers import shared_captures
from tests.harness.ranks import run

Change = Callable[[Optimizer, Any], object]
MAKES, GATHERS = ["two", "chain"], ["step", "forward"]


def made(model: nn.Module, make: str) -> list[Any]:
    """Muon for the first two matrices and AdamW for all else, as a chain or not."""
    matrices = [model[0].weight, model[1].weight]
    ids = set(map(id, matrices))
    others = AdamW([p for p in model.parameters() if id(p) not in ids], lr=0.01)
    muon = Muon(matrices, lr=0.05)
    return [canzona_compile.chain(muon, others)] if make == "chain" else [muon, others]


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


def start(make: str, gather: str) -> tuple[Any, Any, list[Any], list[Any]]:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 4096))
    model = copy.deepcopy(plain)
    expected, found = made(plain, make), made(model, make)
    with shared_captures():
        mesh: Any = mesh_of((dist.get_world_size(),), ("dp",))
        canzona_compile.zero1(
            model, found if make == "two" else found[0], mesh=mesh, gather=gather, bucket_bytes=10_000
        )  # type: ignore[arg-type]
    return plain, model, expected, found


def train(model: Any, optimizers: list[Any], step: int) -> None:
    """Take a step with gradients that are equal on all ranks."""
    random = torch.Generator().manual_seed(step)
    model(torch.randn(8, 16, generator=random)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def removed(what: str, make: str, gather: str) -> list[str]:
    """What differs from plain optimizers after both lost the same state."""
    plain, model, expected, found = start(make, gather)
    at, change = REMOVED[what]
    for step in range(4):
        for own, optimizers in ((plain, expected), (model, found)):
            if step == 2:
                change(optimizers[min(at, len(optimizers) - 1)], own)
            train(own, optimizers, step)
    found[0].canzona.synchronize()
    pairs = [(one.state_dict()["state"], two.state_dict()["state"]) for one, two in zip(expected, found, strict=True)]
    return different(model, plain) + [text for one, two in pairs for text in different_state(two, one, "state")]


def alone(make: str, gather: str) -> tuple[str, list[str]]:
    """What is said if only the second rank removes state; and what was updated all the same."""
    _, model, _, found = start(make, gather)
    for step in range(2):
        train(model, found, step)
    found[0].canzona.synchronize()
    before = copy.deepcopy(list(model.parameters()))
    if dist.get_rank() == 1:
        found[0].state.pop(model[0].weight)
    said = attempt(lambda: train(model, found, 2)).said
    pairs = zip(model.named_parameters(), before, strict=True)
    return said, [name for (name, one), two in pairs if not torch.equal(one, two)]


def refused(make: str, gather: str) -> dict[str, str]:
    """What is said of all that is refused; in between, training goes on."""
    _, model, _, found = start(make, gather)
    said = {}
    for step, (what, (at, change)) in enumerate(reversed(REFUSED.items())):
        train(model, found, step)
        said[what] = attempt(lambda: (change(found[min(at, len(found) - 1)], model), train(model, found, 9))).said  # noqa: B023
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
