"""Newton-Schulz and the kernels under it: checked against 64 bits, then timed against torch.compile and cuBLAS."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Muon

import canzona_compile
from canzona_compile.ir import program_ops
from canzona_compile.ir.options import Numerics
from canzona_compile.kernels.dispatch import Launch, recorded
from canzona_compile.kernels.gemm_axpby import gemm_axpby
from canzona_compile.kernels.sym_gemm import sym_gemm
from canzona_compile.tools.calibration.clock import NO_CUDA, Clock, Work, graphed
from canzona_compile.tools.tune import named
from gpu_clock import Ceilings, Extent, compared, going_on, in_turn, plain
from gpu_others import newton_schulz_of_others, others_of

COEFFICIENTS = (3.4445, -4.775, 2.0315)
STEPS = 5
EPS = 1e-7
CASES = ((1, 4096, 4096), (1, 4096, 12288), (1, 5120, 25600), (16, 1024, 4096), (64, 1024, 1024))
SIZES = (1024, 1536, 2048, 3072, 4096, 6144, 8192)
WORSE = 2.0  # times as far from the result in 64 bits as the eager one may ours be


def newton_schulz(update: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Muon's orthogonalization of [..., m, n], as torch.optim.Muon does it, in `dtype`.

    Source: Keller Jordan et al., Muon, 2024: five steps of X <- a X + (b A + c A A) X with A = X X^T.
    """
    a, b, c = COEFFICIENTS
    x = update.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    fused: Callable[..., Tensor] = torch.baddbmm if x.ndim > 2 else torch.addmm
    for _ in range(STEPS):
        gram = x @ x.mT
        x = fused(x, fused(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Calls(fx.Interpreter):
    """Runs a rank program once and keeps its calls of compute graphs, with what they were given."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[Work] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is program_ops.each and isinstance(args[0], fx.GraphModule):
            self.found.append(partial(target, *args, **kwargs))
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "_compute" in str(target):
            self.found.append(partial(self.fetch_attr(target), *args, **kwargs))
        return super().call_module(target, args, kwargs)


@contextlib.contextmanager
def program_of(optimizer: Any) -> Iterator[Any]:
    """What runs the last program of a wrapped optimizer, which finds gradients as in a step."""
    driver = optimizer.canzona.session.driver
    driver.gradients.read()
    try:
        with torch.no_grad(), driver.last.executor.streams.entered():
            yield driver.last.executor
    finally:
        driver.gradients.forget()


def compute_calls(optimizer: Any) -> list[Work]:
    """What a wrapped optimizer, that has stepped, computes per step, elementwise work aside."""
    with program_of(optimizer) as executor:
        calls = Calls(executor.program.module)
        calls.run(*executor.arguments())
    return calls.found


def wrapped_muon(gradients: list[Tensor], numerics: Numerics) -> Any:
    """A wrapped Muon without momentum that has stepped, so that it orthogonalizes the gradients."""
    params = [torch.nn.Parameter(torch.zeros_like(g, dtype=torch.float32)) for g in gradients]
    optimizer = canzona_compile.wrap(Muon(params, lr=1e-3, momentum=0.0, nesterov=False), numerics=numerics)
    for _ in range(2):
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
    return optimizer


def results_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from results_in(value)


def error_of(found: Tensor, exact: Tensor) -> float:
    """The largest difference of an element, in parts of its size and of the mean size together."""
    sizes = exact.abs()
    return float(((found.double() - exact).abs() / (sizes + sizes.mean())).max())


def kernels_in(launches: list[Launch]) -> dict[str, int]:
    """How often each kernel ran."""
    return dict(Counter(f"{launch.problem.op}: {named(launch.choice)}" for launch in launches))


@dataclass(slots=True)
class Products:
    """Measures the cases in turn. `problems`: results that are too far from those in 64 bits."""

    clock: Clock
    extent: Extent
    problems: list[str]

    def orthogonalizations(self) -> list[Callable[[], dict[str, Any]]]:
        return [partial(self._orthogonalization, *case) for case in CASES]

    def _orthogonalization(self, count: int, rows: int, columns: int) -> dict[str, Any]:
        count, rows, columns = self.extent.count(count), self.extent.size(rows), self.extent.size(columns)
        label = f"{count} x {rows} x {columns}"
        random = torch.Generator(self.clock.device).manual_seed(0)
        given = torch.randn(count, rows, columns, device=self.clock.device, generator=random)
        source = given.bfloat16() if count > 1 else given[0].bfloat16()
        exact = newton_schulz(source.reshape(-1, rows, columns)[0], torch.float64)
        eager = error_of(newton_schulz(source).reshape(-1, rows, columns)[0], exact)
        compiled = torch.compile(newton_schulz, dynamic=False, fullgraph=True, backend=self.extent.compiler)
        variants: dict[str, Work] = {"eager": lambda: newton_schulz(source), "compiled": lambda: compiled(source)}
        errors, notes, ran = {"eager": eager}, dict[str, str](), dict[str, dict[str, int]]()
        for numerics in ("exact", "fast"):
            with going_on(f"{label} {numerics}", self.problems):
                calls = compute_calls(wrapped_muon(list(given.unbind(0)), numerics))
                with recorded() as launches:
                    values = [call() for call in calls]
                ran[numerics] = kernels_in(launches)
                first = next(r for r in results_in(values) if r.shape[-2:] in ((rows, columns), (columns, rows)))
                first = first.reshape(-1, *first.shape[-2:])[0]
                own = error_of(first if first.shape == exact.shape else first.mT, exact)
                errors[numerics] = own
                if not own <= WORSE * eager + 1e-3:
                    self.problems.append(f"{label} {numerics}: {own:.1e} from 64 bits, eager is {eager:.1e}")
                variants[numerics] = lambda calls=calls: [call() for call in calls]  # type: ignore[misc]
        variants |= self._that_run(newton_schulz_of_others, notes, source)
        with torch.no_grad():
            graphs = {}
            for name, work in variants.items():
                graphs[name], why = graphed(work, self.clock.device)
                if why:
                    notes[name] = why if why == NO_CUDA else f"no CUDA graph: {why}"
            ceilings = Ceilings.measure(self.clock, self.extent)
            seconds = in_turn(self.clock, graphs, self.extent)
        return {
            "case": [count, rows, columns],
            "variants": compared(seconds, "compiled"),
            "errors": errors,
            "ran": ran,
            "notes": notes,
            "ceilings": plain(ceilings),
        }

    def _that_run(self, make: Callable[..., Mapping[str, Work]], notes: dict[str, str], *given: Any) -> dict[str, Work]:
        """What other packages have and can do here; a note says why something of theirs fails, and is no problem."""
        found: dict[str, Work] = {}
        try:
            for name, work in make(*given).items():
                try:
                    with torch.no_grad():
                        work()
                    found[name] = work
                except Exception as error:
                    notes[name] = f"fails: {type(error).__name__}: {error}".splitlines()[0]
        except Exception as error:
            notes["others"] = f"fail: {type(error).__name__}: {error}".splitlines()[0]
        return found

    def kernels(self) -> list[Callable[[], dict[str, Any]]]:
        kinds = ("sym_gemm", "gemm_axpby")
        return [partial(self._kernel, kind, self.extent.size(n)) for n in SIZES for kind in kinds]

    def _kernel(self, kind: str, n: int) -> dict[str, Any]:
        """One product, recorded on both sides, as in a step: small ones take less time than the host to launch them."""
        dtype = torch.bfloat16
        a, b = (torch.randn(n, n, device=self.clock.device, dtype=dtype) / n**0.5 for _ in range(2))
        out = torch.empty_like(a)
        variants: dict[str, Work]
        if kind == "sym_gemm":
            exact = a.double() @ a.double().mT
            variants = {"cublas": lambda: torch.mm(a, a.mT, out=out), "ours": lambda: sym_gemm(a, out=out)}
        else:
            exact = 2.0 * b.double() + 0.5 * (a.double() @ b.double())
            variants = {
                "cublas": lambda: torch.addmm(b, a, b, beta=2.0, alpha=0.5, out=out),
                "ours": lambda: gemm_axpby(a, b, alpha=2.0, beta=0.5, out=out),
            }
        notes = dict[str, str]()
        variants |= self._that_run(others_of, notes, kind, a, b, out)
        with torch.no_grad():
            errors = {}
            with recorded() as launches:
                for name, work in variants.items():
                    out.fill_(float("nan"))
                    work()
                    errors[name] = error_of(out, exact)
            if not errors["ours"] <= WORSE * errors["cublas"] + 1e-3:
                self.problems.append(f"{kind} {n}: {errors['ours']:.1e} from 64 bits, cuBLAS is {errors['cublas']:.1e}")
            graphs = {name: graphed(work, self.clock.device) for name, work in variants.items()}
            ceilings = Ceilings.measure(self.clock, self.extent)
            seconds = in_turn(self.clock, {name: replay for name, (replay, _) in graphs.items()}, self.extent)
        return {
            "kernel": kind,
            "size": n,
            "ran": kernels_in(launches),
            "variants": compared(seconds, "cublas"),
            "tflops": {name: 2 * n**3 / min(own) / 1e12 for name, own in seconds.items()},
            "errors": errors,
            "notes": notes | {name: why for name, (_, why) in graphs.items() if why},
            "ceilings": plain(ceilings),
        }
