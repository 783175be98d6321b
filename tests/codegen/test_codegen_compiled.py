"""Generated kernels compile for GPUs ahead of time, without spills, and access memory in vectors."""

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

from tests.harness.marks import also
from tests.harness.remembered import remembered

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


Needs = dict[str, dict[str, Any]]  # by kernel
Compiled = Callable[[str], Needs]
SOURCES = (
    "kernels/int8_blocks_triton.py",
    "canzona_compile/codegen/*.py",
    "canzona_compile/ir/*.py",
    "canzona_compile/lowering/*.py",
)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """What tests/codegen/compiled_kernels.py prints for an architecture, made again only if sources changed."""

    @cache
    def of(arch: str) -> Needs:
        sources = (*SOURCES, "tests/codegen/*.py", "tests/harness/samples.py")
        found: Needs = remembered(request.config, f"codegen-{arch}", sources, lambda: printed(arch))
        return found

    return of


def printed(arch: str) -> Needs:
    """One process, since kernels are made for the interpreter here."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.codegen.compiled_kernels", arch],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: Needs = json.loads(done.stdout.splitlines()[-1])
    return found


INT8 = ("decode_blocks", "encode_blocks")
STORED = ("prepare of codes", "prepare of halves")
KERNELS, ARCHITECTURES = ("prepare", *STORED, "apply", "copy", "mixed", *INT8), ["90", *also(["80", "100"])]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills(compiled: Compiled, name: str, arch: str) -> None:
    needs = compiled(arch)[name]
    assert (needs["stack"], needs["local"]) == (0, 0)
    assert needs["registers"] * 8 * 32 <= 65536  # one block fits at least; below, several of those that matter
    assert needs["shared"] <= 48 * 1024


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["prepare", *STORED, "apply", "copy"])
def test_flat_segments_move_in_vectors_and_fill_a_processor(compiled: Compiled, name: str, arch: str) -> None:
    """Sixteen bytes per access, and no more than 64 registers: 32 of 64 warps of an SM."""
    needs = compiled(arch)[name]
    assert needs["registers"] <= 64
    # Words of the table are 32 and 64 bits, one at a time; elements are neither.
    assert {m for m in needs["memory"] if m.startswith("st.")} == {"st.global.v4.b32"}
    assert "ld.global.v4.b32" in needs["memory"]
    assert not {m for m in needs["memory"] if m.endswith("b16")}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["prepare", "apply"])
def test_a_tile_loads_nothing_but_its_elements(compiled: Compiled, name: str, arch: str) -> None:
    """Where the segment lies, and its numbers, are loaded before the loop over the tiles of a block."""
    needs = compiled(arch)[name]
    assert needs["looped"] == ["ld.global.v4.b32"]
    assert {"ld.global.b32", "ld.global.b64"} < set(needs["memory"])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_what_an_operator_fuses_is_fused(compiled: Compiled, arch: str) -> None:
    """Two lerps of eight elements per thread take two each; a product and a sum of two operators stay apart."""
    assert compiled(arch)["prepare"]["fused"] == 2 * 2 * 8
    assert compiled(arch)["apply"]["fused"] == 8
    assert compiled(arch)["copy"]["fused"] == 0
    assert (compiled(arch)["addcmul"]["fused"], compiled(arch)["addcmul"]["products"]) == (8, 0)  # by one


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", INT8)
def test_codes_of_state_move_in_vectors_and_round_as_torch_does(compiled: Compiled, name: str, arch: str) -> None:
    needs = compiled(arch)[name]
    assert needs["registers"] <= 64
    assert {"ld.global.v4.b32", "st.global.v4.b32"} & set(needs["memory"])
    assert (needs["fused"], needs["flushing"]) == (0, [])


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
def test_every_operator_compiles(compiled: Compiled, dtype: str) -> None:
    """All in one kernel, which no step would have: as many functions as operators, nothing spilled."""
    needs = compiled("90")[dtype]
    assert needs["functions"] >= 45
    assert needs["local"] == 0


def test_small_numbers_are_kept(compiled: Compiled) -> None:
    """Nothing takes numbers below 2^-126 for zero but what CUDA's own library does so in, inside of its functions."""
    assert set(compiled("90")["torch.float32"]["flushing"]) == {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}
