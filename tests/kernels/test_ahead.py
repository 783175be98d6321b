"""All kernels that dispatch can choose, compiled for GPUs that are not here: nothing spills, hardware is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.kernel_model import LIMITS, Occupancy, cells, heading, lines, occupancy, page, resources_of
from canzona_compile.kernels.dispatch import CANDIDATES, SQUARE, WIDE, Tile
from tests.conftest import GOLDEN, Golden
from tests.harness.marks import also
from tests.harness.remembered import remembered

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 90, 100)
# What published figures choose is compiled in seconds, all candidates of an architecture in half a minute or more.
BUILDS = [(90, "chosen"), *also([(arch, "all") for arch in ARCHITECTURES])]

Rows = list[dict[str, Any]]
Built = Callable[[tuple[int, str]], Rows]

each_build = pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"sm_{build[0]}-{build[1]}")


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Built:
    """What benchmarks/kernels_ahead.py says of an architecture, made again only if a kernel changed."""

    @cache
    def of(build: tuple[int, str]) -> Rows:
        sources, name = ("kernels/*.py", "benchmarks/kernels_ahead.py"), f"ahead-{build[0]}-{build[1]}"
        found: Rows = remembered(request.config, name, sources, lambda: compiled(*build))
        return found

    return of


def compiled(arch: int, which: str) -> Rows:
    """From a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    only = ["chosen"] if which == "chosen" else []
    said = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kernels_ahead.py"), str(arch), *only],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-4000:]  # before that comes all of the intermediate code
    return [json.loads(line) for line in said.stdout.splitlines()]


def identity(row: dict[str, Any]) -> tuple[str, str, Tile]:
    return row["op"], row["kernel"], Tile(**row["tile"])


@each_build
def test_every_candidate_was_compiled(built: Built, build: tuple[int, str]) -> None:
    arch, which = build
    expected = {
        (op, choice.kernel, choice.tile)
        for (op, where), choices in CANDIDATES.items()
        for choice in choices
        if where == arch
    }
    found = {identity(row) for row in built(build)}
    chosen = {(op, "tma", tile) for op in ("sym_gemm", "gemm_axpby") for tile in (SQUARE, WIDE)}
    assert found == (expected if which == "all" else chosen)
    assert {where for _, where in CANDIDATES} == set(ARCHITECTURES)


@each_build
def test_nothing_spills_all_fits_and_the_driver_takes_it(built: Built, build: tuple[int, str]) -> None:
    """cuTensorMapEncodeTiled: at most 256 elements per dim, rows as wide as a swizzle at most. No allocator is set."""
    arch, _ = build
    for kernel in built(build):
        assert kernel["spilled"] == kernel["scratch"] == 0, kernel
        assert 0 < kernel["shared"] <= LIMITS[arch].shared_program, kernel
        fits = occupancy(arch, kernel["registers"], kernel["threads"], kernel["shared"], kernel["columns"])
        assert fits.programs >= 1, kernel
        assert kernel["matrix"] > 0, kernel
        assert kernel["copies"] > 0, kernel
        # Only where warps have roles are there more of them than the tile asks for.
        assert (kernel["threads"] > 32 * kernel["tile"]["warps"]) == kernel["tile"]["specialized"], kernel
        assert len(kernel["boxes"]) == (0 if kernel["kernel"] == "pointer" else 4), kernel
        assert all(1 <= size <= 256 for box in kernel["boxes"] for size in box), kernel
        assert kernel["width"] <= 128, kernel


def test_square_tiles_run_twice_on_a_multiprocessor(built: Built) -> None:
    """`dispatch` counts on that when it prefers them where wide ones would leave a wave half empty."""
    square = [row for row in built((90, "chosen")) if identity(row) == ("sym_gemm", "tma", SQUARE)]
    assert len(square) == 2
    for kernel in square:
        assert occupancy(90, kernel["registers"], kernel["threads"], kernel["shared"]).programs == 2, kernel


# -- the table -------------------------------------------------------------------------------------


@each_build
def test_what_every_candidate_takes_of_a_multiprocessor(built: Built, build: tuple[int, str], golden: Golden) -> None:
    """tests/golden/kernels/resources-sm_*.txt; other versions of Triton allocate other registers."""
    arch, which = build
    path, own = f"kernels/resources-sm_{arch}.txt", version("triton")
    kept = (GOLDEN / path).read_text(encoding="utf-8") if (GOLDEN / path).exists() else heading(arch, own)
    accepts = os.environ.get("GOLDEN") == "accept"
    if not accepts and not kept.startswith(heading(arch, own)):
        pytest.skip(f"the table is that of {kept.split(',')[0].lstrip('# ')}, not of {own}")
    if which == "all":
        golden(resources_of(arch, own, built(build)), path)
    elif not accepts:
        assert {*lines(map(cells, built(build)))} <= {*kept.splitlines(keepends=True)}


@pytest.mark.parametrize(
    ("arch", "needs", "programs", "limit"),
    [
        (90, (128, 256, 98328), 2, "registers"),  # 16 warps of 4096 registers
        (90, (129, 256, 98328), 1, "registers"),  # 136 registers are handed out
        (90, (64, 256, 115713), 1, "shared memory"),  # and 1024 bytes for the system: half of 228 KiB
        (90, (64, 256, 115712), 2, "shared memory"),
        (80, (24, 128, 1024), 16, "warps"),
        (80, (255, 128, 0), 2, "registers"),
        (80, (16, 32, 0), 32, "warps"),
        (100, (64, 128, 1024, 256), 2, "tensor memory"),
    ],
)
def test_occupancy(arch: int, needs: tuple[int, ...], programs: int, limit: str) -> None:
    assert occupancy(arch, *needs) == Occupancy(programs, limit)


def test_the_page_is_what_the_model_says() -> None:
    """Else: python benchmarks/kernel_model.py > docs/kernel_model.md."""
    assert (ROOT / "docs" / "kernel_model.md").read_text(encoding="utf-8") == page()
