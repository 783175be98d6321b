"""sym_gemm in Triton's interpreter and in the library, against float64. What rounds, what is written, what is read."""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch

pytest.importorskip("triton")

from canzona_compile.kernels.dispatch import KernelChoice, Tile, recorded, triangle
from canzona_compile.kernels.sym_gemm import reference, sym_gemm
from canzona_compile.kernels.sym_gemm_triton import sym_gemm_pointer
from tests.harness.marks import also, crossed
from tests.kernels.kernel_cases import (
    close,
    integers,
    interpreted,
    label,
    mirrored,
    name_of,
    product,
    random,
    symmetric,
)

pytestmark = interpreted

LIBRARY = KernelChoice("library")
POINTER = KernelChoice("pointer", Tile(16, 16, 16, warps=4, stages=2, band=2))
TMA = KernelChoice("tma", Tile(16, 16, 16, warps=4, stages=2, band=2))
PAIRS = KernelChoice("tma", Tile(16, 32, 16, warps=4, stages=2, band=2))
FLAT = KernelChoice("pointer", Tile(16, 32, 16, warps=4, stages=2, band=2))
TALL = KernelChoice("pointer", Tile(64, 16, 16, warps=4, stages=2, band=2))
KERNELS = (LIBRARY, POINTER, TMA, PAIRS, FLAT)
TRITON = (POINTER, TMA, PAIRS, FLAT, TALL)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Of kernels that differ in their tiles only, one; which tiles fit which sizes is asked apart from that.
each_kernel = pytest.mark.parametrize("choice", [LIBRARY, POINTER, TMA, *also([PAIRS, FLAT])], ids=name_of)
each_triton_kernel = pytest.mark.parametrize("choice", TRITON, ids=name_of)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# -- sizes and layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "dtype", "shape", "trans"),
    crossed(KERNELS, DTYPES, [(2, 40, 24), (1, 72, 16), (3, 8, 56), (1, 64, 32)], [False, True]),
    ids=label,
)
def test_sizes_that_every_kernel_takes(
    choice: KernelChoice, dtype: torch.dtype, shape: tuple[int, int, int], trans: bool
) -> None:
    batch, m, k = shape
    a = random(batch, *((k, m) if trans else (m, k)), dtype=dtype)
    c = symmetric(batch, m, m, dtype=dtype, seed=1)
    result = sym_gemm(a, c=c, alpha=0.5, beta=-2.0, diag=0.25, trans=trans, choice=choice)
    exact, magnitude = product(a, None, c, 0.5, -2.0, 0.25, trans)
    # The library adds to the diagonal of what it has rounded.
    close(result, exact, magnitude * (1 if choice.kernel != "library" else 2.0**-8 / 1e-6))
    if choice.kernel != "library":
        assert torch.equal(result, result.mT)


@each_kernel
def test_leading_dims_are_none_or_many_and_broadcast(choice: KernelChoice) -> None:
    one = random(16, 24, dtype=torch.float32)
    close(sym_gemm(one, choice=choice), *product(one, None, None, 1, 0, 0))
    many = random(2, 1, 2, 16, 24, dtype=torch.float32)
    c = symmetric(2, 1, 16, 16, dtype=torch.float32)
    result = sym_gemm(many, c=c, beta=1.0, choice=choice)
    assert result.shape == (2, 2, 2, 16, 16)
    close(result, *product(many, None, c, 1, 1, 0))


@each_kernel
def test_nothing_to_do(choice: KernelChoice) -> None:
    assert sym_gemm(torch.empty(0, 8, 8), choice=choice).shape == (0, 8, 8)
    assert sym_gemm(torch.empty(3, 0, 8), choice=choice).shape == (3, 0, 0)


def test_sums_of_nothing() -> None:
    c = symmetric(2, 5, 5, dtype=torch.float32)
    for choice in (LIBRARY, POINTER):
        result = sym_gemm(torch.empty(2, 5, 0), c=c, beta=2.0, diag=1.0, choice=choice)
        assert torch.equal(result, 2.0 * c + torch.eye(5)), choice


def test_batch_offsets_are_64_bits_wide() -> None:
    """Three matrices, 2^30 elements apart, so that the last one begins where 32 bits have wrapped around."""
    far, size = 2**30, 16
    no_reserve = 0x4000  # Linux's MAP_NORESERVE: of 8 GiB only what is written takes memory
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    # The first matrix lies in the middle, so that what 32 bits would make of the last one's offset is memory too.
    memory = mmap.mmap(-1, (4 * far + size * size) * 2, flags=flags)
    starts = [2 * far, 3 * far, 4 * far]
    stack = [torch.frombuffer(memory, dtype=torch.float16, count=size * size, offset=2 * at) for at in starts]
    values = random(3, size, size, dtype=torch.float16)
    for place, value in zip(stack, values, strict=True):
        place.copy_(value.flatten())
    result = torch.zeros(3, size, size)
    operand, plain = (far, size, 1), result.stride()
    sym_gemm_pointer[(3 * triangle(1),)](
        stack[0], stack[0], result, result, 1.0, 0.0, 0.0, size, size, *operand, *operand, *plain, *plain,
        ROWS=16, COLS=16, BLOCK_K=16, BAND=1, HAS_C=False, UPCAST=True,
    )  # fmt: skip
    close(result, *product(values, None, None, 1, 0, 0))
    del stack, place
    memory.close()


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scalars", "choice"),
    crossed(list(itertools.product((1.0, -0.7), (0.0, 1.5), (0.0, -2.0))), KERNELS),
    ids=label,
)
def test_factors_and_a_diagonal(scalars: tuple[float, float, float], choice: KernelChoice) -> None:
    a, c = random(2, 24, 16, dtype=torch.float32), symmetric(2, 24, 24, dtype=torch.float32, seed=1)
    alpha, beta, diag = scalars
    close(sym_gemm(a, c=c, alpha=alpha, beta=beta, diag=diag, choice=choice), *product(a, None, c, *scalars))


@each_kernel
def test_c_is_not_read_if_beta_is_zero(choice: KernelChoice) -> None:
    a = random(2, 24, 16, dtype=torch.float32)
    c = torch.full((2, 24, 24), float("nan"))
    close(sym_gemm(a, c=c, choice=choice), *product(a, None, None, 1, 0, 0))


# -- symmetry -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "choice"), crossed(DTYPES, TRITON), ids=label)
def test_the_result_is_symmetric_bit_for_bit_even_if_the_product_is_not(
    choice: KernelChoice, dtype: torch.dtype
) -> None:
    a, b = random(2, 56, 24, dtype=dtype), random(2, 56, 24, dtype=dtype, seed=1)
    c = random(2, 56, 56, dtype=dtype, seed=2)  # of which the upper triangle must not matter
    result = sym_gemm(a, b, c, beta=1.0, diag=3.0, choice=choice)
    assert torch.equal(result, result.mT)
    exact, magnitude = product(a, b, c, 1.0, 1.0, 3.0)
    close(result, mirrored(exact), mirrored(magnitude))


@pytest.mark.parametrize(("choice", "dtype"), crossed(KERNELS, DTYPES[1:]), ids=label)
def test_whole_numbers_are_exact(choice: KernelChoice, dtype: torch.dtype) -> None:
    """Sums below 256 are exact in bfloat16, so that a lost or doubled product would show in its last bit."""
    a = integers(2, 40, 24, dtype=dtype)
    c = integers(2, 40, 40, dtype=dtype, seed=1)
    c = c + c.mT
    result = sym_gemm(a, c=c, alpha=2.0, beta=-1.0, diag=5.0, choice=choice)
    expected = 2 * a.double() @ a.double().mT - c.double() + 5 * torch.eye(40, dtype=torch.float64)
    assert expected.abs().max() <= 256
    assert torch.equal(result.double(), expected)


# -- out and dtypes -------------------------------------------------------------------------------


@each_kernel
def test_out_without_a_common_batch_stride(choice: KernelChoice) -> None:
    a = random(2, 3, 16, 16, dtype=torch.float32)
    out = torch.zeros(3, 2, 16, 16).transpose(0, 1)
    assert sym_gemm(a, out=out, choice=choice) is out
    close(out, *product(a, None, None, 1, 0, 0))


@pytest.mark.parametrize(("choice", "dtype"), crossed(KERNELS, DTYPES[1:]), ids=label)
def test_16_bit_operands_with_a_wide_result(choice: KernelChoice, dtype: torch.dtype) -> None:
    """No rounding to 16 bits on the way: within 1e-6, as float32."""
    g, held = random(2, 40, 24, dtype=dtype), symmetric(2, 40, 40, dtype=torch.float32, seed=1)
    result = sym_gemm(g, c=held, alpha=0.05, beta=0.95, dtype=torch.float32, choice=choice)
    assert result.dtype == torch.float32
    close(result, *product(g, None, held, 0.05, 0.95, 0.0))


def test_float64_stays_float64() -> None:
    a = random(2, 9, 7, dtype=torch.float64)
    exact, _ = product(a, None, None, 1, 0, 1)
    assert (sym_gemm(a, diag=1.0) - exact).abs().max() < 1e-13
    assert (reference(a, diag=1.0) - exact).abs().max() < 1e-13


@each_dtype
def test_the_reference(dtype: torch.dtype) -> None:
    a, b = random(2, 9, 7, dtype=dtype), random(2, 9, 7, dtype=dtype, seed=1)
    c = symmetric(2, 9, 9, dtype=dtype, seed=2)
    given = {"alpha": 0.5, "beta": 2.0, "diag": -1.0}
    close(reference(a, b, c, **given), *product(a, b, c, **given))
    out = torch.empty(2, 7, 7, dtype=torch.float32)
    assert reference(a, b, alpha=0.5, trans=True, out=out) is out
    close(out, *product(a, b, None, 0.5, 0, 0, trans=True))


# -- what is refused, and what ran ----------------------------------------------------------------


def test_what_cannot_be_is_refused() -> None:
    a = torch.zeros(2, 8, 4)
    with pytest.raises(ValueError, match="b holds 8x5"):
        sym_gemm(a, torch.zeros(2, 8, 5))
    with pytest.raises(TypeError, match="the same dtype"):
        sym_gemm(a, a.half())
    with pytest.raises(TypeError, match="floating"):
        sym_gemm(a.int())
    with pytest.raises(ValueError, match="c holds 4x4"):
        sym_gemm(a, c=torch.zeros(4, 4), beta=1.0)
    with pytest.raises(ValueError, match="stack of matrices"):
        sym_gemm(torch.zeros(3))
    with pytest.raises(ValueError, match="out is"):
        sym_gemm(a, out=torch.empty(8, 8))
    square = torch.zeros(8, 8)
    with pytest.raises(ValueError, match="read while out is written"):
        sym_gemm(square, out=square)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        sym_gemm(torch.zeros(2, 8, 5), choice=TMA)


def test_a_kernel_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canzona_compile.kernels.triton_parts.INTERPRETED", False)
    with pytest.raises(ValueError, match="run on CUDA"):
        sym_gemm(torch.zeros(2, 8, 8), choice=POINTER)


def test_sides_that_do_not_fit_are_refused() -> None:
    a = torch.zeros(2, 8, 8)
    for choice in (KernelChoice("pointer", Tile(32, 48, 16, 4, 2)), KernelChoice("tma", Tile(32, 16, 16, 4, 2))):
        with pytest.raises(ValueError, match=r"multiple of the other|one or two squares"):
            sym_gemm(a, choice=choice)


@each_kernel
def test_launches_are_recorded(choice: KernelChoice) -> None:
    a = torch.zeros(2, 8, 16)
    with recorded() as outer:
        sym_gemm(a, choice=choice)
        with recorded() as inner:
            sym_gemm(a)
    sym_gemm(a, choice=choice)
    assert [launch.choice for launch in outer] == [choice]
    assert [launch.choice.kernel for launch in inner] == ["library"]
    assert (outer[0].problem.batch, outer[0].problem.m, outer[0].problem.k) == (2, 8, 16)
