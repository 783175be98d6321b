"""A plain optimizer on whole tensors beside a wrapped one on this rank's part, on the same device and gradients."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from canzona_compile.api.wrap import wrap
from canzona_compile.errors import some
from canzona_compile.ir.layout import local_part
from canzona_compile.report.build import Report
from canzona_compile.tools.acceptance.arrangements import ARRANGEMENTS
from canzona_compile.tools.acceptance.step import AcceptanceRank, WrongResult
from canzona_compile.tools.verification.compare import distance
from canzona_compile.tools.verification.findings import Tally
from canzona_compile.tools.verification.layouts import fragments, like
from canzona_compile.tools.verification.user_model import PARAMETER, Built, Leaves

Shapes = Sequence[tuple[int, ...]]
REFRESH = 4  # steps from one decomposition to the next


def shipped(module: str, name: str, **options: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Make an optimizer that comes with the package, for its examples and plans; it is imported when it is made."""

    def make(params: list[nn.Parameter]) -> Optimizer:
        found: Optimizer = getattr(importlib.import_module(f"canzona_compile.optimizers.{module}"), name)(
            params, **options
        )
        return found

    return make


OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.02, weight_decay=0.1),
    "adamw": lambda params: AdamW(params, lr=0.003, weight_decay=0.1),
    "soap": shipped("soap", "SOAP", lr=0.003, every=REFRESH),
    "shampoo": shipped("shampoo", "Shampoo", lr=0.02, every=REFRESH),
}
# Relative distances of a parameter that another order of sums explains after some steps on CUDA, where exact numerics
# promises the algorithm and not the order: one difference in a 16-bit product grows through Newton-Schulz, and
# eigenvectors of close eigenvalues turn. A wrong update is off by more.
ROUNDING = {"muon": 2e-3, "adamw": 2e-3, "soap": 2e-2, "shampoo": 2e-2}
COARSER = 8.0  # times as far, where parameters themselves have 16 bits


def even(rank: AcceptanceRank) -> Shapes:
    """Shapes that divide among up to 8 ranks, no two alike: nothing is padded and no products are stacked."""
    return ((16, 32), (32, 16), (16, 16)) if rank.tiny else ((256, 128), (128, 384), (128, 128))


def uneven(rank: AcceptanceRank) -> Shapes:
    """Shapes that do not divide; of the smallest matrix some ranks have nothing."""
    return ((13, 8), (6, 10), (3, 8)) if rank.tiny else ((250, 100), (72, 201), (3, 40))


class SideBySide:
    """Two optimizers with equal parameters.

    Args:
        rank: this one.
        optimizer: a name of `OPTIMIZERS`.
        layout: a name of `ARRANGEMENTS`, of the wrapped one's parameters.
        shapes: of the parameters.
        dtype: of the parameters.
        seed: of parameters and gradients.
        options: of `wrap`.

    Attributes:
        plain, ours: the optimizer on whole tensors, and the wrapped one.
        apart: the largest relative distance of a parameter so far, on this rank.
    """

    def __init__(
        self,
        rank: AcceptanceRank,
        optimizer: str,
        layout: str,
        shapes: Shapes,
        dtype: torch.dtype,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._rank, self._name, self._layout, self._seed, self._dtype = rank, optimizer, layout, seed, dtype
        values = [self.random(shape, -1 - i, 0.1) for i, shape in enumerate(shapes)]
        self.plain, self.ours = (self._built(values) for _ in range(2))
        wrap(self.ours.optimizer, replicate=self._arranged(self.ours.optimizer), **options)
        self._tally, self._steps, self.apart = Tally(rank.rank), 0, 0.0
        self._before: list[Tensor | None] = []

    def random(self, shape: tuple[int, ...], number: int, scale: float) -> Tensor:
        """Values that depend on the seed and a number only, on this rank's device."""
        generator = torch.Generator().manual_seed(1_000_003 * (self._seed + 1) + number)
        return (torch.randn(shape, generator=generator, device="cpu") * scale).to(self._dtype).to(self._rank.device)

    def step(self, *, in_place: bool = True, without: int | None = None) -> None:
        """Step both on the next gradients, and compare the parameters.

        Args:
            in_place: whether the wrapped optimizer's gradients stay at their addresses; otherwise they are elsewhere
                than in the step before.
            without: the parameter of which this rank has no gradient. Then only the wrapped optimizer steps, and the
                next step takes the same gradients.
        """
        grads = [self.random(tuple(p.shape), 100 * self._steps + i, 0.01) for i, p in enumerate(self.plain.params)]
        before = [param.grad for param in self.ours.params]  # held, so that no new gradient gets their memory
        for i, (param, grad) in enumerate(zip(self.ours.params, grads, strict=True)):
            new = like(grad, param)
            if in_place and param.grad is not None:
                local_part(param.grad).copy_(local_part(new))
            else:
                param.grad = new
            if i == without:
                param.grad = None
        self._before = before
        if without is None:
            self._steps += 1
            for param, grad in zip(self.plain.params, grads, strict=True):
                param.grad = grad
            self.plain.optimizer.step()
        self.ours.optimizer.step()
        names = zip(self.ours.names, self.ours.params, self.plain.params, strict=True)
        pairs = [(name, mine.detach(), whole.detach()) for name, mine, whole in names]
        self._compare({(n, PARAMETER): mine for n, mine, _ in pairs}, {(n, PARAMETER): whole for n, _, whole in pairs})

    def add_matrix(self, shape: tuple[int, ...]) -> None:
        """Give both optimizers one parameter more, which makes another plan."""
        value = self.random(shape, -1 - len(self.plain.params), 0.1)
        self.plain.optimizer.add_param_group({"params": [nn.Parameter(value.clone())]})
        other = torch.optim.SGD([nn.Parameter(value.clone())], lr=0.1)
        self._arranged(other)
        self.ours.optimizer.add_param_group({"params": other.param_groups[0]["params"]})
        names = (*self.plain.names, f"matrix {len(self.plain.names)}")
        self.plain, self.ours = (Built(b.model, b.optimizer, None, names) for b in (self.plain, self.ours))

    def verdict(self, bits: bool, recorded: bool = False) -> str:
        """Compare all state as well, and say how far both are apart. All ranks call this.

        Args:
            bits: whether every bit has to be equal on CUDA, as it always has to on CPU.
            recorded: whether steps have to be recorded on CUDA. A case of recordings shows nothing without one.

        Raises:
            WrongResult: they are further apart than that, or no step was recorded.
        """
        self._compare(self.ours.leaves(), self.plain.leaves())
        report: Report = self.ours.optimizer.canzona.report()  # type: ignore[attr-defined]
        cuda = report.machine.device == "cuda"
        count = f"{self._steps} steps" + (f", {report.execution}" if cuda else "")
        found = self._found(count, bits or not cuda)
        if recorded and cuda and report.execution.startswith("call by call"):
            raise WrongResult(f"no step was recorded; {found}", at=f"{self._name}, {self._layout}")
        return found

    def _found(self, count: str, bits: bool) -> str:
        """The verdict on numbers alone."""
        rows = [row for row in self._tally.rows if not row.equal]
        if not rows:
            return f"equal to the bit: {count}"
        first = min(row.first_step or 0 for row in rows)
        names = some(f"{row.parameter} {row.leaf} ({row.remark or f'{row.max_ulps} ulp'})" for row in rows)
        bound = ROUNDING[self._name] * (1.0 if self._dtype == torch.float32 else COARSER)
        if not bits and self.apart <= bound:
            return (
                f"equal up to rounding, relative {self.apart:.1e} of {bound:.0e}: {count}; from step {first}: {names}"
            )
        raise WrongResult(
            f"not equal to the plain optimizer from step {first} on: {names}",
            at=f"{self._name}, {self._layout}, {self._dtype}, rank {self._rank.rank}; {count}",
            hint=f"relative distance of parameters {self.apart:.1e}; rounding explains up to {bound:.0e} on CUDA",
        )

    def _compare(self, found: Leaves, expected: Leaves) -> None:
        self._tally.add(self._steps, found, expected)
        for (name, leaf), whole in expected.items():
            if leaf == PARAMETER:
                mine, same = fragments(found[name, leaf], whole)
                self.apart = max(self.apart, relative(mine, same))

    def _built(self, values: Sequence[Tensor]) -> Built:
        params = [nn.Parameter(value.clone()) for value in values]
        names = tuple(f"matrix {i}" for i in range(len(params)))
        return Built(nn.ParameterList(params), OPTIMIZERS[self._name](params), None, names)

    def _arranged(self, optimizer: Optimizer) -> Any:
        return ARRANGEMENTS[self._layout].arrange(optimizer, self._rank.device.type)


def relative(found: object, expected: object) -> float:
    """|a - b| / |b| of two tensors; infinite if either is not finite where they differ."""
    assert isinstance(found, Tensor)
    assert isinstance(expected, Tensor)
    if distance(found, expected).equal:
        return 0.0
    apart = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    return apart if math.isfinite(apart) else math.inf
