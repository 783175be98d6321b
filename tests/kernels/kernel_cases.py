"""What the tests of the matrix kernels share, in Triton's interpreter and on a GPU: operands, fp64 and bounds."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from canzona_compile.kernels.dispatch import KernelChoice

# Half a unit in the last place. The interpreter cuts float32 off to bfloat16, hence a whole unit there.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
# What sums in float32 may lose, in parts of the sum of magnitudes. On the CPU each sum is rounded, and errors cancel.
# The tensor cores of Hopper cut sums off instead, at least one bit further: each instruction, which sums 16 products,
# may lose a unit of the last of 24 bits, always in the same direction. Tests have up to 2056 products.
ACCUMULATED = {"cpu": 1e-6, "cuda": 2056 / 16 * 2.0**-23}


def no_interpreter() -> str:
    """Why Triton's interpreter does not run here; empty if it does."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1 before kernels are imported, which -m gpu leaves out"
    try:
        triton, numpy = (tuple(map(int, importlib.metadata.version(x).split(".")[:2])) for x in ("triton", "numpy"))
    except importlib.metadata.PackageNotFoundError:
        return "needs Triton"
    if triton < (3, 7) and numpy >= (2, 4):
        return "the interpreter of Triton 3.6 makes loop bounds in a way that numpy 2.4 refuses: install numpy<2.4"
    return ""


interpreted = pytest.mark.skipif(bool(no_interpreter()), reason=no_interpreter() or "it runs")


def random(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)


def integers(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    """Small whole numbers, of which products and sums are exact in every dtype but the result's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(device=device, dtype=dtype)


def symmetric(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    whole = random(*shape, dtype=torch.float64, device=device, seed=seed)
    return (whole + whole.mT).to(dtype)


def close(result: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """Assert that each element is the exact one, but for one rounding and for sums in float32.

    exact and magnitude are in float64; magnitude is the same expression with all summands made positive.
    """
    assert result.shape == exact.shape
    bound = ROUNDING[result.dtype] * exact.abs() + ACCUMULATED[result.device.type] * magnitude + 1e-30
    if result.dtype == torch.float16:
        bound += 2.0**-25  # half of its smallest number
    excess = ((result.double() - exact).abs() / bound).max().item()
    assert excess <= 1.0, f"off by {excess:.3} times the bound"


def product(
    a: Tensor, b: Tensor | None, c: Tensor | None, alpha: float, beta: float, diag: float, trans: bool = False
) -> tuple[Tensor, Tensor]:
    """alpha * A @ (B or A)^T + beta * C + diag * I in float64, and the same of magnitudes."""
    left = a.double().mT if trans else a.double()
    right = left if b is None else (b.double().mT if trans else b.double())
    eye = torch.eye(left.shape[-2], dtype=torch.float64, device=a.device)
    exact = alpha * left @ right.mT + diag * eye
    magnitude = abs(alpha) * left.abs() @ right.abs().mT + abs(diag) * eye
    if c is not None:
        exact, magnitude = exact + beta * c.double(), magnitude + abs(beta) * c.double().abs()
    return exact, magnitude


def mirrored(exact: Tensor) -> Tensor:
    """A matrix whose upper triangle is its lower one, as the triangle kernels write it."""
    return exact.tril() + exact.tril(-1).mT


def spread(x: Tensor) -> Tensor:
    """The same values in every second row and column of a larger tensor."""
    large = x.new_full((*x.shape[:-2], 2 * x.shape[-2], 2 * x.shape[-1]), float("nan"))
    large[..., ::2, ::2] = x
    return large[..., ::2, ::2]


def turned(x: Tensor) -> Tensor:
    """The same values, column by column in memory."""
    return x.mT.contiguous().mT


def shifted(x: Tensor) -> Tensor:
    """The same values, one element off any alignment, rows with a gap between them."""
    large = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
    large[..., 1 : x.shape[-1] + 1] = x
    return large[..., 1 : x.shape[-1] + 1]


def repeated(x: Tensor) -> Tensor:
    """The first matrix for all of the batch, with stride 0."""
    return x[:1].expand_as(x)


def gapped(x: Tensor) -> Tensor:
    """The same values, with rows that begin at multiples of 16 elements and have a gap between them."""
    large = x.new_full((*x.shape[:-1], -(-x.shape[-1] // 16) * 16 + 16), float("nan"))
    large[..., : x.shape[-1]] = x
    return large[..., : x.shape[-1]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (spread, turned, shifted, repeated, gapped)}
ALIGNED = ("turned", "repeated", "gapped")  # what tensor descriptors can describe, of sizes that are multiples of 8


@dataclass(frozen=True)
class Guarded:
    """A tensor to write to, inside of a larger one that nobody may touch."""

    around: Tensor
    inner: Tensor

    @classmethod
    def like(cls, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Guarded:
        *batch, rows, columns = shape
        around = torch.full((*batch, rows + 3, columns + 16), 7.0, dtype=dtype, device=device)
        return cls(around, around[..., 1 : rows + 1, :columns])

    def untouched(self) -> bool:
        outside = self.around.clone()
        outside[..., 1 : self.inner.shape[-2] + 1, : self.inner.shape[-1]] = 7.0
        return bool((outside == 7.0).all())


def name_of(choice: KernelChoice) -> str:
    """For test ids."""
    tile = choice.tile
    return choice.kernel if tile is None else f"{choice.kernel}-{tile.m}x{tile.n}x{tile.k}x{tile.stages}w{tile.warps}"


def label(value: object) -> str:
    """The name of a parameter of any kind."""
    return name_of(value) if isinstance(value, KernelChoice) else str(value)
