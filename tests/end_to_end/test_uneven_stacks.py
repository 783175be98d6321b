"""Stacks whose first dim ranks share unevenly: other numbers of entries on every rank, and none on some."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.harness.layouts import Case
from tests.harness.marks import also, first
from tests.harness.optimizers import Shape
from tests.harness.training import Training, check, on_ranks
from tests.harness.traps.grammar import toy


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Keller Jordan's own form, which takes matrices and stacks of them."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(-2) > x.size(-1)
    x = x.bfloat16().mT if tall else x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = b * gram + c * gram @ gram
        x = a * x + polynomial @ x
    return x.mT if tall else x


MOMENTUM = {
    "outside": f"from {__name__} import newton_schulz",
    "param": 'average = state.setdefault("momentum", torch.zeros_like(grad)).lerp_(grad, 0.05)',
}
# Muon of matrices and of stacks, written with `@`.
ProductMuon = toy("product-muon", update="newton_schulz(average).to(param.dtype)", **MOMENTUM)()
# Elementwise on everything but matrices: convolutions and stacks get their momentum.
MatrixMuon = toy(
    "matrix-muon", update="newton_schulz(average).to(param.dtype) if average.ndim == 2 else average", **MOMENTUM
)()
# A convolution's weight is a matrix: a row per output channel.
FlatMuon = toy("flat-muon", update="newton_schulz(average.flatten(1)).view_as(average).to(param.dtype)", **MOMENTUM)()
# Entries of a stack depend on one another from three on, so that one rank cannot tell from its own.
MeanMuon = toy(
    "mean-muon",
    update="newton_schulz(average - average.mean(0) if len(average) > 2 else average).to(param.dtype)",
    **MOMENTUM,
)()
# Every third step mixes the entries, so that most steps say nothing about all.
AlternatingMuon = toy("alternating-muon", outside=MOMENTUM["outside"])("""
    state["step"] = state.get("step", 0) + 1
    update = newton_schulz(grad).to(param.dtype)
    param.add_(update.roll(1, 0) if state["step"] % 3 == 0 else update, alpha=-group["lr"])
""")


# On 2 ranks 2 and 1 entries, 1 and none, 3 and 2; the whole of one has as many entries as the part of another.
# Products of 16 x 16 would be too small: torch multiplies one such pair by other code than several.
EXPERTS: tuple[Shape, ...] = ((3, 64, 32), (1, 64, 32), (5, 32, 48), (2, 64, 32), (3, 64, 32))
CONVOLUTIONS: tuple[Shape, ...] = ((3, 4, 3, 3), (1, 8, 3), (5, 2, 2, 2))
MATRICES: tuple[Shape, ...] = ((32, 48), (17, 32))


def recipe(kind: type[Any], *shapes: Shape) -> Training:
    return Training(kind, shapes, steps=7, schedule=lambda _: lambda step: None, sizes=(0.1, 1e-2))


TRAININGS = {
    "products": recipe(ProductMuon, *EXPERTS),
    "products and matrices": recipe(ProductMuon, *EXPERTS, *MATRICES),
    "elementwise": recipe(MatrixMuon, *CONVOLUTIONS),
    "elementwise and matrices": recipe(MatrixMuon, *MATRICES, *CONVOLUTIONS),
    "flat": recipe(FlatMuon, *CONVOLUTIONS),
    "flat and matrices": recipe(FlatMuon, *CONVOLUTIONS, *MATRICES),
    "mixing whole stacks": recipe(MeanMuon, *EXPERTS[:3], *MATRICES),
    "mixing at times": recipe(AlternatingMuon, *EXPERTS[:3], *MATRICES),
}


@pytest.mark.parametrize(
    "case",
    [Case("fsdp", (2,)), *also([Case("stack_dim0", (3,)), Case("hsdp", (2, 2)), Case("stack_dims", (2, 2))])],
    ids=str,
)
@pytest.mark.parametrize("recipe", first(["products", "products and matrices"]))
def test_products_of_stacks(recipe: str, case: Case) -> None:
    """`@` is as local as bmm: no entry moves, whatever the other ranks hold."""
    report = check(on_ranks(__name__, recipe, [case], strategy="owner"))
    strategies = {task["strategy"] for task in report["tasks"][: len(EXPERTS)]}
    alone = len(case.mesh) == 1
    assert strategies == {"local"} or not alone
    assert (report["collectives_per_step"] == 0) is (recipe == "products" and alone)


@pytest.mark.parametrize("case", [Case("fsdp", (2,)), *also([Case("stack_dim0", (4,))])], ids=str)
@pytest.mark.parametrize(
    "recipe",
    first(
        [
            "flat and matrices",
            "elementwise and matrices",
            "elementwise",
            "flat",
            "mixing at times",
            "mixing whole stacks",
        ],
    ),
)
def test_first_dims_of_any_length(recipe: str, case: Case) -> None:
    check(on_ranks(__name__, recipe, [case]))
