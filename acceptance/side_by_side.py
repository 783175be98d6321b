"""A plain optimizer on whole tensors beside a wrapped one on this rank's part, on the same device and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from acceptance.step import AcceptanceRank, WrongResult
from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.errors import CanzonaError, some
from canzona_compile.ir.step import Step
from canzona_compile.kernels.ops import NAMESPACE
from canzona_compile.report.build import Report
from canzona_compile.tensors import local_part
from canzona_compile.tools.verification.findings import Tally
from canzona_compile.tools.verification.layouts import like, shard, share
from canzona_compile.tools.verification.user_model import Built

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
    "stacks": shipped("muon", "Muon", lr=0.02, weight_decay=0.1),
    # One tensor at a time, as it is captured: what `foreach` calls on CUDA are other operators.
    "adamw": lambda params: AdamW(params, lr=0.003, weight_decay=0.1, foreach=False),
    "soap": shipped("soap", "SOAP", lr=0.003, every=REFRESH),
    "shampoo": shipped("shampoo", "Shampoo", lr=0.02, every=REFRESH),
}
# Relative distances of a parameter that other operators for the same products, or another order of sums, explain after
# some steps on CUDA, where exact numerics promises the algorithm: one difference in a 16-bit product grows through
# Newton-Schulz, and eigenvectors of close eigenvalues turn. A wrong update is off by more.
ROUNDING = {"muon": 2e-3, "stacks": 2e-3, "adamw": 2e-3, "soap": 2e-2, "shampoo": 2e-2}
COARSER = 8.0  # times as far, where parameters themselves have 16 bits


def even(rank: AcceptanceRank) -> Shapes:
    """Shapes that divide among up to 8 ranks, no two alike: nothing is padded and no products are stacked."""
    return ((16, 32), (32, 16), (16, 16)) if rank.tiny else ((256, 128), (128, 384), (128, 128))


def uneven(rank: AcceptanceRank) -> Shapes:
    """Shapes that do not divide; of the smallest matrix some ranks have nothing."""
    return ((13, 8), (6, 10), (3, 8)) if rank.tiny else ((250, 100), (72, 201), (3, 40))


def stacks(rank: AcceptanceRank) -> Shapes:
    """Stacks of experts' matrices, as many as divide among up to 8 ranks and not, and one matrix."""
    return ((8, 16, 8), (6, 8, 16), (16, 16)) if rank.tiny else ((8, 256, 128), (6, 128, 96), (128, 128))


def same_operators(step: Step) -> bool:
    """Tell whether a step computes by the operators that its optimizer calls, matrix by matrix.

    On CUDA, products that are proved symmetric, sums with products, and padding are operators of this package, and
    matrices of equal shape are stacked. A library may round these in another way.
    """
    graphs = [cut.compute for cut in step.placed]
    ours = any(isinstance(n.target, OpOverload) and n.target.namespace == NAMESPACE for g in graphs for n in g.nodes)
    return not ours and not any(batch.stacked for group in step.micro_groups for batch in group.batches)


class Weighted(nn.Module):
    """A weight whose gradient is what it is called with."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value.clone())

    def forward(self, gradient: Tensor) -> Tensor:
        """The sum of the products."""
        return (self.weight * gradient).sum()


class SideBySide:
    """Two optimizers with equal parameters.

    Attributes:
        plain, ours: the optimizer on whole tensors, and the wrapped one.
    """

    def __init__(
        self,
        rank: AcceptanceRank,
        optimizer: str,
        layout: str,
        shapes: Shapes,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._rank, self._name, self._layout, self._seed, self._dtype = rank, optimizer, layout, seed, dtype
        values = [self.random(shape, -1 - i, 0.1) for i, shape in enumerate(shapes)]
        self.plain, self.ours = (self._built(values) for _ in range(2))
        share(self.ours, layout, options, rank.device.type)
        self._tally, self._steps = Tally(rank.rank), 0
        self._before: list[Tensor | None] = []

    def random(self, shape: tuple[int, ...], number: int, scale: float) -> Tensor:
        """Values that depend on the seed and a number only, on this rank's device."""
        generator = torch.Generator().manual_seed(1_000_003 * (self._seed + 1) + number)
        return (torch.randn(shape, generator=generator, device="cpu") * scale).to(self._dtype).to(self._rank.device)

    def step(self, times: int = 1, *, in_place: bool = True, without: int | None = None) -> None:
        """Step both on the next gradients, and compare the parameters.

        Args:
            in_place: whether the wrapped optimizer's gradients stay at their addresses; otherwise they are elsewhere
                than in the step before.
            without: the parameter of which this rank has no gradient. Then only the wrapped optimizer steps, and the
                next step takes the same gradients.
        """
        zero1 = self._layout == "zero1"
        scale = 4.0 if zero1 else 0.01
        for _ in range(times):
            drawn = [self.random(tuple(p.shape), 100 * self._steps + i, scale) for i, p in enumerate(self.plain.params)]
            if zero1:
                self._give_by_backward(drawn)
            else:
                self._give(drawn, in_place, without)
            if without is None:
                self._steps += 1
                self.plain.optimizer.step()
            self.ours.optimizer.step()
            if zero1:
                self.ours.optimizer.canzona.synchronize()  # type: ignore[attr-defined]
            self._tally.add(self._steps, self.ours.parameters(), self.plain.parameters())

    def _give(self, grads: Sequence[Tensor], in_place: bool, without: int | None) -> None:
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
            for param, grad in zip(self.plain.params, grads, strict=True):
                param.grad = grad

    def _give_by_backward(self, drawn: Sequence[Tensor]) -> None:
        # Small integers times a power of two: sums of them over ranks do not round, in whatever order.
        grads = [value.round().clamp(-8, 8) / 64 for value in drawn]
        for made in (self.plain, self.ours):
            made.optimizer.zero_grad()
            losses = [layer(grad) for layer, grad in zip(made.model.children(), grads, strict=True)]
            torch.stack(losses).sum().backward()

    def add_matrix(self, shape: tuple[int, ...]) -> None:
        """Give both optimizers one parameter more, which makes another plan."""
        value = self.random(shape, -1 - len(self.plain.params), 0.1)
        self.plain.optimizer.add_param_group({"params": [nn.Parameter(value.clone())]})
        other = torch.optim.SGD([nn.Parameter(value.clone())], lr=0.1)
        shard(other, self._layout, self._rank.device.type)
        self.ours.optimizer.add_param_group({"params": other.param_groups[0]["params"]})
        names = (*self.plain.names, f"matrix {len(self.plain.names)}")
        self.plain, self.ours = (Built(b.model, b.optimizer, None, names) for b in (self.plain, self.ours))

    def verdict(self, recorded: bool = False) -> str:
        """Compare all state as well, and say how far both are apart. All ranks call this.

        Every bit has to be equal on CPU, and on CUDA where the programs have the operators of the plain optimizer.
        Elsewhere the distance has to be one that rounding explains.

        Args:
            recorded: whether steps have to be recorded on CUDA. A case of recordings shows nothing without one.
        """
        self._tally.add(self._steps, self.ours.leaves(), self.plain.leaves())
        report: Report = self.ours.optimizer.canzona.report()  # type: ignore[attr-defined]
        cuda = report.machine.device == "cuda"
        count = f"{self._steps} steps" + (f", {report.execution}" if cuda else "")
        found = self._found(count, not cuda or self._same_operators())
        if recorded and cuda and report.execution.startswith("call by call"):
            raise CanzonaError(f"no step was recorded; {found}", at=f"{self._name}, {self._layout}")
        return found

    def _same_operators(self) -> bool:
        """Whether this rank's programs have the operators of the plain optimizer; those of our kernels are others."""
        handle: Any = self.ours.optimizer.canzona  # type: ignore[attr-defined]
        return all(same_operators(session.last()[0]) for session in handle.sessions)

    def _found(self, count: str, bits: bool) -> str:
        """The verdict on numbers alone."""
        rows, apart = [row for row in self._tally.rows if not row.equal], self._tally.apart
        if not rows:
            return f"equal to the bit: {count}"
        first = min(row.first_step or 0 for row in rows)
        names = some(f"{row.parameter} {row.leaf} ({row.remark or f'{row.max_ulps} ulp'})" for row in rows)
        bound = ROUNDING[self._name] * (1.0 if self._dtype == torch.float32 else COARSER)
        if not bits and apart <= bound:
            return f"equal up to rounding, relative {apart:.1e} of {bound:.0e}: {count}; from step {first}: {names}"
        raise WrongResult(
            f"not equal to the plain optimizer from step {first} on: {names}",
            at=f"{self._name}, {self._layout}, {self._dtype}, rank {self._rank.rank}; {count}",
            hint=f"relative distance of parameters {apart:.1e}; rounding explains up to {bound:.0e} on CUDA",
        )

    def _built(self, values: Sequence[Tensor]) -> Built:
        model = nn.ModuleList(Weighted(value) for value in values)
        names = tuple(f"matrix {i}" for i in range(len(values)))
        return Built(model, OPTIMIZERS[self._name](list(model.parameters())), None, names)
