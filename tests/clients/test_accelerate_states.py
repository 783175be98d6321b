"""Accelerate: clipping that clips and checkpoints under FSDP2, loss scaling, a state that `prepare` moves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from canzona_compile import CanzonaError
from tests.harness.accelerators import accelerator, fsdp2
from tests.harness.beside import BesidePlain
from tests.harness.layouts import full
from tests.harness.optimizers import share_captures
from tests.harness.pairs import Pair, feed, muon, parameters
from tests.harness.ranks import run

accelerate = pytest.importorskip("accelerate")

WIDTHS = (8, 5, 8, 5)  # rows that two ranks cannot share evenly, too; two shapes, that little has to be captured
MATRICES = len(WIDTHS) - 1
BATCHES = 8
LARGEST_NORM = 0.5  # far below what the gradients have, so that clipping changes them


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(WIDTHS)])


def batches() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTHS[0], generator=random) for _ in range(BATCHES)]


def schedule(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Training:
    """What a user writes: a model, an optimizer and a scheduler, made, wrapped and then prepared."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        model = network()
        self.inner: Any = canzona_compile.wrap(Muon(model.parameters(), lr=0.1), strategy="owner")
        share_captures(self.inner)
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, self.inner, schedule(self.inner))

    def steps(self, data: list[Tensor]) -> None:
        for batch in data:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).square().sum())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
                    assert float(full(norm)) > LARGEST_NORM
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [full(p).clone() for p in self.model.parameters()]


def equal(some: list[Tensor], others: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(some, others, strict=True)]


# -- one process -------------------------------------------------------------------------------


def test_prepare_keeps_the_state_of_steps_before_it() -> None:
    """It takes the optimizer's state, moves it to its device and loads it."""
    pair = Pair()
    pair.steps(2)
    with accelerator() as made:
        assert made.prepare(pair.wrapped).optimizer is pair.wrapped
    pair.steps(2)


def scaled(optimizer: Optimizer) -> Any:
    """What `prepare` makes of an optimizer under fp16, which it allows on accelerators only."""
    prepared = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=1.0))
    prepared.scaler.scale(torch.ones(()))  # before it, a scaler has no scale
    return prepared


def test_a_scaler_steps_the_wrapped_optimizer() -> None:
    """Accelerate puts a step of its own on the instance for the time of a call."""
    pair = Pair()
    with accelerator():
        prepared = scaled(pair.wrapped)
        for pair.number in range(3):
            pair.feed()
            pair.plain.step()
            prepared.step()
            assert not prepared.step_was_skipped
    pair.check()
    assert len(pair.report.tasks) == 2


def test_an_optimizer_whose_step_is_hidden_is_refused() -> None:
    """The plain step that Accelerate left on the instance would run, and nobody would notice."""
    optimizer = muon(parameters())
    with accelerator():
        prepared = scaled(optimizer)
        feed(optimizer, 0)
        prepared.step()
    with pytest.raises(CanzonaError, match=r"something replaced optimizer\.step on the object"):
        canzona_compile.wrap(optimizer)
    assert type(optimizer) is Muon


# -- FSDP2 -------------------------------------------------------------------------------------


def train_sharded() -> tuple[list[str], list[str]]:
    """Beside plain Muon, given the gathered gradients: a norm over shards is rounded otherwise."""
    with fsdp2() as made, BesidePlain() as beside:
        training = Training(made)
        training.steps(batches())
        owners = [str(task.owner) for task in training.inner.canzona.report().tasks]
        # Accelerate steps a schedule once per rank.
        assert training.inner.param_groups[0]["lr"] == pytest.approx(0.1 / (1 + BATCHES // 2 * made.num_processes))
        return beside.finish(), owners


@pytest.mark.full
@pytest.mark.ranks
def test_clipped_under_fsdp2() -> None:
    for wrong, owners in run(2, train_sharded):
        assert wrong == []
        assert set(owners) == {"0", "1"}


def resume_sharded(folder: str) -> list[list[bool]]:
    """A training in one go, and its second half from a checkpoint; the last: without one, to see that it matters."""
    data, half = batches(), BATCHES // 2
    with fsdp2() as made:
        whole = Training(made)
        whole.steps(data[:half])
        made.save_state(folder)
        weights = whole.weights()
        whole.steps(data[half:])
    found = []
    for load in (True, False):
        with fsdp2() as made:
            resumed = Training(made)
            if load:
                made.load_state(folder)
                found.append(equal(resumed.weights(), weights))
            resumed.steps(data[half:])
            found.append(equal(resumed.weights(), whole.weights()))
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_a_checkpoint_under_fsdp2(tmp_path: Any) -> None:
    yes, no = [True] * MATRICES, [False] * MATRICES
    assert run(2, resume_sharded, str(tmp_path)) == [[yes, yes, no]] * 2
