"""All kernels that dispatch can choose, compiled for GPUs that are not here: nothing spills, hardware is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from canzona_compile.kernels.dispatch import CANDIDATES, SQUARE, Tile
from tests.harness.marks import also
from tests.harness.remembered import remembered

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 90, 100)
FAST = [90, *also((80, 100))]  # compiling for one of them takes a minute
REGISTERS = 65536  # of a multiprocessor
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one program may have


Built = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Built:
    """What tests/kernels/ahead.py says of an architecture, made again only if a kernel changed."""

    @cache
    def of(arch: int) -> list[dict[str, Any]]:
        sources = ("kernels/*.py", "tests/kernels/ahead.py")
        found: list[dict[str, Any]] = remembered(request.config, f"ahead-{arch}", sources, lambda: compiled(arch))
        return found

    return of


def compiled(arch: int) -> list[dict[str, Any]]:
    """From a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    said = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "kernels" / "ahead.py"), str(arch)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-4000:]  # before that comes all of the intermediate code
    return [json.loads(line) for line in said.stdout.splitlines()]


@pytest.mark.parametrize("arch", FAST)
def test_every_candidate_was_compiled(built: Built, arch: int) -> None:
    expected = {
        (op, choice.kernel, choice.tile)
        for (op, where), choices in CANDIDATES.items()
        for choice in choices
        if where == arch
    }
    assert {(b["op"], b["kernel"], Tile(**b["tile"])) for b in built(arch)} == expected
    assert {where for _, where in CANDIDATES} == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", FAST)
def test_nothing_spills_and_all_fits(built: Built, arch: int) -> None:
    for kernel in built(arch):
        assert kernel["spilled"] == 0, kernel
        assert 0 < kernel["registers"] * kernel["threads"] <= REGISTERS, kernel
        assert 0 < kernel["shared"] <= SHARED[arch], kernel


@pytest.mark.parametrize("arch", FAST)
def test_matrix_instructions_and_asynchronous_copies(built: Built, arch: int) -> None:
    for kernel in built(arch):
        assert kernel["matrix"] > 0, kernel
        assert kernel["copies"] > 0, kernel


@pytest.mark.parametrize("arch", FAST)
def test_the_driver_takes_every_descriptor_and_nothing_is_allocated_by_a_launch(built: Built, arch: int) -> None:
    """cuTensorMapEncodeTiled: at most 256 elements per dim, rows as wide as a swizzle at most. No allocator is set."""
    for kernel in built(arch):
        assert kernel["scratch"] == 0, kernel
        assert len(kernel["boxes"]) == (4 if kernel["kernel"] == "tma" else 0), kernel
        assert all(1 <= size <= 256 for box in kernel["boxes"] for size in box), kernel
        assert kernel["width"] <= 128, kernel


def test_square_tiles_run_twice_on_a_multiprocessor(built: Built) -> None:
    """`dispatch` counts on that when it prefers them where wide ones would leave a wave half empty."""
    square = [b for b in built(90) if (b["op"], b["kernel"], Tile(**b["tile"])) == ("sym_gemm", "tma", SQUARE)]
    assert len(square) == 2
    for kernel in square:
        assert 2 * kernel["registers"] * kernel["threads"] <= REGISTERS, kernel
        assert 2 * (kernel["shared"] + 1024) <= 228 << 10, kernel
