"""Weights of convolutions [out, in, height, width], which an optimizer flattens to a matrix as it likes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import canzona_compile
from tests.harness.layouts import ALONE, Case
from tests.harness.marks import also, first
from tests.harness.pairs import Pair, different, feed, parameters, params_of
from tests.harness.ranks import run
from tests.harness.traps.grammar import toy

SHAPES = ((9, 4, 3, 3), (8, 8, 1, 1), (2, 5, 3, 2), (7, 6))


MOMENTUM = 'momentum = state.setdefault("momentum_buffer", torch.zeros_like(grad)).mul_(0.9).add_(grad)'
FLATTENED = "orthogonal(momentum.flatten(1).unsqueeze(0)).squeeze(0).view_as(param).to(param.dtype)"
PIXELS = "orthogonal(grad.flatten(2).permute(2, 0, 1)).permute(1, 2, 0).reshape(param.shape).to(param.dtype)"
NEWTON_SCHULZ = {"outside": "from tests.harness.optimizers import orthogonal"}
# Rows are output channels; everything else is a column.
ConvolutionMuon = toy("convolution-muon", param=MOMENTUM, update=FLATTENED, **NEWTON_SCHULZ)()
# One matrix [out, in] per pixel of the kernel.
PixelMuon = toy(
    "pixel-muon",
    param=f"if param.ndim < 4:\n    {MOMENTUM}",
    update=f"{FLATTENED} if param.ndim < 4 else {PIXELS}",
    **NEWTON_SCHULZ,
)()
# Flattens the gradient and the weight themselves, and no momentum that was made for them.
DirectMuon = toy("direct-muon", param="momentum = grad + 0.1 * param", update=FLATTENED, **NEWTON_SCHULZ)()
KINDS: dict[str, type[Optimizer]] = {"flattened": ConvolutionMuon, "by pixel": PixelMuon}


def train(kind: str, case: Case) -> None:
    pair = Pair(KINDS[kind], SHAPES, case=case, strategy="owner")
    pair.steps(4)
    assert len(pair.report.tasks) == len(SHAPES)
    assert pair.report.fallbacks == {}


@pytest.mark.parametrize("kind", first(KINDS))
@pytest.mark.parametrize("layout", ["stack_dim0", *also(["stack_dim1"]), "ddp", *also(["replicated"])])
def test_convolutions(kind: str, layout: str) -> None:
    run(2, train, kind, Case(layout, (2,)), after=partial(train, kind, ALONE))


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
