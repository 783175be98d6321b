"""sym_gemm by quack-kernels: what it is given, and that nothing needs it. Its own function is torch here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from canzona_compile.kernels import candidates, sym_gemm_quack, tuning_cache
from canzona_compile.kernels.candidates import CANDIDATES, QUACK
from canzona_compile.kernels.dispatch import KernelChoice, Problem, recorded
from canzona_compile.kernels.gemm_axpby import gemm_axpby
from canzona_compile.kernels.sym_gemm import sym_gemm
from canzona_compile.kernels.tune import Timer, tune
from canzona_compile.kernels.tuning_cache import GpuKind
from canzona_compile.tools.tuning.command import named
from tests.kernels.kernel_cases import LAYOUTS, close, product, random, symmetric

HERE = GpuKind(90, "a card", 132)


@dataclass
class QuackPackage:
    """What quack.gemm_interface.gemm_symmetric computes, by torch, and what it was given."""

    calls: list[dict[str, object]] = field(default_factory=list)
    factor: float = 1.0  # other than 1: a wrong result

    def gemm_symmetric(
        self, A: Tensor, B: Tensor, C: Tensor | None = None, out: Tensor | None = None, **scalars: float | Tensor
    ) -> Tensor:
        assert out is not None
        assert A.ndim == B.ndim == out.ndim == 3
        assert A.shape[0] == 1 or A.stride(0) > 0
        assert C is None or C.data_ptr() != out.data_ptr()
        assert all(isinstance(x, float) or x.dtype == torch.float32 for x in scalars.values())
        self.calls.append({"A": A, "B": B, "C": C, **scalars})
        result = scalars["alpha"] * (A.float() @ B.float()) * self.factor
        return out.copy_(result if C is None else result + scalars["beta"] * C.float())


def forget() -> None:
    candidates.has_quack.cache_clear()
    sym_gemm_quack.gemm_symmetric.cache_clear()


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Iterator[QuackPackage]:
    package, made = QuackPackage(), ModuleType("quack.gemm_interface")
    made.gemm_symmetric = package.gemm_symmetric  # type: ignore[attr-defined]
    whole = ModuleType("quack")
    whole.__spec__ = made.__spec__ = torch.__spec__
    monkeypatch.setitem(sys.modules, "quack", whole)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", made)
    forget()
    yield package
    forget()


@pytest.mark.parametrize("layout", ["gapped", "turned", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_same_as_the_others(quack: QuackPackage, dtype: torch.dtype, layout: str) -> None:
    a, b = (LAYOUTS[layout](random(2, 40, 24, dtype=dtype, seed=s)) for s in (0, 1))
    c = LAYOUTS[layout](symmetric(2, 40, 40, dtype=dtype, seed=2))
    with recorded() as launches:
        result = sym_gemm(a, b, c, alpha=0.5, beta=-2.0, diag=0.25, choice=QUACK)
    assert [launch.choice for launch in launches] == [QUACK]
    assert len(quack.calls) == 1
    exact, magnitude = product(a, b, c, 0.5, -2.0, 0.25)
    close(result, exact, magnitude * 2.0**-8 / 1e-6)  # the diagonal is rounded twice


def test_scalars_stay_where_they_are(quack: QuackPackage) -> None:
    a, c = random(2, 16, 24, dtype=torch.float16), symmetric(2, 16, 16, dtype=torch.float16, seed=1)
    alpha = torch.tensor(0.5, dtype=torch.float64)
    close(sym_gemm(a, c=c, alpha=alpha, beta=2.0, choice=QUACK), *product(a, None, c, 0.5, 2.0, 0.0))
    assert isinstance(quack.calls[0]["alpha"], Tensor)
    assert quack.calls[0]["beta"] == 2.0


def test_the_result_may_be_the_summand(quack: QuackPackage) -> None:
    g, held = random(2, 16, 24, dtype=torch.float16), symmetric(2, 16, 16, dtype=torch.float16, seed=1)
    exact, magnitude = product(g, None, held, 0.25, 0.75, 0.0)
    assert sym_gemm(g, c=held, alpha=0.25, beta=0.75, out=held, choice=QUACK) is held
    close(held, exact, magnitude)


def test_what_it_cannot_do_is_refused(quack: QuackPackage) -> None:
    half = torch.zeros(2, 8, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="all bfloat16"):
        sym_gemm(half.float(), choice=QUACK)
    with pytest.raises(ValueError, match="all bfloat16"):
        sym_gemm(half, dtype=torch.float32, choice=QUACK)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        sym_gemm(torch.zeros(2, 8, 5, dtype=torch.float16), choice=QUACK)
    with pytest.raises(ValueError, match="gemm_axpby has no kernel"):
        gemm_axpby(half, half, choice=QUACK)
    assert quack.calls == []


def test_it_is_a_candidate_where_it_is_installed(quack: QuackPackage) -> None:
    for op, arch in CANDIDATES:
        assert (QUACK in candidates.candidates(op, arch)) == (op == "sym_gemm")
    assert candidates.candidates("sym_gemm", 75) == ()
    assert named(QUACK) == "quack"


def faster(name: str) -> Timer:
    """A clock for what no CPU can show."""

    def clock(call: Callable[[], object]) -> Callable[[], float]:
        with recorded() as launches:
            call()
        return lambda: 1.0 if launches[0].choice.kernel == name else 1.5

    return clock


def test_the_tuner_checks_it_as_any_other(quack: QuackPackage) -> None:
    cpu = torch.device("cpu")
    verdict = tune("sym_gemm", (2, 32, 48), torch.float16, cpu, [QUACK], faster("quack"), rounds=1)
    assert verdict.choice.same_kernel(QUACK)
    quack.factor = 1.01
    verdict = tune("sym_gemm", (2, 32, 48), torch.float16, cpu, [QUACK], faster("quack"), rounds=1)
    assert "off by" in verdict.trials[1].refused


def test_a_version_that_takes_tensors_for_one_is_refused(quack: QuackPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an early one did: the scalars of recorded steps are tensors."""

    def early(*operands: Tensor, **options: object) -> Tensor:
        scalars = {name: value for name, value in options.items() if isinstance(value, Tensor) and value.ndim == 0}
        return quack.gemm_symmetric(*operands, **(options | dict.fromkeys(scalars, 1.0)))  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm_symmetric", early)
    forget()
    verdict = tune("sym_gemm", (2, 32, 48), torch.float16, torch.device("cpu"), [QUACK], faster("quack"), rounds=1)
    assert "scalars on the device: off by" in verdict.trials[1].refused


def test_without_it_nothing_breaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor with a verdict from the days when it was there, or with an installation that does not import."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "quack", None)
    forget()
    try:
        problem = Problem("sym_gemm", 1, 1024, 1024, torch.float16, torch.float16, 16)
        tuning_cache.store(HERE, problem, QUACK, {})
        assert tuning_cache.load(HERE) == {}
        assert QUACK not in candidates.candidates("sym_gemm", 90)
        half = torch.zeros(2, 16, 16, dtype=torch.float16)
        with pytest.raises(ValueError, match="quack-kernels cannot be used"):
            sym_gemm(half, choice=QUACK)
        verdict = tune("sym_gemm", (1, 16, 16), torch.float16, torch.device("cpu"), [QUACK], faster("quack"), rounds=1)
        assert verdict.choice.kernel == "library"
        assert "cannot be used" in verdict.trials[1].refused
    finally:
        forget()


def test_a_choice_without_a_tile_is_no_kernel_of_ours() -> None:
    with pytest.raises(ValueError, match="tile"):
        KernelChoice("persistent")
    with pytest.raises(ValueError, match="tile"):
        KernelChoice("quack", CANDIDATES["sym_gemm", 90][0].tile)
