"""Weights of convolutions [out, in, height, width], which an optimizer flattens to a matrix as it likes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import canzona_compile
from tests.harness.layouts import ALONE, Case
from tests.harness.marks import also, first
from tests.harness.optimizers import orthogonal
from tests.harness.pairs import Pair, different, feed, parameters, params_of
from tests.harness.ranks import run
from tests.harness.toy_optimizers import PerParameter, State

SHAPES = ((9, 4, 3, 3), (8, 8, 1, 1), (2, 5, 3, 2), (7, 6))


class ConvolutionMuon(PerParameter):
    """Rows are output channels; everything else is a column."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        state["momentum_buffer"].mul_(0.9).add_(grad)
        matrix = state["momentum_buffer"].flatten(1)
        update = orthogonal(matrix.unsqueeze(0)).squeeze(0).to(param.dtype)
        param.add_(update.view_as(param), alpha=-group["lr"])


class PixelMuon(ConvolutionMuon):
    """One matrix [out, in] per pixel of the kernel."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if param.ndim < 4:
            super().update(param, grad, group, state)
            return
        pixels = grad.flatten(2).permute(2, 0, 1)
        update = orthogonal(pixels).to(param.dtype).permute(1, 2, 0)
        param.add_(update.reshape(param.shape), alpha=-group["lr"])


KINDS: dict[str, type[Optimizer]] = {"flattened": ConvolutionMuon, "by pixel": PixelMuon}


def train(kind: str, case: Case) -> None:
    pair = Pair(KINDS[kind], SHAPES, case=case, strategy="owner")
    pair.steps(4)
    assert len(pair.report.tasks) == len(SHAPES)
    assert pair.report.fallbacks == {}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", first(KINDS))
@pytest.mark.parametrize("layout", ["stack_dim0", *also(["stack_dim1"]), "ddp", *also(["replicated"])])
def test_convolutions(kind: str, layout: str) -> None:
    run(2, train, kind, Case(layout, (2,)), after=partial(train, kind, ALONE))


class DirectMuon(PerParameter):
    """Flattens the gradient and the weight themselves, and no momentum that was made for them."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        matrix = (grad + 0.1 * param).flatten(1)
        update = orthogonal(matrix.unsqueeze(0)).squeeze(0).to(param.dtype)
        param.add_(update.view(param.shape), alpha=-group["lr"])


def test_weights_in_channels_last_are_flattened_by_index() -> None:
    plain, own = (
        DirectMuon([nn.Parameter(p.detach().to(memory_format=torch.channels_last)) for p in parameters(SHAPES[:3])])
        for _ in range(2)
    )
    canzona_compile.wrap(own)
    for step in range(3):
        for optimizer in (plain, own):
            feed(optimizer, step)
            for param in params_of(optimizer):
                param.grad = param.grad.to(memory_format=torch.channels_last)  # type: ignore[union-attr]
            optimizer.step()
        assert different(plain, own) == []
