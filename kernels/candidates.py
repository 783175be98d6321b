"""The kernels that may be chosen: the tuner tries these, a verdict has to be one of these, the tests compile these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from canzona_compile.kernels.dispatch import SQUARE, WIDE, KernelChoice, Operation, Tile

DEEP = Tile(128, 256, 64, warps=8, stages=4)
AHEAD = Tile(128, 128, 64, warps=8, stages=4)
SMALL = Tile(64, 64, 64, warps=4, stages=4)
LOW = Tile(64, 128, 128, warps=8, stages=4)  # fewer idle processors where there are few tiles
LIGHT = Tile(64, 128, 64, warps=4, stages=3)  # three of them on a processor
FOUR = Tile(128, 128, 64, warps=4, stages=3)
# Warps that only copy and warps that only multiply. For sm_90, Triton 3.7 ignores that.
SQUARE_ROLES = replace(SQUARE, specialized=True)
WIDE_ROLES = replace(WIDE, specialized=True)

# By operation and architecture. Others spilled registers in the ahead-of-time test: for sm_80 pointers to 128 x 128
# with four warps, for sm_100 gemm_axpby of 64 x 128 x 128.
CANDIDATES: Mapping[tuple[Operation, int], tuple[KernelChoice, ...]] = {
    ("sym_gemm", 80): tuple(KernelChoice("pointer", tile) for tile in (SQUARE, AHEAD, SMALL, LOW, LIGHT)),
    ("sym_gemm", 90): (
        *(KernelChoice("tma", tile) for tile in (SQUARE, WIDE, DEEP, AHEAD, SMALL, LOW, LIGHT, FOUR)),
        KernelChoice("pointer", SQUARE),
    ),
    ("sym_gemm", 100): tuple(
        KernelChoice("tma", tile) for tile in (SQUARE, WIDE, DEEP, AHEAD, LOW, FOUR, SQUARE_ROLES, WIDE_ROLES)
    ),
    ("gemm_axpby", 80): tuple(KernelChoice("pointer", tile) for tile in (SQUARE, AHEAD, LOW)),
    ("gemm_axpby", 90): (
        *(KernelChoice("tma", tile) for tile in (SQUARE, WIDE, DEEP, AHEAD, LOW, LIGHT, FOUR)),
        KernelChoice("pointer", SQUARE),
    ),
    ("gemm_axpby", 100): tuple(KernelChoice("tma", tile) for tile in (SQUARE, WIDE, DEEP, AHEAD, FOUR)),
}


def candidates(op: Operation, arch: int) -> tuple[KernelChoice, ...]:
    """What may run on an architecture; nothing where there are no kernels."""
    return CANDIDATES.get((op, arch), ())
