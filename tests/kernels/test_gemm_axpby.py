"""gemm_axpby in Triton's interpreter and in the library, against float64; and padding."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from canzona_compile.kernels.dispatch import QUACK, KernelChoice, Tile, recorded
from canzona_compile.kernels.gemm_axpby import gemm_axpby, reference
from canzona_compile.kernels.padding import corner, pad_cast, padded_size
from canzona_compile.kernels.sym_gemm import sym_gemm
from tests.harness.marks import crossed, first
from tests.kernels.kernel_cases import (
    ALIGNED,
    LAYOUTS,
    close,
    integers,
    interpreted,
    label,
    name_of,
    random,
    symmetric,
)

pytestmark = interpreted

LIBRARY = KernelChoice("library")
POINTER = KernelChoice("pointer", Tile(16, 32, 16, warps=4, stages=2, band=2))
TMA = KernelChoice("tma", Tile(16, 16, 16, warps=4, stages=2, band=2))
PAIRS = KernelChoice("tma", Tile(16, 32, 16, warps=4, stages=2, band=2))
KERNELS = (LIBRARY, POINTER)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

each_kernel = pytest.mark.parametrize("choice", KERNELS, ids=name_of)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_side = pytest.mark.parametrize("right", [False, True], ids=["left", "right"])


def exact(f: Tensor, x: Tensor, alpha: float, beta: float, right: bool) -> tuple[Tensor, Tensor]:
    """alpha * X + beta * F @ X (X @ F) in float64, and the same of magnitudes."""
    f, x = f.double(), x.double()
    product = x @ f if right else f @ x
    magnitude = x.abs() @ f.abs() if right else f.abs() @ x.abs()
    return alpha * x + beta * product, abs(alpha) * x.abs() + abs(beta) * magnitude


@pytest.mark.parametrize(
    ("shape", "dtype", "choice", "right"),
    crossed([(1, 1, 5), (2, 33, 17), (3, 16, 48), (1, 40, 70)], DTYPES, KERNELS, [False, True]),
    ids=label,
)
def test_sizes(shape: tuple[int, int, int], dtype: torch.dtype, choice: KernelChoice, right: bool) -> None:
    batch, m, n = shape
    x = random(batch, m, n, dtype=dtype)
    factor = random(batch, *((n, n) if right else (m, m)), dtype=dtype, seed=1)
    result = gemm_axpby(factor, x, alpha=1.5, beta=-0.5, right=right, choice=choice)
    close(result, *exact(factor, x, 1.5, -0.5, right))


@each_kernel
def test_leading_dims_are_none_or_many_and_broadcast(choice: KernelChoice) -> None:
    factor, x = random(2, 1, 8, 8, dtype=torch.float32), random(3, 8, 20, dtype=torch.float32, seed=1)
    result = gemm_axpby(factor, x, choice=choice)
    assert result.shape == (2, 3, 8, 20)
    close(result, *exact(factor, x, 1, 1, False))
    close(gemm_axpby(factor[0, 0], x[0], choice=choice), *exact(factor[0, 0], x[0], 1, 1, False))
    out = torch.zeros(3, 2, 8, 20).transpose(0, 1)
    assert gemm_axpby(factor, x, out=out, choice=choice) is out
    assert torch.equal(out, result)


@each_kernel
def test_results_lie_as_their_summands(choice: KernelChoice) -> None:
    """A tall matrix that was transposed is read and written along its memory."""
    factor, x = random(2, 24, 24, dtype=torch.bfloat16), random(2, 40, 24, dtype=torch.bfloat16, seed=1).mT
    result = gemm_axpby(factor, x, choice=choice)
    assert result.stride() == x.stride()
    close(result, *exact(factor, x, 1, 1, False))


@each_kernel
def test_whole_numbers_are_exact(choice: KernelChoice) -> None:
    factor, x = integers(2, 24, 24, dtype=torch.bfloat16), integers(2, 24, 40, dtype=torch.bfloat16, seed=1)
    result = gemm_axpby(factor, x, alpha=3.0, beta=-1.0, choice=choice)
    assert torch.equal(result.double(), exact(factor, x, 3.0, -1.0, False)[0])


@each_dtype
@each_side
def test_the_reference(dtype: torch.dtype, right: bool) -> None:
    x = random(2, 9, 7, dtype=dtype)
    factor = random(2, *((7, 7) if right else (9, 9)), dtype=dtype, seed=1)
    y, magnitude = exact(factor, x, 0.5, 2.0, right)
    out = torch.empty_like(x)
    assert reference(factor, x, alpha=0.5, beta=2.0, right=right, out=out) is out
    close(out, y, magnitude)


def test_what_ran_is_recorded() -> None:
    x = torch.zeros(2, 16, 24)
    with recorded() as launches:
        gemm_axpby(torch.zeros(2, 16, 16), x)
        gemm_axpby(torch.zeros(2, 24, 24), x, right=True, choice=POINTER)
    assert [(r.problem.op, r.problem.m, r.problem.k, r.choice.kernel) for r in launches] == [
        ("gemm_axpby", 16, 24, "library"),
        ("gemm_axpby", 24, 16, "pointer"),
    ]


def test_what_cannot_be_is_refused() -> None:
    x, f = torch.zeros(2, 8, 6), torch.zeros(2, 8, 8)
    with pytest.raises(ValueError, match="factor holds 8x8"):
        gemm_axpby(f, x, right=True)
    with pytest.raises(TypeError, match="the same dtype"):
        gemm_axpby(f.half(), x)
    with pytest.raises(ValueError, match="read while out is written"):
        gemm_axpby(f, x, out=x)
    with pytest.raises(ValueError, match="out is"):
        gemm_axpby(f, x, out=torch.empty(2, 8, 6, dtype=torch.float16))
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        gemm_axpby(f, x, choice=TMA)
    wide = torch.zeros(2, 8, 8)
    with pytest.raises(ValueError, match="the strides of x"):
        gemm_axpby(f, wide, out=torch.zeros(2, 8, 8).mT, choice=TMA)


# -- padding --------------------------------------------------------------------------------------


def test_padded_sizes() -> None:
    assert [padded_size(n) for n in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]


@pytest.mark.parametrize("shape", [(5, 7), (2, 16, 33), (3, 2, 32, 16), (1, 1)], ids=str)
def test_padding_is_zeros_around_the_cast_values(shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=torch.float32)
    padded = pad_cast(x, torch.bfloat16)
    rows, columns = shape[-2:]
    assert padded.shape == (*shape[:-2], padded_size(rows), padded_size(columns))
    assert padded.is_contiguous()
    assert torch.equal(corner(padded, rows, columns), x.bfloat16())
    assert not padded[..., rows:, :].any()
    assert not padded[..., columns:].any()


def test_padding_is_exact_for_newton_schulz() -> None:
    """Five steps of a padded matrix of whole numbers hold those of the matrix, and zeros around."""
    small = random(1, 21, 37, dtype=torch.float64)
    small /= small.norm()
    x, big = small, pad_cast(small, torch.float64)
    assert big.shape == (1, 32, 48)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 5:
        x, big = newton_schulz(x, a, b, c), newton_schulz(big, a, b, c)
    assert (corner(big, 21, 37) - x).abs().max() < 1e-12
    assert not big[..., 21:, :].any()
    assert not big[..., 37:].any()


def newton_schulz(x: Tensor, a: float, b: float, c: float) -> Tensor:
    gram = sym_gemm(x)
    return gemm_axpby(sym_gemm(gram, c=gram, alpha=c, beta=b), x, alpha=a)


@pytest.mark.parametrize(
    "choice",
    first([LIBRARY, KernelChoice("pointer", Tile(16, 16, 16, 4, 2)), KernelChoice("tma", Tile(16, 32, 16, 4, 2))]),
    ids=name_of,
)
def test_newton_schulz_with_the_kernels(choice: KernelChoice) -> None:
    """The whole iteration in float32 against plain torch in float64."""
    start = random(2, 24, 40, dtype=torch.float32)
    start /= start.norm(dim=(-2, -1), keepdim=True)
    x, plain = start, start.double()
    multiply = LIBRARY if choice.kernel == "library" else POINTER
    for _ in range(5):
        gram = sym_gemm(x, choice=choice)
        factor = sym_gemm(gram, c=gram, alpha=2.0315, beta=-4.7750, choice=choice)
        x = gemm_axpby(factor, x, alpha=3.4445, choice=multiply)
        square = plain @ plain.mT
        plain = 3.4445 * plain + (-4.7750 * square + 2.0315 * square @ square) @ plain
    assert (x - plain).abs().max() < 1e-5 * plain.abs().max()


def test_the_alignments_that_layouts_have_in_these_tests() -> None:
    """Otherwise the tests of descriptors would not reach them."""
    for name in LAYOUTS:
        with recorded() as launches:
            sym_gemm(LAYOUTS[name](symmetric(2, 16, 16, dtype=torch.float16)))
        assert (launches[0].problem.alignment >= 8) == (name in ALIGNED), name


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_what_quack_is_given(right: bool, tall: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function has this signature in 0.6.5; it needs a GPU, so torch stands in for its arithmetic."""

    def gemm_add(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, out: torch.Tensor, alpha: float, beta: float, tuned: bool
    ) -> None:
        assert (out.stride(-1), tuned) == (1, False)
        out.copy_(beta * c + alpha * a @ b)

    interface = ModuleType("quack.gemm_interface")
    interface.gemm_add = gemm_add  # type: ignore[attr-defined]
    for name, module in {"quack": ModuleType("quack"), "quack.gemm_interface": interface}.items():
        monkeypatch.setitem(sys.modules, name, module)
    x = random(2, 24, 40, dtype=torch.float32)
    x = x.mT.contiguous().mT if tall else x
    factor = random(2, *((40, 40) if right else (24, 24)), dtype=torch.float32, seed=1)
    result = gemm_axpby(factor, x, alpha=1.5, beta=-0.5, right=right, choice=QUACK)
    assert result.stride() == x.stride()
    close(result, *exact(factor, x, 1.5, -0.5, right))
