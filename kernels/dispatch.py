"""Which kernel runs for which problem: a pure function of the problem, the architecture and measured verdicts.

The rule is: never slower than the library. `choose` takes a Triton kernel if a rule or a measurement on this machine
says that it wins, else the library. `kernels.tune` measures, `kernels.tuning_cache` keeps the verdicts, and a verdict
overrides the rules.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import torch

Operation = Literal["sym_gemm", "gemm_axpby"]
KernelName = Literal["library", "pointer", "tma", "quack"]


@dataclass(frozen=True, slots=True)
class Problem:
    """The properties of a product that decide which kernel runs.

    For sym_gemm: `batch` products of m x k with k x m. For gemm_axpby: `batch` products of m x m with m x k.

    alignment: 16 if base addresses are multiples of 16 bytes, and k and all strides except unit strides are multiples
        of 16 elements, so that pointer kernels copy asynchronously; 8 if all rows begin at multiples of 16 bytes, as
        tensor descriptors (TMA) require; else 1.
    """

    op: Operation
    batch: int
    m: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    alignment: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Compile-time configuration of a Triton kernel: programs walk `band` rows of tiles together, for the L2 cache.

    A tile has m rows and n columns and is summed over k at a time. `specialized`: some warps copy and others multiply,
    which Triton 3.7 does for sm_100 alone.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    band: int = 8
    specialized: bool = False


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel, its tile (None for those of others), and the reason, for people.

    library: cuBLAS, by torch; quack: the product with a summand of Dao-AILab's package quack-kernels, which only a
    measurement chooses; pointer and tma (tensor descriptors) are Triton kernels of this package.
    """

    kernel: KernelName
    tile: Tile | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.kernel in ("library", "quack")) != (self.tile is None):
            raise ValueError(f"a tile belongs to a Triton kernel and only there: {self.kernel}, {self.tile}")

    def same_kernel(self, other: KernelChoice) -> bool:
        """Tell whether both run the same code; reasons may differ."""
        return (self.kernel, self.tile) == (other.kernel, other.tile)


Verdicts = Mapping[Problem, KernelChoice]
NO_VERDICTS: Verdicts = {}

SQUARE = Tile(128, 128, 64, warps=8, stages=3)
WIDE = Tile(128, 256, 64, warps=8, stages=3)
DEEP = Tile(128, 256, 64, warps=8, stages=4)
AHEAD = Tile(128, 128, 64, warps=8, stages=4)
SMALL = Tile(64, 64, 64, warps=4, stages=4)
LOW = Tile(64, 128, 128, warps=8, stages=4)  # fewer idle processors where there are few tiles
LIGHT = Tile(64, 128, 64, warps=4, stages=3)  # three of them on a processor
FOUR = Tile(128, 128, 64, warps=4, stages=3)
# Warps that only copy and warps that only multiply. For sm_90, Triton 3.7 ignores that.
SQUARE_ROLES = replace(SQUARE, specialized=True)
WIDE_ROLES = replace(WIDE, specialized=True)

# By operation and architecture: what the tuner tries and the tests compile, and all that a verdict may be. Others
# spilled registers: for sm_80 pointers to 128 x 128 with four warps, for sm_100 gemm_axpby of 64 x 128 x 128.
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


QUACK = KernelChoice("quack")


def candidates(op: Operation, arch: int) -> tuple[KernelChoice, ...]:
    """What may run on an architecture; nothing where there are no kernels."""
    ours = CANDIDATES.get((op, arch), ())
    theirs = op == "gemm_axpby" and arch >= 90 and importlib.util.find_spec("quack") is not None
    return (*ours, QUACK) if ours and theirs else ours


# A100, H100 and H200 (SXM), B200. Only where no device can be asked: cards of one architecture have other numbers.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """A kernel that wins in a range of sizes.

    Attributes:
        least_tiles: the fewest tiles of 128 x 128 in the whole batch.
        aspect: the least and the most of k / m.
        tile: None if the problem decides.
    """

    op: Operation
    arch: int
    kernel: KernelName
    least_m: int
    least_tiles: int
    source: str
    most_m: int = 1 << 30
    aspect: tuple[float, float] = (1.0, math.inf)
    tile: Tile | None = None


# For sm_90 the rules follow `benchmarks/results/products-nvidia-h200.json`: bfloat16, row-major, torch 2.11, Triton
# 3.6. They take what won there in all products of their range, with two tiles but for a single 2048 x 2048. Of 4096 and
# more with a summand they take wide ones. Squares of these are at 0.99 to 1.06 by shape, so the tuner decides them. For
# an H100 this is assumed: by data sheets it only copies more slowly.
#
# For sm_80 they follow published figures at their lower end. sm_100 has no rule, because there is no figure for Triton.
# All hold for k >= m, so the library takes k < m.
#
# gemm_axpby: the library copies the summand to where the result will be before it adds the product, and our kernel adds
# as it goes. Beside the product, which grows with m, the copy takes 2 * rate / (bandwidth * m) of its time: 48% at
# m = 512 (595 TFLOP/s, Inductor on H100; 4.8 TB/s of an H200). For ordinary products Triton reaches 0.75 of the
# library's rate by the slowest figure for Hopper (triangles of 8192, Inductor and flash-muon: executed FLOPs beside the
# library's), on A100 0.69 (the model of docs/kernel_model.md at 64 x 1024). So with a margin of 5% the kernel is as
# fast up to m = 620 and 390. Fewer than four waves of tiles leave processors idle in the last one.
RULES = (
    DispatchRule("sym_gemm", 90, "tma", 1024, 252, "1.09 to 1.95 times the library's speed on an H200"),
    DispatchRule("sym_gemm", 90, "tma", 2048, 136, "1.24 on an H200: more tiles than processors", 2048, (1, 1), LIGHT),
    DispatchRule("sym_gemm", 80, "pointer", 4096, 0, "X X^T at 4096: 1.78, at 8192: 1.73 (flash-muon, A100)"),
    DispatchRule("gemm_axpby", 90, "tma", 1024, 256, "1.10 to 1.32 times the library's speed on an H200", 2048),
    DispatchRule("gemm_axpby", 90, "tma", 4096, 0, "1.03 to 1.10 on an H200", aspect=(3, math.inf), tile=WIDE),
    DispatchRule("gemm_axpby", 90, "tma", 128, 528, "the library copies its summand first: 48% at m = 512", 512),
    DispatchRule("gemm_axpby", 80, "pointer", 128, 432, "the library copies its summand first: 53% at m = 384", 384),
)


def choose(
    problem: Problem, arch: int | None, verdicts: Verdicts = NO_VERDICTS, processors: int | None = None
) -> KernelChoice:
    """Choose the kernel for a problem.

    Args:
        arch: ten times the compute capability's major number plus the minor one; None for no CUDA, or no Triton.
        processors: how many multiprocessors the device has; None offline, for those of `MULTIPROCESSORS`.
    """
    if arch is None:
        return KernelChoice("library", reason="no CUDA device, or no Triton")
    processors = processors or MULTIPROCESSORS.get(arch, 1)
    known = measured(problem, verdicts, processors)
    if known is not None:
        return known
    rules = [rule for rule in RULES if (rule.op, rule.arch) == (problem.op, arch)]
    if not rules:
        return KernelChoice(
            "library", reason=f"no figure says that {problem.op} on sm_{arch} is faster than the library"
        )
    if problem.dtype not in HALF or problem.out_dtype != problem.dtype:
        return KernelChoice("library", reason=f"no figure for {problem.dtype} to {problem.out_dtype}")
    if problem.k < problem.m:
        return KernelChoice("library", reason="no figure for k < m")
    side = -(-problem.m // SQUARE.m)
    tiles = problem.batch * (triangle(side) if problem.op == "sym_gemm" else side * -(-problem.k // SQUARE.n))
    rules = [rule for rule in rules if rule.aspect[0] <= problem.k / problem.m <= rule.aspect[1]]
    if all(problem.m > rule.most_m for rule in rules):
        return KernelChoice("library", reason=f"too large: what the library copies is little beside m = {problem.m}")
    if all(not rule.least_m <= problem.m <= rule.most_m for rule in rules) and problem.m > min(r.most_m for r in rules):
        return KernelChoice("library", reason=f"no figure for m = {problem.m}")
    rules = [rule for rule in rules if rule.least_m <= problem.m <= rule.most_m and tiles >= rule.least_tiles]
    if not rules:
        return KernelChoice("library", reason=f"too small: {problem.batch} x {problem.m}")
    rule = rules[0]
    if problem.alignment < (8 if rule.kernel == "tma" else 16):
        return KernelChoice("library", reason="rows are not aligned; pad to multiples of 16")
    return KernelChoice(rule.kernel, rule.tile or _tile(problem, rule, processors), rule.source)


def measured(problem: Problem, verdicts: Verdicts, processors: int) -> KernelChoice | None:
    """Return what measurements say of a problem: its own verdict, else those of other batches of the same matrices.

    A kernel that won at a smaller and at a larger batch is taken for the batches between, unless its last wave leaves
    more processors idle there than at both of them. Beyond the batches that were measured no kernel is chosen because
    of a measurement: fewer matrices may leave processors idle, and the library may gain more from more of them. Where
    the nearest batch is the library's, so is this one, whatever the rules say: they are of other machines.

    Returns:
        None if the rules may decide: nothing near was measured, or different kernels beat the library.
    """
    if problem in verdicts:
        return verdicts[problem]
    batches = sorted(other.batch for other in verdicts if replace(other, batch=problem.batch) == problem)
    smaller = [batch for batch in batches if batch < problem.batch][-1:]
    larger = [batch for batch in batches if batch > problem.batch][:1]
    near = {batch: verdicts[replace(problem, batch=batch)] for batch in (*smaller, *larger)}
    for batch, choice in near.items():
        if choice.kernel == "library":
            return KernelChoice("library", reason=f"measured: the library wins at batch {batch}")
    if len(near) < 2:
        return None
    (low, first), (high, second) = near.items()
    if not first.same_kernel(second):
        return None
    if first.tile is None:
        return replace(first, reason=f"measured: wins at batches {low} and {high}")
    fills = [_fill(replace(problem, batch=batch), first.tile, processors) for batch in (low, problem.batch, high)]
    if fills[1] < min(fills[0], fills[2]):
        return KernelChoice("library", reason=f"a wave of {first.kernel} is emptier than at batches {low} and {high}")
    return KernelChoice(first.kernel, first.tile, f"measured: wins at batches {low} and {high}")


def _fill(problem: Problem, tile: Tile, processors: int) -> float:
    """Return which part of the processors works, in the mean over all waves of programs."""
    if problem.op == "sym_gemm":
        tiles = tiles_of_triangle(problem.m, tile)
    else:
        tiles = -(-problem.m // tile.m) * -(-problem.k // tile.n)
    programs = problem.batch * tiles
    return programs / (processors * -(-programs // processors))


def triangle(side: int) -> int:
    """Count the tiles of the lower triangle, diagonal included."""
    return side * (side + 1) // 2


def tiles_of_triangle(m: int, tile: Tile) -> int:
    """Count the tiles that a triangle kernel computes of one m x m matrix.

    The triangle is made of squares as large as the longer side of a tile; all tiles of a square are computed.
    """
    square = max(tile.m, tile.n)
    return square // tile.m * (square // tile.n) * triangle(-(-m // square))


def _tile(problem: Problem, rule: DispatchRule, processors: int) -> Tile:
    """Choose 128 x 256 (one per multiprocessor) for large matrices if few idle in its last wave, else 128 x 128.

    Long sums of large matrices are copied one stage further ahead: 1.63 to 1.58 on an H200, at 4096 x 12288.
    """
    if rule.kernel != "tma" or problem.op != "sym_gemm" or problem.m < 4096:
        return SQUARE
    waves = problem.batch * tiles_of_triangle(problem.m, WIDE) / processors
    if waves >= 3 or _fill(problem, WIDE, processors) >= 0.85:
        return WIDE
    return AHEAD if problem.k >= 3 * problem.m else SQUARE


# -- what ran -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of an operation, and the kernel that it ran."""

    problem: Problem
    choice: KernelChoice


_LISTENER: ContextVar[list[Launch] | None] = ContextVar("kernel_launches", default=None)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record the kernels that operations of this package run in the block; this costs nothing outside of the block."""
    launches: list[Launch] = []
    token = _LISTENER.set(launches)
    try:
        yield launches
    finally:
        _LISTENER.reset(token)


def record(problem: Problem, choice: KernelChoice) -> None:
    """Add a launch to the innermost `recorded` block, if there is one."""
    launches = _LISTENER.get()
    if launches is not None:
        launches.append(Launch(problem, choice))
