"""Compiles the Triton kernels ahead of time, without a GPU, and prints what came out as JSON lines.

Run in a process of its own, without TRITON_INTERPRET: Triton reads that when it decorates a kernel.

    python benchmarks/kernels_ahead.py ARCH [chosen]

chosen: only what dispatch chooses where nothing was measured.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from canzona_compile.kernels.dispatch import CANDIDATES, RULES, SQUARE, WIDE, KernelChoice, Operation, Tile
from canzona_compile.kernels.gemm_axpby_triton import gemm_axpby_pointer, gemm_axpby_tma
from canzona_compile.kernels.sym_gemm_triton import sym_gemm_pointer, sym_gemm_tma

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MATRIX = r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)"
COPIES = r"\b(?:cp\.async\.c[ag]|cp\.async\.bulk\.tensor)"


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with all that is known when it is compiled: types by argument, constants, what 16 divides."""

    op: Operation
    arch: int
    choice: KernelChoice
    variant: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: frozenset[str]


@dataclass(frozen=True, slots=True)
class Built:
    """What a case compiled to.

    spilled: bytes of stack and local memory per thread; columns: of tensor memory (sm_100); scratch: bytes of global
    memory that a launch would have to allocate; boxes: what one copy by each descriptor moves, in elements; width: at
    most so many bytes has a row of them.
    """

    op: str
    arch: int
    kernel: str
    tile: dict[str, int]
    variant: str
    registers: int
    threads: int
    shared: int
    spilled: int
    columns: int
    scratch: int
    boxes: list[list[int]]
    width: int
    matrix: int
    copies: int
    seconds: float


def pointer_case(arch: int, choice: KernelChoice, tile: Tile, turned: bool) -> Case:
    """Aligned operands; turned: of A^T A."""
    types = dict.fromkeys("abcd", "*bf16") | dict.fromkeys(("alpha", "beta", "diag"), "fp32")
    types |= {"M": "i32", "K": "i32"}
    unit = dict.fromkeys(("a_row", "b_row") if turned else ("a_col", "b_col"), 1) | {"c_col": 1, "d_col": 1}
    strides = [f"{x}_{dim}" for x in "abcd" for dim in ("batch", "row", "col")]
    types |= {s: "i64" if s.endswith("batch") else "i32" for s in strides if s not in unit}
    constants = {"ROWS": tile.m, "COLS": tile.n, "BLOCK_K": tile.k, "BAND": tile.band, "HAS_C": True, "UPCAST": False}
    divisible = frozenset(name for name, kind in types.items() if kind != "fp32")
    return Case(
        "sym_gemm", arch, choice, "turned" if turned else "", sym_gemm_pointer, types, constants | unit, divisible
    )


def tma_case(arch: int, choice: KernelChoice, tile: Tile, turned: bool) -> Case:
    """As above, by descriptors."""

    def descriptor(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[1, {rows}, {columns}]>"

    types = {
        "a": descriptor(tile.k, tile.m) if turned else descriptor(tile.m, tile.k),
        "b": descriptor(tile.k, tile.n) if turned else descriptor(tile.n, tile.k),
        "c": descriptor(tile.m, tile.m),
        "d": descriptor(tile.m, tile.m),
        **dict.fromkeys(("alpha", "beta", "diag"), "fp32"),
        **dict.fromkeys(("M", "K", "a_step", "b_step", "c_step"), "i32"),
    }
    constants = {"BLOCK": tile.m, "WIDE": tile.n // tile.m, "BLOCK_K": tile.k, "BAND": tile.band}
    constants |= {"A_TURNED": turned, "B_TURNED": turned, "HAS_C": True, "UPCAST": False}
    constants |= {"SPECIALIZED": tile.specialized}
    divisible = frozenset({"M", "K"})
    return Case("sym_gemm", arch, choice, "turned" if turned else "", sym_gemm_tma, types, constants, divisible)


def axpby_case(arch: int, choice: KernelChoice, tile: Tile, turned: bool) -> Case:
    """All row-major; turned: X and Y column-major, as of a tall matrix that was transposed."""
    types = dict.fromkeys("fxy", "*bf16") | dict.fromkeys(("alpha", "beta"), "fp32")
    types |= {"M": "i32", "N": "i32"}
    unit = {"f_col": 1, **dict.fromkeys(("x_row", "y_row") if turned else ("x_col", "y_col"), 1)}
    strides = [f"{x}_{dim}" for x in "fxy" for dim in ("batch", "row", "col")]
    types |= {s: "i64" if s.endswith("batch") else "i32" for s in strides if s not in unit}
    constants = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "BAND": tile.band, "UPCAST": False}
    divisible = frozenset(name for name, kind in types.items() if kind != "fp32")
    variant = "turned" if turned else ""
    return Case("gemm_axpby", arch, choice, variant, gemm_axpby_pointer, types, constants | unit, divisible)


def axpby_tma_case(arch: int, choice: KernelChoice, tile: Tile, turned: bool) -> Case:
    """All row-major; turned: Y^T = X^T F^T is, so L is X^T and R, which is F^T, column-major."""
    left = (tile.m, tile.k)
    right = (tile.n, tile.k) if turned else (tile.k, tile.n)
    blocks = {"left": left, "right": right, "add": (tile.m, tile.m), "y": (tile.m, tile.m)}
    types = {name: f"tensordesc<bf16[1, {rows}, {columns}]>" for name, (rows, columns) in blocks.items()}
    types |= dict.fromkeys(("alpha", "beta"), "fp32")
    types |= dict.fromkeys(("M", "N", "K", "left_step", "right_step", "add_step"), "i32")
    constants = {"BLOCK": tile.m, "WIDE": tile.n // tile.m, "BLOCK_K": tile.k, "BAND": tile.band}
    constants |= {"LEFT_TURNED": False, "RIGHT_TURNED": turned, "UPCAST": False}
    variant = "turned" if turned else ""
    return Case("gemm_axpby", arch, choice, variant, gemm_axpby_tma, types, constants, frozenset({"M", "N", "K"}))


def chosen(op: Operation, arch: int, choice: KernelChoice) -> bool:
    """Tell whether published figures may choose a kernel."""
    rules = {(rule.op, rule.arch, rule.kernel) for rule in RULES}
    return (op, arch, choice.kernel) in rules and choice.tile in (SQUARE, WIDE)


def cases(arch: int, only_chosen: bool = False) -> Iterator[Case]:
    """All that dispatch can choose on an architecture, after measurements or without any."""
    for (op, where), choices in CANDIDATES.items():
        if where != arch:
            continue
        for choice in choices:
            if only_chosen and not chosen(op, arch, choice):
                continue
            assert choice.tile is not None
            for turned in (False, True):
                if op == "gemm_axpby" and choice.kernel == "tma":
                    yield axpby_tma_case(arch, choice, choice.tile, turned)
                elif op == "gemm_axpby":
                    yield axpby_case(arch, choice, choice.tile, turned)
                elif choice.kernel == "tma":
                    yield tma_case(arch, choice, choice.tile, turned)
                else:
                    yield pointer_case(arch, choice, choice.tile, turned)


def build(case: Case) -> Built:
    """Compile a case and read registers and stack off the machine code, instructions off the assembly."""
    names = case.kernel.arg_names
    assert {*case.types, *case.constants} == {*names}
    signature = {name: case.types.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    tile = case.choice.tile
    assert tile is not None
    begun = time.monotonic()
    compiled = triton.compile(
        ASTSource(case.kernel, signature, constexprs=case.constants, attrs=attributes),
        target=GPUTarget("cuda", case.arch, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    seconds = time.monotonic() - begun
    ptx = compiled.asm["ptx"]
    described = compiled.metadata.tensordesc_meta or []
    usage = resources(compiled.asm["cubin"])
    return Built(
        case.op,
        case.arch,
        case.choice.kernel,
        asdict(tile),
        case.variant,
        usage["REG"],
        32 * compiled.metadata.num_warps,
        compiled.metadata.shared,
        usage["STACK"] + usage["LOCAL"],
        compiled.metadata.tmem_size or 0,
        compiled.metadata.global_scratch_size + compiled.metadata.profile_scratch_size,
        [list(own["block_size"]) for own in described],
        max((own["block_size"][-1] * own["elem_size"] for own in described), default=0),
        len(re.findall(MATRIX, ptx)),
        len(re.findall(COPIES, ptx)),
        round(seconds, 2),
    )


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL of machine code, as Triton's own cuobjdump tells them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [str(CUOBJDUMP), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    lines = [line for line in said.splitlines() if "REG:" in line]
    assert len(lines) == 1, said
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", lines[0])}


def main() -> None:
    arch, *only = sys.argv[1:]
    for case in cases(int(arch), bool(only)):
        print(json.dumps(asdict(build(case))), flush=True)


if __name__ == "__main__":
    main()
