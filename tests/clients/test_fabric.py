"""Lightning Fabric: its proxy around a wrapped optimizer, its backward, clipping, scaling and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon
from torch.optim.lr_scheduler import CosineAnnealingLR

import canzona_compile
from canzona_compile import CanzonaError
from tests.harness.frameworks import running_ranks
from tests.harness.marks import also, first
from tests.harness.model_pairs import train_alone, update
from tests.harness.optimizers import share_captures
from tests.harness.pairs import different, same_bits
from tests.harness.ranks import run

pytest.importorskip("lightning_fabric")

MATRICES = 3


def model_of(seed: int = 0) -> Any:
    """Of one shape, that little has to be captured."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(12, 12, bias=False), nn.SiLU()) for _ in range(MATRICES)]
    return nn.Sequential(*layers)


def muon(model: Any, wrap: bool, **options: Any) -> Any:
    optimizer: Any = Muon(model.parameters(), lr=0.05, weight_decay=0.1)
    if wrap:
        canzona_compile.wrap(optimizer, **options)
        share_captures(optimizer)
    return optimizer


def step_alone() -> None:
    """What ranks would capture, each by itself."""
    model = model_of()
    train_alone(model, [muon(model, wrap=False)], loss_of)


def loss_of(model: Any, step: int, rank: int = 0) -> Tensor:
    """On all ranks the same, so that an average over two of them is exact."""
    random = torch.Generator().manual_seed(100 + step)
    inputs, targets = torch.randn(2, 8, 12, generator=random)
    loss: Tensor = F.mse_loss(model(inputs), targets)
    return loss


def fabric_of(**settings: Any) -> Any:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", **settings)
    fabric.launch()
    return fabric


class Training:
    """What Fabric makes of a model and an optimizer, by its own methods alone."""

    def __init__(self, fabric: Any, model: Any, optimizer: Any) -> None:
        self.fabric, self.inner = fabric, optimizer
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=20)

    def steps(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.fabric.backward(loss_of(self.model, number))
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1e-2)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.scheduler}


def check(plain: Training, wrapped: Training) -> None:
    """Equal bits, and the wrapped one was stepped by graphs."""
    assert not canzona_compile.is_wrapped(plain.inner)
    assert wrapped.inner.canzona.report().fallbacks == {}
    assert len(wrapped.inner.canzona.report().tasks) == MATRICES
    assert len(plain.inner.state) == MATRICES
    assert different(plain.inner, wrapped.inner) == []
    assert plain.optimizer.param_groups[0]["lr"] == wrapped.optimizer.param_groups[0]["lr"] != 0.05


def pair(**settings: Any) -> tuple[Training, Training]:
    made = []
    for wrap in (False, True):
        model = model_of()
        made.append(Training(fabric_of(devices=1, **settings), model, muon(model, wrap)))
    return made[0], made[1]


# -- in one process ----------------------------------------------------------------------------


def test_fabric_s_optimizer_steps_the_wrapped_one() -> None:
    both = pair()
    before = [p.detach().clone() for p in both[1].model.parameters()]
    for training in both:
        training.steps(range(5))
    check(*both)
    assert both[1].optimizer.optimizer is both[1].inner
    assert isinstance(both[1].optimizer, Muon)
    assert not any(map(same_bits, before, both[1].model.parameters()))


def test_closures_go_through_fabric_s_optimizer() -> None:
    both, losses = pair(), []
    for training in both:
        for step in range(3):

            def closure(training: Training = training, step: int = step) -> Tensor:
                training.optimizer.zero_grad()
                loss = loss_of(training.model, step)
                training.fabric.backward(loss)
                return loss

            losses.append(training.optimizer.step(closure).item())
            training.scheduler.step()
    assert losses[:3] == losses[3:]
    check(*both)


@pytest.mark.parametrize("source", first(["plain", "wrapped"]))
def test_save_and_load(source: str, tmp_path: Path) -> None:
    both = pair()
    for training in both:
        training.steps(range(3))
    saving = both[source == "wrapped"]
    saving.fabric.save(tmp_path / "checkpoint", saving.parts)
    resumed = pair()
    for training in resumed:
        training.steps([9])  # a step that the checkpoint has to undo
        training.fabric.load(tmp_path / "checkpoint", training.parts)
    for training in (*both, *resumed):
        training.steps(range(3, 6))
    check(*resumed)
    check(both[0], resumed[1])


def test_the_optimizer_inside_of_what_fabric_put_around_it_is_wrapped() -> None:
    """A step of the proxy's class would change nothing, and say nothing."""
    (plain, wrapped), (around, _) = pair(), pair()
    assert canzona_compile.wrap(around.optimizer) is around.optimizer
    assert canzona_compile.is_wrapped(around.inner)
    with pytest.raises(CanzonaError, match="is a wrapper around the wrapped optimizer"):
        canzona_compile.unwrap(wrapped.optimizer)
    for training in (plain, wrapped, around):
        training.steps(range(2))
    check(plain, wrapped)
    check(plain, around)
    canzona_compile.unwrap(wrapped.inner)
    assert type(wrapped.inner) is Muon
    for training in (plain, wrapped):
        training.steps(range(2, 4))
    assert different(plain.inner, wrapped.inner) == []


# -- on ranks ----------------------------------------------------------------------------------


def train_on_ranks(parallelism: str, path: Path) -> tuple[list[str], list[str], int]:
    """Three steps, a checkpoint of whole tensors, fresh objects, three steps more; plain Muon all the way."""
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    def strategy() -> Any:
        if parallelism == "ddp":
            return DDPStrategy()
        return ModelParallelStrategy(
            lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]),
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )

    replicate = dist.group.WORLD if parallelism == "ddp" else None

    def training(seed: int) -> tuple[Any, Any, Any, Any]:
        ranks = running_ranks(LightningEnvironment)
        fabric = fabric_of(devices=dist.get_world_size(), strategy=strategy(), plugins=[ranks])
        model = fabric.setup_module(model_of(seed))
        optimizer = muon(model, wrap=True, replicate=replicate, strategy="owner")
        return fabric, model, optimizer, fabric.setup_optimizers(optimizer)

    alone = model_of()
    plain = muon(alone, wrap=False)
    wrong = []
    fabric, model, inner, optimizer = training(seed=0)
    for step in range(6):
        if step == 3:
            fabric.save(path, {"model": model, "optimizer": optimizer})
            fabric, model, inner, optimizer = training(seed=1)
            fabric.load(path, {"model": model, "optimizer": optimizer})
        with fabric.no_backward_sync(model):
            fabric.backward(loss_of(model, 2 * step))
        fabric.backward(loss_of(model, 2 * step + 1))
        for part in range(2):
            loss_of(alone, 2 * step + part).backward()
        update((optimizer, plain))
        wrong += [f"{n} after step {step}" for n in different(plain, inner)]
    report = inner.canzona.report()
    return wrong, list(report.fallbacks), len({task.owner for task in report.tasks})


@pytest.mark.parametrize("parallelism", [*also(["ddp"]), "fsdp"])
def test_training_on_ranks(parallelism: str, tmp_path: Path) -> None:
    """In fresh processes: Fabric changes what is global to a process, threads and its own idea of a rank."""
    found = run(2, train_on_ranks, parallelism, tmp_path / "checkpoint", fresh=True, after=partial(step_alone))
    assert found == [([], [], 2)] * 2
