"""The optimizers in examples/optimizers: each is right by itself, and wrapped ones have its bits, on ranks too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from examples.optimizers.kl import KLSOAP, KLShampoo
from examples.optimizers.normuon import NorMuon
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.layouts import Case
from tests.harness.marks import full, only
from tests.harness.optimizers import Shared, share_captures
from tests.harness.pairs import Pair, parameters, params_of
from tests.harness.ranks import do_alone
from tests.harness.training import Training, check, falling, on_ranks

SMALL = ((6, 4), (4, 6), (5, 5))
# Rows and columns that 2 and 3 ranks cannot share evenly, fewer rows than ranks, and two matrices alike.
SHAPES = ((31, 17), (2, 20), (24, 24), (24, 24))
STEPS = 12

# Two refreshes or more in STEPS; what a flag or a size switches is switched here.
OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "shampoo": lambda params: Shampoo(params, every=5),
    "shampoo-grafted": lambda params: Shampoo(params, momentum=0.0, every=4, graft=True, weight_decay=0.1),
    "shampoo-every-step": lambda params: Shampoo(params, every=1),
    "soap": lambda params: SOAP(params, every=5),
    "soap-one-sided": lambda params: SOAP(params, every=3, max_precond_dim=17, weight_decay=0.0),
    "soap-every-step": lambda params: SOAP(params, every=1),
    "soap-no-sides": lambda params: SOAP(params, max_precond_dim=1),
    "normuon": lambda params: NorMuon(params),
    "kl-shampoo": lambda params: KLShampoo(params, every=5),
    "kl-soap": lambda params: KLSOAP(params, every=5),
    "kl-soap-every-step": lambda params: KLSOAP(params, every=1),
}


# -- each by itself ----------------------------------------------------------------------------


def doubles(shape: tuple[int, ...], count: int = 1, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(count)]


def trajectory(optimizer: Optimizer, grads: Sequence[Tensor]) -> Iterator[Tensor]:
    """The only parameter after each of these gradients."""
    (param,) = params_of(optimizer)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        yield param.detach().clone()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def shampoo_by_hand(weight: Tensor, grads: Sequence[Tensor], lr: float, **hypers: Any) -> Iterator[Tensor]:
    """(L kron R)^(-1/4) of the whole parameter as one vector, from all gradients so far."""
    inverse = buffer = torch.zeros(())
    for t, grad in enumerate(grads):
        if t % hypers["every"] == 0:
            left, right = (hypers["eps"] * torch.eye(n, dtype=torch.float64) for n in weight.shape)
            for seen in grads[: t + 1]:
                left, right = left + seen @ seen.T, right + seen.T @ seen
            values, vectors = torch.linalg.eigh(torch.kron(left, right))
            inverse = vectors @ torch.diag(values**-0.25) @ vectors.T
        buffer = hypers["momentum"] * buffer + (inverse @ grad.flatten()).view(weight.shape)
        weight = weight - lr * hypers["weight_decay"] * weight - lr * buffer
        yield weight


@pytest.mark.parametrize("shape", SMALL)
def test_shampoo_by_hand(shape: tuple[int, ...]) -> None:
    first, *grads = doubles(shape, 9)
    hypers: dict[str, Any] = {"lr": 0.1, "momentum": 0.8, "eps": 1e-3, "every": 3, "weight_decay": 0.2}
    found = trajectory(Shampoo([torch.nn.Parameter(first.clone())], **hypers), grads)
    for value, expected in zip(found, shampoo_by_hand(first, grads, **hypers), strict=True):
        close(value, expected)


def test_grafting_takes_the_size_of_the_gradient_and_the_direction_of_shampoo() -> None:
    first, *grads = doubles((6, 4), 4)
    steps = {}
    for graft in (False, True):
        optimizer = Shampoo([torch.nn.Parameter(first.clone())], lr=1.0, momentum=0.0, graft=graft)
        values = [first, *trajectory(optimizer, grads)]
        steps[graft] = [before - after for before, after in itertools.pairwise(values)]
    for plain, grafted, grad in zip(steps[False], steps[True], grads, strict=True):
        close(grafted.norm(), grad.norm())
        close(grafted / grafted.norm(), plain / plain.norm())


def improved(statistics: Tensor, vectors: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Gram and Schmidt's way from S v, those of large v S v first; and where each comes from."""
    order = sorted(range(len(vectors)), key=lambda i: -float(vectors[i] @ statistics @ vectors[i]))
    found: list[Tensor] = []
    for i in order:
        vector = statistics @ vectors[i]
        for other in found:
            vector = vector - (other @ vector) * other
        found.append(vector / vector.norm())
    return order, found


def soap_by_hand(weight: Tensor, grads: list[Tensor], bases: list[Any], lr: float, **hypers: Any) -> Iterator[Tensor]:
    """Entry by entry: for every pair of a left and a right vector an Adam of its own."""
    (beta1, beta2), shampoo_beta, moment = hypers["betas"], hypers["shampoo_beta"], torch.zeros_like(weight)
    squares = {(i, j): 0.0 for i in range(weight.shape[0]) for j in range(weight.shape[1])}
    statistics = [(1 - shampoo_beta) * s for s in (grads[0] @ grads[0].T, grads[0].T @ grads[0])]
    yield weight
    for t, grad in enumerate(grads[1:], start=1):
        moment = beta1 * moment + (1 - beta1) * grad
        weight = weight - lr * hypers["weight_decay"] * weight
        for i, left in enumerate(bases[0]):
            for j, right in enumerate(bases[1]):
                squares[i, j] = beta2 * squares[i, j] + (1 - beta2) * float(left @ grad @ right) ** 2
                root = math.sqrt(squares[i, j] / (1 - beta2**t)) + hypers["eps"]
                size = (left @ moment @ right) / (1 - beta1**t) / root
                weight = weight - lr * size * torch.outer(left, right)
        for dim, new in enumerate((grad @ grad.T, grad.T @ grad)):
            statistics[dim] = shampoo_beta * statistics[dim] + (1 - shampoo_beta) * new
        if t % hypers["every"] == 0:
            orders = [list(range(n)) for n in weight.shape]
            for dim in (d for d in (0, 1) if weight.shape[d] <= hypers["max_precond_dim"]):
                orders[dim], bases[dim] = improved(statistics[dim], bases[dim])
            squares = {(i, j): squares[orders[0][i], orders[1][j]] for i, j in squares}
        yield weight


def kl_by_hand(weight: Tensor, grads: list[Tensor], bases: list[Any], soap: bool, **hypers: Any) -> Iterator[Tensor]:
    """With the covariances of both sides and their inverses, and the basis of the whole parameter as one vector."""
    (beta1, beta2), moment, square = hypers["betas"], torch.zeros_like(weight), torch.zeros(weight.numel())
    m, n = weight.shape
    values = [torch.full((size,), 0.1, dtype=torch.float64) for size in (m, n)]
    factors = [(1 - beta2) * s for s in (grads[0] @ grads[0].T / n, grads[0].T @ grads[0] / m)]
    yield weight
    for t, grad in enumerate(grads[1:], start=1):
        moment, basis = beta1 * moment + (1 - beta1) * grad, torch.kron(*bases)
        square = beta2 * square + (1 - beta2) * (basis.T @ grad.flatten()) ** 2
        root = square.sqrt() if soap else torch.kron(*values).sqrt()
        update = (basis @ (basis.T @ moment.flatten() / (root + hypers["eps"]))).view(m, n)
        weight = (1 - hypers["lr"] * hypers["weight_decay"]) * (weight - hypers["lr"] * update)
        left, right = (own @ torch.diag(v) @ own.T for own, v in zip(bases, values, strict=True))
        found = grad @ right.inverse() @ grad.T / n, grad.T @ left.inverse() @ grad / m
        for dim in (0, 1):
            fresh = torch.diag(bases[dim].T @ found[dim] @ bases[dim])
            values[dim] = (beta2 * values[dim] + (1 - beta2) * fresh).clamp(min=0.01)
            factors[dim] = beta2 * factors[dim] + (1 - beta2) * found[dim]
            if t % hypers["every"] == 0:
                bases[dim] = torch.linalg.qr(factors[dim] @ bases[dim]).Q
        yield weight


@pytest.mark.parametrize("soap", [False, True])
@pytest.mark.parametrize("shape", SMALL)
def test_kl_by_hand(shape: tuple[int, ...], soap: bool) -> None:
    first, *grads = doubles(shape, 11)
    hypers: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "every": 3, "weight_decay": 0.2}
    optimizer = (KLSOAP if soap else KLShampoo)([torch.nn.Parameter(first.clone())], **hypers)
    found = trajectory(optimizer, grads)
    assert torch.equal(next(found), first), "the first gradient only finds the bases"
    (state,) = optimizer.state.values()
    bases = [state[f"{side}_basis"].clone() for side in ("left", "right")]
    for basis, own in zip(bases, (grads[0] @ grads[0].T, grads[0].T @ grads[0]), strict=True):
        turned = basis.T @ own @ basis
        close(turned, torch.diag(turned.diag()))
        assert (turned.diag().diff() < 1e-9).all(), "those of large eigenvalues come first"
    expected = kl_by_hand(first, grads, bases, soap, **hypers)
    next(expected)
    for value, wanted in zip(found, expected, strict=True):
        close(value, wanted)


@pytest.mark.parametrize("max_precond_dim", [5, 6])
@pytest.mark.parametrize("shape", SMALL)
def test_soap_by_hand(shape: tuple[int, ...], max_precond_dim: int) -> None:
    """Where the first gradient leaves eigenvectors open, its own are taken, if they are ones."""
    first, *grads = doubles(shape, 11)
    hypers: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "shampoo_beta": 0.7, "eps": 1e-6, "every": 3}
    hypers |= {"max_precond_dim": max_precond_dim, "weight_decay": 0.2}
    optimizer = SOAP([torch.nn.Parameter(first.clone())], **hypers)
    found = trajectory(optimizer, grads)
    assert torch.equal(next(found), first), "the first gradient only finds the basis"
    (state,) = optimizer.state.values()
    bases = [torch.eye(n, dtype=torch.float64) for n in shape]
    for dim, side in enumerate(("left", "right")):
        assert (side in state) == (f"{side}_basis" in state) == (shape[dim] <= max_precond_dim)
        if side in state:
            bases[dim] = state[f"{side}_basis"].clone()
            diagonal = bases[dim].T @ state[side] @ bases[dim]
            close(bases[dim].T @ bases[dim], torch.eye(shape[dim], dtype=torch.float64))
            close(diagonal, diagonal.diagonal().sort(descending=True).values.clamp(min=0).diag())
    by_hand = soap_by_hand(first, grads, [list(basis.T) for basis in bases], **hypers)
    next(by_hand)
    for value, expected in zip(found, by_hand, strict=True):
        close(value, expected)


def test_soap_without_sides_is_adam_from_the_second_gradient_on() -> None:
    first, *grads = doubles((6, 4), 8)
    hypers: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    soap, adam = (
        make([torch.nn.Parameter(first.clone())])
        for make in (lambda p: SOAP(p, max_precond_dim=1, **hypers), lambda p: AdamW(p, **hypers))
    )
    for found, expected in zip(list(trajectory(soap, grads))[1:], trajectory(adam, grads[1:]), strict=True):
        close(found, expected)


def polynomials(matrix: Tensor, steps: int = 5) -> Tensor:
    """What Newton-Schulz does, on the singular values themselves."""
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    product: Tensor = left @ values.diag() @ right
    return product


@pytest.mark.parametrize("shape", SMALL)
def test_normuon_by_hand(shape: tuple[int, ...]) -> None:
    """Up to what bfloat16 rounds off."""
    first, *grads = doubles(shape, 6)
    lr, beta1, beta2, decay = 0.01, 0.8, 0.9, 0.2
    optimizer = NorMuon([torch.nn.Parameter(first.clone())], lr=lr, betas=(beta1, beta2), weight_decay=decay)
    weight, moment, squares = first, torch.zeros_like(first), torch.zeros(shape[0], dtype=torch.float64)
    for found, grad in zip(trajectory(optimizer, grads), grads, strict=True):
        moment = beta1 * moment + (1 - beta1) * grad
        orthogonal = polynomials(moment)
        squares = beta2 * squares + (1 - beta2) * torch.stack([row @ row / len(row) for row in orthogonal])
        direction = torch.stack([row / s.sqrt() for row, s in zip(orthogonal, squares, strict=True)])
        direction *= 0.2 / direction.square().mean().sqrt()
        expected = weight * (1 - lr * decay) - lr * direction
        assert float((found - expected).norm() / (lr * direction).norm()) < 0.05
        weight = found


@pytest.mark.parametrize("beta2", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(64, 16), (16, 64)])
def test_normuon_gives_rows_of_equal_size(shape: tuple[int, ...], beta2: float) -> None:
    """Of root mean square 0.2: each row at the first step, and without a memory at all; else their mean."""
    before, *grads = doubles(shape, 4)
    optimizer = NorMuon([torch.nn.Parameter(before.clone())], lr=1.0, betas=(0.9, beta2), weight_decay=0.0)
    unequal = [grad * torch.linspace(0.1, 10, shape[0]).unsqueeze(1) for grad in grads]
    for step, after in enumerate(trajectory(optimizer, unequal)):
        sizes = (after - before).square().mean(dim=1).sqrt()
        if step == 0 or beta2 == 0.0:
            torch.testing.assert_close(sizes, torch.full_like(sizes, 0.2), rtol=1e-4, atol=0.0)
        assert float(sizes.square().mean().sqrt()) == pytest.approx(0.2)
        before = after


BAD: list[tuple[Callable[..., Optimizer], dict[str, Any]]] = [
    *((make, {name: -0.1}) for make in (Shampoo, SOAP, NorMuon) for name in ("lr", "weight_decay", "eps")),
    *((make, {"every": 0}) for make in (Shampoo, SOAP)),
    *((make, {"betas": betas}) for make in (SOAP, NorMuon) for betas in ((1.0, 0.9), (0.9, -0.1))),
    (Shampoo, {"momentum": 1.0}),
    (Shampoo, {"eps": 0.0}),
    (SOAP, {"shampoo_beta": 1.0}),
    (NorMuon, {"ns_steps": 0}),
]


@pytest.mark.parametrize(("make", "hypers"), BAD)
def test_bad_hyperparameters_are_named(make: Callable[..., Optimizer], hypers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(hypers))}.* must"):
        make(parameters(), **hypers)


# -- wrapped, in one process -------------------------------------------------------------------

CAPTURED: dict[str, Shared] = {name: {} for name in OPTIMIZERS}  # by the test that follows, for the others


def wrapped_in_one_process(name: str) -> None:
    CAPTURED[name].clear()
    pair = Pair(OPTIMIZERS[name], SHAPES, captures_anew=True)
    share_captures(pair.wrapped, CAPTURED[name])
    captures = 0
    for step in range(STEPS):
        pair.set("lr", 0.03 / (1 + step))
        pair.step()
        captures = pair.report.captures if step == STEPS // 2 else captures
    assert pair.report.fallbacks == {}
    assert pair.report.captures == captures > 0, "all kinds of steps were captured by half time"


FAST_ALONE = ("shampoo", "normuon", "kl-shampoo", "kl-soap")


@pytest.mark.parametrize("name", [n if n in FAST_ALONE else full(n) for n in OPTIMIZERS])
def test_wrapped_in_one_process(name: str) -> None:
    do_alone(partial(wrapped_in_one_process, name))


# -- wrapped, on ranks -------------------------------------------------------------------------


TRAININGS = {
    name: Training(make, SHAPES, STEPS, falling(0.03), among=CAPTURED[name]) for name, make in OPTIMIZERS.items()
}


CASES = [Case("fsdp", (3,)), Case("tp_rows", (2,)), Case("tp_columns", (2,)), Case("hsdp", (2, 2)), Case("ddp", (2,))]
NAMES = ["shampoo", "soap", "soap-one-sided", "normuon", "kl-shampoo"]
FAST = [(Case("fsdp", (3,)), "shampoo"), (Case("ddp", (2,)), "normuon")]


@pytest.mark.parametrize(("case", "name"), only(FAST, CASES, NAMES), ids=str)
def test_wrapped_on_ranks(case: Case, name: str) -> None:
    report = check(on_ranks(__name__, name, [case], strategy="owner"))
    assert {task["strategy"] for task in report["tasks"]} == {"owner"}
