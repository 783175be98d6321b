"""Which kernel runs for which problem: a pure function of the problem, the architecture and measured verdicts.

The rule is: never slower than the library. A Triton kernel is chosen where a published or own measurement says
that it wins, everything else goes to the library. `kernels.tune` makes own measurements, `kernels.tuning_cache`
keeps them, and they go before the table.
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
    """A product, as far as the choice of a kernel depends on it.

    For sym_gemm: `batch` products of m x k with k x m. For gemm_axpby: `batch` products of m x m with m x k.

    alignment: 16 if base addresses are multiples of 16 bytes and k and all strides but the unit ones multiples of
        16 elements, so that pointer kernels copy asynchronously; 8 if all rows begin at multiples of 16 bytes, which
        is what tensor descriptors (TMA) need; else 1.
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
    """Compile-time configuration of a Triton kernel: `band` rows of tiles are walked together, for the L2 cache."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    band: int = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel, its tile (None for the library) and, for people, why."""

    kernel: KernelName
    tile: Tile | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.kernel == "library") != (self.tile is None):
            raise ValueError(f"a tile belongs to a Triton kernel and only there: {self.kernel}, {self.tile}")

    def same_kernel(self, other: Choice) -> bool:
        """Whether both run the same code, whatever the reason."""
        return (self.kernel, self.tile) == (other.kernel, other.tile)


Verdicts = Mapping[Problem, Choice]
NO_VERDICTS: Verdicts = {}

SQUARE = Tile(128, 128, 64, warps=8, stages=3)
WIDE = Tile(128, 256, 64, warps=8, stages=3)
DEEP = Tile(128, 256, 64, warps=8, stages=4)
SMALL = Tile(64, 64, 64, warps=4, stages=4)

# What may be chosen, by operation and architecture: the tuner tries these, a verdict has to be one of these, and the
# ahead-of-time test compiles these. Other tiles spilled registers there.
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


# Published figures, none of them measured by us, taken at their lower end. Where two sources disagree the slower
# one counts: at m = 2048 one reports 1.19 and one 0.78 times the library, so a single 2048 is the library's. The
# figures are of k >= m, so less is the library's too. sm_100 has no figure for Triton, and so has no rule; nor has
# gemm_axpby, since its figures are of hand-written pipelines that Triton does not reach.
RULES = (
    DispatchRule("sym_gemm", 90, "tma", 4096, 0, "X X^T at 4096: 1.26 (Inductor, H100) and 1.61 (flash-muon, H800)"),
    DispatchRule("sym_gemm", 90, "tma", 2048, 1056, "batches of 2048: 1.5 (batched SYRK, H20), at four waves and more"),
    DispatchRule("sym_gemm", 80, "pointer", 4096, 0, "X X^T at 4096: 1.78, at 8192: 1.73 (flash-muon, A100)"),
)


def choose(problem: Problem, arch: int | None, verdicts: Verdicts = NO_VERDICTS) -> Choice:
    """The kernel for a problem.

    Args:
        problem: what is to be computed.
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
    """How many tiles the lower triangle has, diagonal included."""
    return side * (side + 1) // 2


def _tile(problem: Problem, rule: DispatchRule) -> Tile:
    """128 x 256 runs once per multiprocessor, 128 x 128 twice: the wide one only where its last wave is not idle."""
    if rule.kernel != "tma":
        return SQUARE
    programs = problem.batch * 2 * triangle(-(-problem.m // WIDE.n))
    waves = programs / MULTIPROCESSORS[rule.arch]
    return WIDE if waves >= 3 or waves / -(-programs // MULTIPROCESSORS[rule.arch]) >= 0.85 else SQUARE


# -- what ran -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of an operation, and what it ran."""

    problem: Problem
    choice: Choice


_LISTENER: ContextVar[list[Launch] | None] = ContextVar("kernel_launches", default=None)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record within the block what every operation of this package runs; this costs nothing outside of the block."""
    launches: list[Launch] = []
    token = _LISTENER.set(launches)
    try:
        yield launches
    finally:
        _LISTENER.reset(token)


def record(problem: Problem, choice: Choice) -> None:
    """Tell the innermost `recorded` block, if there is one, what was launched."""
    launches = _LISTENER.get()
    if launches is not None:
        launches.append(Launch(problem, choice))
