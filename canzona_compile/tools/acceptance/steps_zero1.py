"""ZeRO-1 against the plain optimizer, with gradients that come from a backward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from canzona_compile.api.zero1 import zero1
from canzona_compile.data_parallel.engine import GatherAt
from canzona_compile.errors import some
from canzona_compile.tools.acceptance.side_by_side import OPTIMIZERS, ROUNDING, Shapes, even, relative, uneven
from canzona_compile.tools.acceptance.step import AcceptanceRank, AcceptanceStep, OnRanks, WrongResult

STEPS = 8
MEANING = (
    "Backward reduced gradients to wrong owners, or too early; the step updated what others own; or parameters were "
    "read before they were gathered. If only gather=forward fails, it is the last: look at what reads parameters "
    "outside of a module's forward pass. If it hangs, ranks start buckets in different orders: see their stacks."
)


class Weighted(nn.Module):
    """A weight whose gradient is what it is called with."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value.clone())

    def forward(self, gradient: Tensor) -> Tensor:
        """The sum of the products."""
        return (self.weight * gradient).sum()


class WeightedStack(nn.Module):
    """Weights that do not depend on one another."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weighted(value) for value in values)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """A scalar that depends on all weights."""
        return torch.stack([layer(grad) for layer, grad in zip(self.layers, gradients, strict=True)]).sum()


def like_plain(rank: AcceptanceRank, optimizer: str, gather: GatherAt, odd: bool) -> str:
    """Train on gradients whose means over ranks are exact, and compare parameters after every step.

    Args:
        rank: this one.
        optimizer: a name of `OPTIMIZERS`.
        gather: when parameters are whole again.
        odd: whether shapes do not divide.
    """
    shapes: Shapes = (uneven if odd else even)(rank)
    values = [numbers(rank, shape, i, 0.1) for i, shape in enumerate(shapes)]
    models = [WeightedStack(values) for _ in range(2)]
    plain = OPTIMIZERS[optimizer](list(models[0].parameters()))
    group = dist.group.WORLD
    assert group is not None
    ours = zero1(models[1], OPTIMIZERS[optimizer](list(models[1].parameters())), mesh=group, gather=gather)
    apart, first, wrong = 0.0, 0, dict[str, None]()
    for number in range(STEPS):
        # Small integers times a power of two: sums of them over ranks do not round, in whatever order.
        grads = [(numbers(rank, s, 100 * number + i, 4.0).round().clamp(-8, 8) / 64) for i, s in enumerate(shapes)]
        for model, one in zip(models, (plain, ours), strict=True):
            one.zero_grad()
            model(grads).backward()
            one.step()
        ours.canzona.synchronize()  # type: ignore[attr-defined]
        for i, (whole, mine) in enumerate(zip(models[0].parameters(), models[1].parameters(), strict=True)):
            if distance := relative(mine.detach(), whole.detach()):
                apart, first = max(apart, distance), first or number + 1
                wrong[f"matrix {i}"] = None
    if not wrong:
        return f"equal to the bit: {STEPS} steps"
    bound = ROUNDING[optimizer] if rank.device.type == "cuda" else 0.0
    said = f"relative distance {apart:.1e} from step {first} on, in {some(wrong)}"
    if apart <= bound:
        return f"equal up to rounding, {bound:.0e}: {said}"
    raise WrongResult(f"not equal to the plain optimizer: {said}", at=f"{optimizer}, gather={gather}, rank {rank.rank}")


def numbers(rank: AcceptanceRank, shape: tuple[int, ...], seed: int, scale: float) -> Tensor:
    """Random values that are equal on all ranks."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu") * scale).to(rank.device)


def data_parallel() -> Iterator[AcceptanceStep]:
    """ZeRO-1 with both gathers, and with dims that do not divide."""
    cases: tuple[tuple[str, GatherAt, bool], ...] = (
        ("muon", "step", False),
        ("muon", "forward", False),
        ("muon", "step", True),
        ("adamw", "forward", True),
        ("soap", "step", True),
    )
    for optimizer, gather, odd in cases:
        words = " and dims that do not divide" if odd else ""
        yield AcceptanceStep(
            f"zero1/{optimizer}/gather-{gather}{'-uneven' if odd else ''}",
            f"{optimizer} under ZeRO-1 is the plain optimizer, with gather={gather}{words}",
            MEANING,
            OnRanks(like_plain, (optimizer, gather, odd)),
            ("ranks", "power of two"),
            300.0,
        )
