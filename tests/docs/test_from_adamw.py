"""What the guide for people who come from AdamW says about Muon's learning rates, and about 8-bit state."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from tests.docs.scripts import ROOT, SCRIPTS, path_of, ran

SHAPES = ((64, 64), (256, 64), (64, 256))  # the page has them 16 times as large
FACTORS = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
}


def page() -> str:
    return (ROOT / "docs" / "guides" / "from_adamw.md").read_text(encoding="utf-8")


def step_of(shape: tuple[int, int], adjust: str | None, **options: float) -> torch.Tensor:
    torch.manual_seed(0)
    start = torch.ones(shape)
    param = nn.Parameter(start.clone())
    param.grad = torch.linalg.qr(torch.randn(shape))[0] if shape[0] >= shape[1] else torch.eye(*shape)
    torch.optim.Muon([param], adjust_lr_fn=adjust, **{"lr": 1.0, "weight_decay": 0.0, **options}).step()
    return start - param.detach()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adjust", FACTORS)
def test_factors_of_the_table_are_those_of_torch(adjust: str | None, shape: tuple[int, int]) -> None:
    """Singular values near 1 before the factor; five iterations leave them between 0.7 and 1.2."""
    values = torch.linalg.svdvals(step_of(shape, adjust)) / FACTORS[adjust](*shape)
    assert 0.65 < float(values.min()) <= float(values.max()) < 1.25


def test_the_table_has_the_size_of_updates() -> None:
    rows = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| ")]
    sizes = {name.strip('`"'): [float(n) for n in cells[1].split(", ")] for name, *cells in rows if ", 0." in cells[1]}
    assert set(sizes) == {"match_rms_adamw", "original", "muP, spectral"}
    shapes = [(16 * rows, 16 * columns) for rows, columns in SHAPES]
    factors = {**FACTORS, "muP, spectral": lambda rows, columns: math.sqrt(rows / columns)}
    for name, found in sizes.items():
        expected = [factors[name](*shape) / math.sqrt(max(shape)) for shape in shapes]
        assert found == pytest.approx(expected, rel=0.03)


def test_weight_decay_has_no_factor() -> None:
    with_decay, without = (step_of((64, 256), "match_rms_adamw", weight_decay=w) for w in (0.1, 0.0))
    assert torch.allclose(with_decay - without, torch.full((64, 256), 0.1), atol=1e-5)


def test_the_scale_of_gradients_is_nothing_to_muon() -> None:
    found = []
    for scale in (1.0, 2.0**-10):
        param = nn.Parameter(torch.ones(32, 32))
        param.grad = scale * torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        torch.optim.Muon([param], lr=1.0).step()
        found.append(param.detach())
    assert torch.allclose(*found, atol=0.02)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_bytes_of_state_are_those_of_the_page() -> None:
    said = ran(path_of("eight_bit"), SCRIPTS["eight_bit"])[0].said
    lines = re.findall(r"^AdamW.* of state.*$", said, re.MULTILINE)
    assert len(lines) == 2
    assert all(line in page() for line in lines)
