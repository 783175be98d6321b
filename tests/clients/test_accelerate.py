"""Accelerate's `prepare`, in one process and with FSDP2: clipping, loss scaling, checkpoints, a state that it moves."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from canzona_compile import CanzonaError
from tests.harness.beside import BesidePlain
from tests.harness.layouts import full
from tests.harness.marks import first
from tests.harness.optimizers import share_captures
from tests.harness.pairs import Pair, feed, muon, parameters
from tests.harness.ranks import run

accelerate = pytest.importorskip("accelerate")

WIDTHS = (8, 5, 8, 5)  # rows that two ranks cannot share evenly, too; two shapes, that little has to be captured
MATRICES = len(WIDTHS) - 1
BATCHES = 8
LARGEST_NORM = 0.5  # far below what the gradients have, so that clipping changes them
FAR = 1e6  # is not reached: a norm is rounded otherwise where shards are summed


@contextlib.contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    """An Accelerator on the CPU. It keeps what it is in the process and in the environment; none of it stays."""
    from accelerate.state import AcceleratorState, GradientState

    ranks = {}
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with mock.patch.dict(os.environ, ranks):
        try:
            yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@contextlib.contextmanager
def fsdp2(**options: Any) -> Iterator[Any]:
    """An Accelerator for FSDP2 on gloo ranks; it would take FSDP for plain DDP where there are only CPUs."""
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **options)
    with accelerator(fsdp_plugin=plugin) as made:
        # Where it looks again, whenever something asks for its state.
        accelerate.PartialState().distributed_type = accelerate.DistributedType.FSDP
        made.state.distributed_type, made.state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
        yield made
        assert made.is_fsdp2


def batches() -> list[Tensor]:
    """Equal on all ranks, so that gradients averaged over two of them are those of one."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTHS[0], generator=random) for _ in range(BATCHES)]


class Training:
    """What a user writes: a model, an optimizer, wrapped before or after `prepare` or not, and a scheduler."""

    def __init__(self, accelerator: Any, when: str = "before", clip: float = LARGEST_NORM) -> None:
        torch.manual_seed(0)
        self.accelerator, self.clip = accelerator, clip
        model = nn.Sequential(*[nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(WIDTHS)])
        optimizer = Muon(model.parameters(), lr=0.1)
        if when == "before":
            share_captures(canzona_compile.wrap(optimizer, strategy="owner"))
        # Accelerate steps a schedule once per rank.
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step // accelerator.num_processes))
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, schedule)
        self.inner: Any = self.optimizer.optimizer
        if when == "after":
            share_captures(canzona_compile.wrap(self.inner, strategy="owner"))

    def steps(self, data: list[Tensor]) -> None:
        for batch in data:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).square().sum())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    assert float(full(norm)) > LARGEST_NORM
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [full(p).clone() for p in self.model.parameters()]


def trained(when: str, clip: float) -> tuple[list[Tensor], Any]:
    """The weights after a training in one process, and the optimizer."""
    with accelerator() as made:
        training = Training(made, when, clip)
        training.steps(batches())
        return training.weights(), training.inner


def equal(some: list[Tensor], others: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(some, others, strict=True)]


# -- one process -------------------------------------------------------------------------------


@pytest.mark.parametrize("when", first(["before", "after"]))
def test_in_one_process(when: str) -> None:
    found, optimizer = trained(when, LARGEST_NORM)
    assert equal(found, trained("plain", LARGEST_NORM)[0]) == [True] * MATRICES
    assert len(optimizer.canzona.report().tasks) == MATRICES


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


def train_sharded(when: str, **policy: Any) -> tuple[list[Tensor], int, list[str]]:
    with fsdp2(**policy) as made:
        training = Training(made, when, FAR)
        training.steps(batches())
        report = training.inner.canzona.report()
        return training.weights(), report.world_size, [task.strategy for task in report.tasks]


@pytest.mark.parametrize("when", first(["before", "after"]))
def test_with_fsdp2(when: str) -> None:
    """`prepare` shards the model and puts other parameters in the optimizer, which was built before."""
    expected, _ = trained("plain", FAR)
    for found, world, strategies in run(2, train_sharded, when, after=partial(trained, when, FAR)):
        assert (world, strategies) == (2, ["owner"] * MATRICES)
        assert equal(found, expected) == [True] * MATRICES


def by_size() -> tuple[list[Tensor], int, list[str]]:
    return train_sharded("before", auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=39)


def test_layers_above_a_size_are_sharded_by_themselves() -> None:
    expected, _ = trained("plain", FAR)
    assert [equal(found, expected) for found, _, _ in run(2, by_size)] == [[True] * MATRICES] * 2


def train_clipped() -> tuple[list[str], list[str]]:
    """Beside plain Muon, given the gathered gradients: a norm over shards is rounded otherwise."""
    with fsdp2() as made, BesidePlain() as beside:
        training = Training(made)
        training.steps(batches())
        owners = [str(task.owner) for task in training.inner.canzona.report().tasks]
        assert training.inner.param_groups[0]["lr"] == pytest.approx(0.1 / (1 + BATCHES // 2))
        return beside.finish(), owners


@pytest.mark.full
def test_clipped_under_fsdp2() -> None:
    for wrong, owners in run(2, train_clipped):
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
def test_a_checkpoint_under_fsdp2(tmp_path: Any) -> None:
    yes, no = [True] * MATRICES, [False] * MATRICES
    assert run(2, resume_sharded, str(tmp_path)) == [[yes, yes, no]] * 2
