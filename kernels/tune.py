"""Measures which kernel is fastest here: a candidate wins only if it is right, compared with float64, and faster.

This runs offline: it takes seconds, and a measurement in the midst of a step would measure that step. All candidates
and the library take turns, so that clocks and temperature are the same for all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from canzona_compile.kernels.dispatch import KernelChoice, Operation, Problem, recorded
from canzona_compile.kernels.gemm_axpby import gemm_axpby
from canzona_compile.kernels.gemm_axpby import reference as axpby_reference
from canzona_compile.kernels.sym_gemm import reference as sym_reference
from canzona_compile.kernels.sym_gemm import sym_gemm

LIBRARY = KernelChoice("library", reason="measured")
MARGIN = 1.02  # a candidate has to be faster by this much, so that noise does not choose
UNWRITTEN = -1e3  # fills results before a check, so that unwritten elements show; no result has this value
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}

# Takes a call, and returns what measures its milliseconds.
Timer = Callable[[Callable[[], object]], Callable[[], float]]


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way to call an operation.

    Attributes:
        result: [batch, rows, columns], where each call writes.
        exact: the result for a part of the batch, in float64.
    """

    name: str
    result: Tensor
    run: Callable[[KernelChoice], object]
    exact: Callable[[slice], Tensor]


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome for a candidate: its worst speed and error over all forms, or why it was refused.

    Attributes:
        error: the largest deviation of an element from float64, over the sum of its own size and the mean size. (Over
            the largest value most of a wrong result would be next to nothing, as the diagonal of A A^T is far larger
            than all else.)
    """

    choice: KernelChoice
    speedup: float = 0.0
    milliseconds: float = math.inf
    error: float = math.inf
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The winner, and all trials, the library first."""

    problem: Problem
    choice: KernelChoice
    trials: tuple[Trial, ...]


def tune(
    op: Operation,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    candidates: Sequence[KernelChoice],
    clock: Timer,
    rounds: int = 15,
) -> Verdict:
    """Try candidates on random operands.

    Args:
        op: the operation; sym_gemm is tried with and without a summand, and has to win in both forms.
        clock: makes what measures the milliseconds that a call takes, in the mean.
    """
    forms = _forms(op, shape, dtype, device)
    with recorded() as launches:
        library = {form.name: _error(form, LIBRARY, shape[0]) for form in forms}
    problem = launches[0].problem
    allowed = {name: 2.0 * error + UNIT[dtype] for name, error in library.items()}
    checked = [_check(choice, forms, shape[0], allowed) for choice in candidates]
    running = [LIBRARY, *(trial.choice for trial in checked if not trial.refused)]
    times = _race(forms, running, clock, rounds)
    trials = [Trial(LIBRARY, 1.0, max(times[LIBRARY]), max(library.values()))]
    for trial in checked:
        if not trial.refused:
            mine = times[trial.choice]
            speedup = min(theirs / own for theirs, own in zip(times[LIBRARY], mine, strict=True))
            trial = Trial(trial.choice, speedup, max(mine), trial.error)
        trials.append(trial)
    return Verdict(problem, winner(trials), tuple(trials))


def winner(trials: Sequence[Trial]) -> KernelChoice:
    """The fastest candidate that was not refused, if it beats the library, which is the first trial, by the margin."""
    library, *others = trials
    best = max((t for t in others if not t.refused), key=lambda t: t.speedup, default=library)
    if best is library or best.speedup < MARGIN:
        return LIBRARY
    return KernelChoice(best.choice.kernel, best.choice.tile, f"measured: {best.speedup:.2f} times the library's speed")


# -- parts ----------------------------------------------------------------------------------------


def _check(choice: KernelChoice, forms: Sequence[CallForm], batch: int, allowed: dict[str, float]) -> Trial:
    """Run each form once and compare it with float64."""
    worst = 0.0
    for form in forms:
        try:
            error = _error(form, choice, batch)
        except Exception as problem:  # an error of a compiler or a driver does not stop the tuner
            return Trial(choice, refused=f"{form.name}: {type(problem).__name__}: {problem}".splitlines()[0][:200])
        if not error <= allowed[form.name]:  # NaN too
            return Trial(choice, error=error, refused=f"{form.name}: off by {error:.2e}, more than the library")
        worst = max(worst, error)
    return Trial(choice, error=worst)


def _error(form: CallForm, choice: KernelChoice, batch: int) -> float:
    """`Trial.error` in the first and the last matrix."""
    form.result.fill_(UNWRITTEN)
    form.run(choice)
    worst = 0.0
    for index in {0, batch - 1}:
        part = slice(index, index + 1)
        exact = form.exact(part)
        sizes = exact.abs()
        error = float(((form.result[part].double() - exact).abs() / (sizes + sizes.mean())).max())
        if not error <= worst:
            worst = error
    return worst


def _race(
    forms: Sequence[CallForm], choices: Sequence[KernelChoice], clock: Timer, rounds: int
) -> dict[KernelChoice, list[float]]:
    """Median time per choice and form."""
    times: dict[KernelChoice, list[float]] = {choice: [] for choice in choices}
    for form in forms:
        clocks = [clock(partial(form.run, choice)) for choice in choices]
        turns = [[measured() for measured in clocks] for _ in range(rounds)]
        for choice, own in zip(choices, zip(*turns, strict=True), strict=True):
            times[choice].append(statistics.median(own))
    return times


def _forms(op: Operation, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[CallForm]:
    batch, m, k = shape
    generator = torch.Generator(device).manual_seed(0)

    def make(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator, device=device, dtype=torch.float32).to(dtype)

    wide = make(batch, m, k)
    # Tall matrices are transposed for the step, and stay as they lie in memory.
    layouts = [("", wide)] if m == k else [("", wide), (" of tall ones", wide.mT.contiguous().mT)]
    if op == "sym_gemm":
        c, d = make(batch, m, m), torch.empty(batch, m, m, dtype=dtype, device=device)
        c = c + c.mT
        alpha, beta = 1.0 / math.sqrt(k), 0.5

        def squares(name: str, a: Tensor) -> list[CallForm]:
            return [
                CallForm(
                    f"A A^T{name}", d, lambda x: sym_gemm(a, out=d, choice=x), lambda i: sym_reference(a[i].double())
                ),
                CallForm(
                    f"A A^T + C{name}",
                    d,
                    lambda x: sym_gemm(a, c=c, alpha=alpha, beta=beta, out=d, choice=x),
                    lambda i: sym_reference(a[i].double(), c=c[i].double(), alpha=alpha, beta=beta),
                ),
            ]

        return [form for layout in layouts for form in squares(*layout)]
    factor = make(batch, m, m) / math.sqrt(m)

    def product(name: str, x: Tensor) -> CallForm:
        y = torch.empty_like(x)
        return CallForm(
            f"aX + bFX{name}",
            y,
            lambda z: gemm_axpby(factor, x, alpha=0.5, beta=0.75, out=y, choice=z),
            lambda i: axpby_reference(factor[i].double(), x[i].double(), alpha=0.5, beta=0.75),
        )

    return [product(*layout) for layout in layouts]
