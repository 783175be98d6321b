"""The model of docs/kernel_model.md, and that the page is what it says."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.resources import ResourceRow
from tests.kernels.roofline import ROOT, SHAPES, SHEETS, named, of_library, page, rows_of, seconds, tiles, traffic

H200 = next(sheet for sheet in SHEETS if sheet.name.startswith("H200"))
SQUARE = ResourceRow("sym_gemm", "tma", (128, 128, 64), 8, 3, "as they lie", 2)
ALONE = ResourceRow("sym_gemm", "tma", (128, 128, 64), 8, 3, "as they lie", 1)


def test_the_page_is_what_the_model_says() -> None:
    """Else: python -m tests.kernels.roofline > docs/kernel_model.md."""
    assert (ROOT / "docs" / "kernel_model.md").read_text(encoding="utf-8") == page()


def test_a_triangle_of_whole_waves_is_half_of_the_work() -> None:
    shape = (1, 4096, 4096)
    assert tiles(SQUARE, shape) == 528  # four on each of 132 processors
    products = 4 * 2 * 128 * 128 * 4096 / (989e12 / 132)
    assert products < seconds(SQUARE, shape, H200) < 1.1 * products
    assert of_library("sym_gemm", shape, H200) / seconds(SQUARE, shape, H200) > 1.5


def test_ends_count_where_nothing_hides_them() -> None:
    shape = (1, 4096, 4096)
    assert seconds(ALONE, shape, H200) > seconds(SQUARE, shape, H200)


def test_shared_memory_is_a_bound_of_small_tiles() -> None:
    """On Hopper 64 x 64 moves as many bytes in 64 clocks as it multiplies in 32; 128 x 128 is even."""
    small = ResourceRow("sym_gemm", "tma", (64, 64, 64), 4, 4, "as they lie", 3)
    shape = (1, 8192, 65536)
    assert seconds(small, shape, H200) > 1.8 * seconds(SQUARE, shape, H200)


def test_memory_is_a_bound() -> None:
    thin = (64, 1024, 16)
    assert traffic("sym_gemm", thin) == 64 * (1024 * 16 + 1024 * 1024) * 2
    assert seconds(SQUARE, thin, H200) >= traffic("sym_gemm", thin) / H200.bandwidth


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_nothing_is_faster_than_the_data_sheet(sheet) -> None:  # type: ignore[no-untyped-def]
    rows = rows_of(sheet.arch)
    assert {row.operation for row in rows} == {"sym_gemm", "gemm_axpby"}
    assert len({(row.operation, named(row)) for row in rows}) == len(rows)
    for row in rows:
        for batch, m, k in SHAPES:
            least = batch * m * m * k * (1 if row.operation == "sym_gemm" else 2)
            assert seconds(row, (batch, m, k), sheet) >= least / sheet.flops
