"""Training loops as people write them: scaling, clipping, accumulation, averages of weights, copies and checkpoints.

Beside every wrapped loop the plain one runs. On ranks it runs whole on each of them: all ranks take the same
batches, so that averages over two ranks are exact.
"""

from __future__ import annotations

import copy
import io
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon
from torch.optim.lr_scheduler import OneCycleLR

import canzona_compile
from tests.harness.layouts import full, mesh_of
from tests.harness.marks import also
from tests.harness.optimizers import share_captures
from tests.harness.pairs import different, same_bits, unlike
from tests.harness.ranks import run

BATCH, WIDTHS = 8, (12, 20, 12, 20)  # two shapes, that little has to be captured
MOST = 1e-3  # that clipping leaves of the norm, far below what it is


def model_of(seed: int = 0) -> Any:
    """Three matrices and nothing else: Muon takes no vectors."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.SiLU()]
    return nn.Sequential(*layers)


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, WIDTHS[0], generator=random), torch.randn(BATCH, WIDTHS[-1], generator=random)


def loss_of(model: Any, step: int) -> Tensor:
    inputs, targets = batch(step)
    return F.mse_loss(model(inputs), targets)


class Loop:
    """A model and its optimizer; two loops are equal where all that they hold has equal bits."""

    def __init__(self, wrap: bool, model: Any = None, trained: Any = None, **options: Any) -> None:
        self.model = model_of() if model is None else model
        self.trained = trained or self.model  # what is called
        self.optimizer: Any = Muon(self.model.named_parameters(), lr=0.05, weight_decay=0.1)
        if wrap:
            canzona_compile.wrap(self.optimizer, **options)
            share_captures(self.optimizer)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.trained, number).backward()
        self.optimizer.step()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.step(number)

    def values(self) -> list[Tensor]:
        """The parameters, whole (a collective)."""
        return [full(param).clone() for param in self.model.parameters()]


def loops() -> tuple[Loop, Loop]:
    return Loop(wrap=False), Loop(wrap=True)


def on_a_rank(**options: Any) -> tuple[Loop, Loop]:
    """A plain loop, and a wrapped one under FSDP2."""
    model = fully_shard(model_of(), mesh=mesh_of((dist.get_world_size(),), ("dp",)))
    return Loop(wrap=False), Loop(wrap=True, model=model, strategy="owner", **options)


def moved(before: list[Tensor], loop: Loop) -> bool:
    return not all(map(same_bits, before, loop.values()))


def step_alone() -> None:
    """What ranks would capture, each by itself."""
    Loop(wrap=True).steps(0, 1)


ALONE = partial(step_alone)


def differing(plain: Loop, wrapped: Loop) -> list[str]:
    """What has other bits; that both have moved, and the wrapped one by graphs, is a condition of asking."""
    assert not canzona_compile.is_wrapped(plain.optimizer)
    report = wrapped.optimizer.canzona.report()
    assert report.fallbacks == {}
    assert len(report.tasks) == len(plain.optimizer.state) == len(WIDTHS) - 1
    assert moved(list(model_of().parameters()), plain)
    return different(plain.optimizer, wrapped.optimizer)


def check(plain: Loop, wrapped: Loop) -> None:
    assert differing(plain, wrapped) == []


# -- loss scaling and clipping -----------------------------------------------------------------


def test_scaled_and_clipped_steps_of_which_one_is_skipped() -> None:
    """`unscale_` first, as clipping needs it; step 2 overflows and must leave no trace but the smaller scale."""
    both, ends = loops(), []
    for loop in both:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        went, scales, norms = [], [], []
        for step in range(6):
            before, state = loop.values(), copy.deepcopy(loop.optimizer.state_dict())
            loop.optimizer.zero_grad()
            loss = loss_of(loop.model, step) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(loop.optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(loop.model.parameters(), MOST)))
            scaler.step(loop.optimizer)
            scaler.update()
            went.append(moved(before, loop) or bool(unlike("", loop.optimizer.state_dict(), state)))
            scales.append(scaler.get_scale())
        assert went == [True, True, False, True, True, True]
        assert min(norms[:2] + norms[3:]) > MOST, "nothing is clipped"
        ends.append((scales, norms[:2] + norms[3:]))
    assert ends[0] == ends[1]
    assert ends[0][0][1:3] == [2048.0, 1024.0], "the scale neither grew nor shrank"
    check(*both)


def scale_on_ranks() -> tuple[list[str], list[bool], float]:
    """One infinite element, on the last rank: GradScaler has to make all ranks skip that step."""
    alone, loop = on_a_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    went = []
    for step in range(4):
        loop.optimizer.zero_grad()
        before = loop.values()
        scaler.scale(loss_of(loop.model, step)).backward()
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            loop.model[0].weight.grad.to_local()[0, 0] = float("inf")
        scaler.step(loop.optimizer)
        scaler.update()
        went.append(moved(before, loop))
        if step != 1:
            alone.step(step)  # scales are powers of two, so that unscaled gradients have the bits of these
    return differing(alone, loop), went, scaler.get_scale()


def test_all_ranks_skip_a_step_that_one_cannot_take() -> None:
    assert run(2, scale_on_ranks, after=ALONE) == [([], [True, False, True, True], 512.0)] * 2


# -- copies -----------------------------------------------------------------------


@pytest.mark.full
def test_model_and_optimizer_copied_together() -> None:
    """One memo: the copied optimizer steps the copied parameters, and the original nothing of them."""
    both = loops()
    copies = []
    for loop in both:
        loop.steps(0, 1)
        copies.append(copy.deepcopy(loop))
    kept = {name: value.clone() for name, value in both[1].model.state_dict().items()}
    for made in copies:
        assert [id(p) for p in made.optimizer.param_groups[0]["params"]] == [id(p) for p in made.model.parameters()]
        made.steps(2, 3)
    assert canzona_compile.is_wrapped(copies[1].optimizer)
    check(*copies)
    assert all(same_bits(kept[name], value) for name, value in both[1].model.state_dict().items())
    for loop in both:
        loop.steps(2, 3)
    check(*both)
    check(both[0], copies[1])


# -- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [*also(["plain"]), "wrapped"])
def test_dictionaries_saved_in_mid_training(source: str) -> None:
    """With weights_only=True, as torch loads by default: nothing of ours may be in the file."""
    both = loops()
    cycles = [OneCycleLR(loop.optimizer, max_lr=0.2, total_steps=10) for loop in both]
    for step in range(3):
        for loop, cycle in zip(both, cycles, strict=True):
            loop.step(step)
            cycle.step()
    which = ["plain", "wrapped"].index(source)
    parts = {"model": both[which].model, "optimizer": both[which].optimizer, "schedule": cycles[which]}
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    resumed = Loop(wrap=False, model=model_of(1)), Loop(wrap=True, model=model_of(1))
    for loop in resumed:
        cycle = OneCycleLR(loop.optimizer, max_lr=0.2, total_steps=10)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        loop.model.load_state_dict(state["model"])
        loop.optimizer.load_state_dict(state["optimizer"])
        cycle.load_state_dict(state["schedule"])
        for step in range(3, 6):
            loop.step(step)
            cycle.step()
    for step in range(3, 6):
        both[0].step(step)
        cycles[0].step()
    check(*resumed)
    check(both[0], resumed[1])
