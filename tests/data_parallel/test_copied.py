"""Under ZeRO-1 models can be copied and saved, and nothing reads parameters that are not whole."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import canzona_compile
from canzona_compile.runtime import meeting
from tests.data_parallel.models import CHEAP, Model, batch, different
from tests.data_parallel.runs import set_up, step_alone
from tests.harness.marks import also, first
from tests.harness.mistakes import attempt
from tests.harness.model_pairs import train, under_zero1
from tests.harness.ranks import run

LOADED = """
import sys, torch
from tests.data_parallel.models import batch
model = torch.load(sys.argv[1], weights_only=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(batch(7, 0)).backward()
optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""


def copies(gather: str) -> list[str]:
    """Copy and save a model, and train each copy as one of a model that was never under ZeRO-1; what differs."""
    model, optimizers, handle = set_up(gather=gather)
    train(model, optimizers, 2)
    handle.synchronize()
    plain = Model()
    plain.load_state_dict(model.state_dict())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    found = [copy.deepcopy(model), torch.load(buffer, weights_only=False)]
    for own in (plain, *found):
        own(batch(7, 0)).backward()
        SGD(own.parameters(), lr=0.1).step()
    differences = [name for own in found for name in different(own, plain)]
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model"
            torch.save(model, path)
            environment = {**os.environ, "PYTHONPATH": os.getcwd()}
            subprocess.run([sys.executable, "-c", LOADED, path], check=True, env=environment)
            elsewhere = Model()
            elsewhere.load_state_dict(torch.load(path))
            differences += different(elsewhere, plain)
    again: Any = found[0]
    canzona_compile.zero1(again, SGD(again.parameters(), lr=0.1), mesh=dist.group.WORLD)
    train(model, optimizers)
    return differences


def copied_too_early() -> str:
    """A copy has nothing that its parameters could wait for."""
    model, optimizers, _ = set_up(gather="forward")
    train(model, optimizers)
    return attempt(lambda: copy.deepcopy(model)).said


class Encoder(nn.Module):
    """Its root holds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.root = nn.Parameter(torch.randn(16, 16))
        self.inner = nn.Linear(16, 16)

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.root).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(self.inner(x))


def root_read(read: Callable[[Any, Tensor], Tensor]) -> tuple[str, bool]:
    """Read the root's parameter after a step, without calling the root.

    Returns:
        What the read raised, and whether it saw the values from before the step.
    """
    model: Any = Encoder()
    optimizer: Any = canzona_compile.zero1(
        model, SGD(model.parameters(), lr=0.1), mesh=dist.group.WORLD, gather="forward", bucket_bytes=64
    )
    x = torch.ones(2, 16)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses: list[Tensor] = []
    said = attempt(lambda: (losses.append(read(model, x)), losses[0].backward())).said
    optimizer.canzona.synchronize()
    return said, not torch.equal(losses[0], read(model, x))


def read_by_method() -> tuple[str, bool]:
    """No module is called, so nothing says that a forward pass has begun."""
    return root_read(lambda model, x: model.encode(x))


def read_behind_a_call() -> tuple[str, bool]:
    """The call of the inner module says that a forward pass has begun."""
    return root_read(lambda model, x: model.forward(x))


def read_by_one(how: str) -> tuple[str, list[str]]:
    """Rank 0 reads parameters alone, then all go on; what it raised, and what then differs from plain optimizers."""
    pair = under_zero1(Model(), CHEAP["sgd"], gather="forward", bucket_bytes=40_000)
    model, text = pair.model, ""
    pair.train(0)
    if dist.get_rank() == 0:
        with torch.no_grad():
            reads: dict[str, Callable[[], object]] = {
                "state_dict": model.state_dict,
                "eval": lambda: model(batch(1, 0)),
                "eval of a part": lambda: model.head(torch.ones(1, 64)),
            }
            with mock.patch.object(meeting, "PATIENCE", timedelta(seconds=1)):
                text = attempt(reads[how]).said
    dist.barrier()
    pair.train(0)
    return text, pair.different()


def whole_after_each() -> list[str]:
    """What differs between ranks when the first of two optimizers returns from a step, which an average reads."""
    model, optimizers, _ = set_up(bucket_bytes=4_000_000)
    differences: list[str] = []
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: differences.extend(unequal(model)))
    train(model, optimizers, 2)
    return differences


def unequal(model: nn.Module) -> list[str]:
    """The names of the parameters of which ranks hold different values."""
    found = []
    for name, param in model.named_parameters():
        first = param.detach().clone()
        dist.broadcast(first, 0)
        found += [] if torch.equal(first, param.detach()) else [name]
    return found


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
