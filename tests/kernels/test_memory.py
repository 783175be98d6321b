"""Both matrix kernels read nothing but their operands, write every element of the result once, and never race.

Operands lie between NaN, in memory before and after them and in the gaps between rows, and results between sevens. All
accesses are logged by address, so that an element that is read and then masked off shows as well.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from canzona_compile.kernels.dispatch import KernelChoice, Tile
from canzona_compile.kernels.gemm_axpby import gemm_axpby
from canzona_compile.kernels.sym_gemm import sym_gemm
from canzona_compile.kernels.sym_gemm_triton import sym_gemm_pointer
from tests.harness.marks import crossed
from tests.kernels.kernel_cases import close, interpreted, label, mirrored, product, random
from tests.kernels.memory_log import logged

pytestmark = interpreted

NAN, OUTSIDE = float("nan"), 7.0
GUARD = 64  # elements before and after
POINTERS = [
    KernelChoice("pointer", Tile(16, 16, 16, warps=4, stages=2, band=2)),
    KernelChoice("pointer", Tile(16, 32, 16, warps=4, stages=2, band=1)),
    KernelChoice("pointer", Tile(32, 16, 16, warps=4, stages=2, band=2)),
]
DESCRIPTORS = [
    KernelChoice("tma", Tile(16, 16, 16, warps=4, stages=2, band=2)),
    KernelChoice("tma", Tile(16, 32, 16, warps=4, stages=2, band=2)),
]


def banded(shape: tuple[int, ...], layout: str, dtype: torch.dtype, fill: float) -> tuple[Tensor, Tensor]:
    """Memory that is all `fill`, and a [batch, rows, columns] view inside of it.

    layouts: rows; columns (column-major); gaps: rows with a gap behind each of them, matrices with one between them;
    apart: every third row and every second column; one: a matrix for the whole batch.
    """
    _, rows, columns = shape
    wide = -(-columns // 16) * 16 + 16
    strides = {
        "rows": (rows * columns, columns, 1),
        "columns": (rows * columns, 1, rows),
        "gaps": ((rows + 3) * wide, wide, 1),
        "apart": (rows * columns * 6, columns * 6, 2),
        "one": (0, columns, 1),
    }[layout]
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    memory = torch.full((extent + 2 * GUARD,), fill, dtype=dtype)
    return memory, memory.as_strided(shape, strides, GUARD)


def operand(shape: tuple[int, ...], layout: str, dtype: torch.dtype, seed: int, even: bool = False) -> Tensor:
    """Random values between NaN."""
    _, view = banded(shape, layout, dtype, NAN)
    values = random(*shape, dtype=dtype, seed=seed)
    values = values + values.mT if even else values
    (view[:1] if layout == "one" else view).copy_(values[:1] if layout == "one" else values)
    return view


def untouched(memory: Tensor, result: Tensor) -> bool:
    """Whether all of the memory around a result is as it was."""
    around = memory.clone()
    around.as_strided(result.shape, result.stride(), GUARD).fill_(OUTSIDE)
    return bool((around == OUTSIDE).all())


SYM = [
    *crossed(POINTERS, ["rows", "columns", "gaps", "apart", "one"], [(2, 37, 19), (3, 16, 40), (1, 65, 5)], [0, 1, 2]),
    *crossed(DESCRIPTORS, ["rows", "columns", "gaps", "one"], [(2, 40, 24), (1, 72, 16)], [0, 1, 2]),
]


@pytest.mark.parametrize(("choice", "layout", "shape", "form"), SYM, ids=label)
def test_symmetric_products(choice: KernelChoice, layout: str, shape: tuple[int, int, int], form: int) -> None:
    """form: A A^T alone, A B^T + C, or a result that is C."""
    batch, m, _ = shape
    dtype = torch.float32 if form == 0 else torch.float16
    square = (batch, m, m)
    a = operand(shape, layout, dtype, 0)
    b = None if form != 1 else operand(shape, "rows" if layout == "one" else layout, dtype, 1)
    own = "rows" if layout == "one" else layout
    c = None if form == 0 else operand(square, own, dtype, 2, even=True)
    memory, out = banded(square, own, dtype, OUTSIDE)
    exact, magnitude = product(a, b, c, 0.5, 0.0 if c is None else -2.0, 0.25)
    if form == 2:
        assert c is not None
        out.copy_(c)
        c = out
    with logged() as log:
        assert sym_gemm(a, b, c, alpha=0.5, beta=-2.0, diag=0.25, out=out, choice=choice) is out
    read = [x for x in (a, b, c) if x is not None]
    assert log.wrong(read, out) == []
    assert untouched(memory, out)
    close(out, mirrored(exact), mirrored(magnitude))
    assert torch.equal(out, out.mT)


AXPBY = [
    *crossed(POINTERS, ["rows", "columns", "gaps", "apart"], [(2, 37, 19), (3, 16, 40), (1, 5, 65)], [False, True]),
    *crossed(DESCRIPTORS, ["rows", "columns", "gaps"], [(2, 40, 24), (1, 16, 72)], [False, True]),
]


@pytest.mark.parametrize(("choice", "layout", "shape", "right"), AXPBY, ids=label)
def test_sums_of_a_matrix_and_a_product(
    choice: KernelChoice, layout: str, shape: tuple[int, int, int], right: bool
) -> None:
    batch, m, n = shape
    side = n if right else m
    factor = operand((batch, side, side), layout, torch.float16, 0)
    x = operand(shape, layout, torch.float16, 1)
    memory, out = banded(shape, layout, torch.float16, OUTSIDE)
    with logged() as log:
        assert gemm_axpby(factor, x, alpha=1.5, beta=-0.5, right=right, out=out, choice=choice) is out
    assert log.wrong([factor, x], out) == []
    assert untouched(memory, out)
    f, v = factor.double(), x.double()
    found, sizes = (v @ f, v.abs() @ f.abs()) if right else (f @ v, f.abs() @ v.abs())
    close(out, 1.5 * v - 0.5 * found, 1.5 * v.abs() + 0.5 * sizes)


# -- the check itself finds mistakes ---------------------------------------------------------------


def launched(a: Tensor, out: Tensor, programs: int, m: int, k: int, c: Tensor | None = None) -> None:
    """The pointer kernel, told whatever a test wants."""
    add = out if c is None else c
    sym_gemm_pointer[(programs,)](
        a, a, add, out, 1.0, 1.0, 0.0, m, k, *a.stride(), *a.stride(), *add.stride(), *out.stride(),
        ROWS=16, COLS=16, BLOCK_K=16, BAND=1, HAS_C=c is not None, UPCAST=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("programs", "m", "k", "what"),
    [
        (3, 24, 17, ["reads outside of the operands"]),
        (3, 25, 16, ["writes outside of the result", "reads outside of the operands"]),
        (2, 24, 16, ["elements that nobody writes"]),
        (3, 23, 16, ["elements that nobody writes"]),
    ],
)
def test_a_wrong_size_is_found(programs: int, m: int, k: int, what: list[str]) -> None:
    a = operand((1, 24, 16), "gaps", torch.float32, 0)
    _, out = banded((1, 24, 24), "gaps", torch.float32, OUTSIDE)
    with logged() as log:
        launched(a, out, programs, m, k)
    assert [own.partition(" ")[2] for own in log.wrong([a], out)] == what


def test_a_race_is_found() -> None:
    """Twice the same work; and a summand that is the result, half a matrix on: one reads what another writes."""
    a = operand((1, 32, 16), "rows", torch.float32, 0)
    out = torch.zeros(1, 32, 32)
    with logged() as log:
        launched(a, out, 3, 32, 16)
        launched(a, out, 3, 32, 16)
    assert log.wrong([a], out) == ["1024 elements that are written more than once"]
    memory = torch.zeros(1, 33, 32)
    out, shifted = memory[:, :32], memory.as_strided((1, 32, 32), (1056, 32, 1), 16)
    with logged() as log:
        launched(a, out, 3, 32, 16, c=shifted)
    assert [own.partition(" ")[2] for own in log.wrong([a, shifted], out)] == ["reads of what another program writes"]
