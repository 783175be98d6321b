"""Which kernel runs for which problem: a pure function of the problem, the architecture and measured verdicts.

The rule is: never slower than the library. `choose` takes a Triton kernel if a published figure or a measurement on
this machine says that it wins, else the library. `kernels.tune` measures, `kernels.tuning_cache` keeps the verdicts,
and a verdict overrides the published figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch

Operation = Literal["sym_gemm", "gemm_axpby"]
KernelName = Literal["library", "pointer", "tma"]


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
    """Compile-time configuration of a Triton kernel: programs walk `band` rows of tiles together, for the L2 cache."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    band: int = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel, its tile (None for the library), and the reason, for people."""

    kernel: KernelName
    tile: Tile | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.kernel == "library") != (self.tile is None):
            raise ValueError(f"a tile belongs to a Triton kernel and only there: {self.kernel}, {self.tile}")

    def same_kernel(self, other: Choice) -> bool:
        """Tell whether both run the same code; reasons may differ."""
        return (self.kernel, self.tile) == (other.kernel, other.tile)


Verdicts = Mapping[Problem, Choice]
NO_VERDICTS: Verdicts = {}

SQUARE = Tile(128, 128, 64, warps=8, stages=3)
WIDE = Tile(128, 256, 64, warps=8, stages=3)
DEEP = Tile(128, 256, 64, warps=8, stages=4)
SMALL = Tile(64, 64, 64, warps=4, stages=4)

# The kernels that `choose` may return, by operation and architecture. The tuner tries these, a verdict has to be one of
# these, and the ahead-of-time test compiles these. Other tiles spilled registers in that test.
CANDIDATES: Mapping[tuple[Operation, int], tuple[Choice, ...]] = {
    ("sym_gemm", 80): (Choice("pointer", SQUARE), Choice("pointer", SMALL)),
    ("sym_gemm", 90): (*(Choice("tma", tile) for tile in (SQUARE, WIDE, DEEP, SMALL)), Choice("pointer", SQUARE)),
    ("sym_gemm", 100): tuple(Choice("tma", tile) for tile in (SQUARE, WIDE, DEEP)),
    ("gemm_axpby", 80): (Choice("pointer", SQUARE),),
    ("gemm_axpby", 90): (*(Choice("tma", tile) for tile in (SQUARE, WIDE, DEEP)), Choice("pointer", SQUARE)),
    ("gemm_axpby", 100): tuple(Choice("tma", tile) for tile in (SQUARE, WIDE, DEEP)),
}

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}  # A100, H100 and H200 (SXM), B200
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """A kernel that wins from a size on.

    Attributes:
        least_m: the smallest m.
        least_tiles: the fewest tiles of 128 x 128 in the whole batch.
        source: the figure that says so.
    """

    op: Operation
    arch: int
    kernel: KernelName
    least_m: int
    least_tiles: int
    source: str


# The rules follow published figures at their lower end; none is our own. If two sources disagree, the slower one
# counts: at m = 2048 one reports 1.19 and one 0.78 times the library, so the library takes a single matrix of 2048. The
# figures hold for k >= m, so the library takes k < m too. sm_100 has no rule, because there is no figure for Triton.
# gemm_axpby has none, because its figures are for hand-written pipelines that Triton does not reach.
RULES = (
    DispatchRule("sym_gemm", 90, "tma", 4096, 0, "X X^T at 4096: 1.26 (Inductor, H100) and 1.61 (flash-muon, H800)"),
    DispatchRule("sym_gemm", 90, "tma", 2048, 1056, "batches of 2048: 1.5 (batched SYRK, H20), at four waves and more"),
    DispatchRule("sym_gemm", 80, "pointer", 4096, 0, "X X^T at 4096: 1.78, at 8192: 1.73 (flash-muon, A100)"),
)


def choose(problem: Problem, arch: int | None, verdicts: Verdicts = NO_VERDICTS) -> Choice:
    """Choose the kernel for a problem.

    Args:
        problem: the product to compute.
        arch: ten times the compute capability's major number plus the minor one; None for no CUDA, or no Triton.
        verdicts: what the tuner measured on this architecture.
    """
    if arch is None:
        return Choice("library", reason="no CUDA device, or no Triton")
    if problem in verdicts:
        return verdicts[problem]
    rules = [rule for rule in RULES if (rule.op, rule.arch) == (problem.op, arch)]
    if not rules:
        return Choice("library", reason=f"no figure says that {problem.op} on sm_{arch} is faster than the library")
    if problem.dtype not in HALF or problem.out_dtype != problem.dtype:
        return Choice("library", reason=f"no figure for {problem.dtype} to {problem.out_dtype}")
    if problem.k < problem.m:
        return Choice("library", reason="no figure for k < m")
    tiles = problem.batch * triangle(-(-problem.m // SQUARE.m))
    rules = [rule for rule in rules if problem.m >= rule.least_m and tiles >= rule.least_tiles]
    if not rules:
        return Choice("library", reason=f"too small: {problem.batch} x {problem.m}")
    rule = rules[0]
    if problem.alignment < (8 if rule.kernel == "tma" else 16):
        return Choice("library", reason="rows are not aligned; pad to multiples of 16")
    return Choice(rule.kernel, _tile(problem, rule), rule.source)


def triangle(side: int) -> int:
    """Count the tiles of the lower triangle, diagonal included."""
    return side * (side + 1) // 2


def _tile(problem: Problem, rule: DispatchRule) -> Tile:
    """Choose 128 x 256 (one per multiprocessor) if few idle in its last wave, else 128 x 128 (two per one)."""
    if rule.kernel != "tma":
        return SQUARE
    programs = problem.batch * 2 * triangle(-(-problem.m // WIDE.n))
    waves = programs / MULTIPROCESSORS[rule.arch]
    return WIDE if waves >= 3 or waves / -(-programs // MULTIPROCESSORS[rule.arch]) >= 0.85 else SQUARE


# -- what ran -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of an operation, and the kernel that it ran."""

    problem: Problem
    choice: Choice


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


def record(problem: Problem, choice: Choice) -> None:
    """Add a launch to the innermost `recorded` block, if there is one."""
    launches = _LISTENER.get()
    if launches is not None:
        launches.append(Launch(problem, choice))
