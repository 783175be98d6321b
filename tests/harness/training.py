"""One training twice: the plain optimizer on whole tensors, the wrapped one on a rank's fragments of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import canzona_compile
from tests.harness.layouts import Case, Laid, full, local, replicate_of
from tests.harness.optimizers import SHARED, Shared, share_captures
from tests.harness.pairs import params_of, same_bits
from tests.harness.ranks import collectives, run

Schedule = Callable[[Optimizer], Callable[[int], None]]  # given an optimizer: what to do to it before a step

ALONE = Case("plain", ())  # one process without groups


@dataclass(frozen=True, eq=False, slots=True)
class Training:
    """An optimizer of parameters of these shapes, and how many steps it takes.

    Attributes:
        schedule: changes hyperparameters before every step.
        sizes: standard deviations of the first parameters and of the gradients.
    """

    make: Callable[[list[Any]], Optimizer]
    shapes: tuple[tuple[int, ...], ...]
    steps: int
    schedule: Schedule
    sizes: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, eq=False, slots=True)
class Plain:
    """What plain training gives; all of it follows from the seed. The optimizer is the one after all steps."""

    first: list[Tensor]
    grads: list[list[Tensor]]  # by step
    optimizer: Optimizer


@functools.cache
def plain_run(training: Training, dtype: torch.dtype) -> Plain:
    """The plain optimizer on full tensors."""
    random = torch.Generator().manual_seed(5)

    def draw(size: float) -> list[Tensor]:
        return [(torch.randn(shape, generator=random) * size).to(dtype) for shape in training.shapes]

    first = draw(training.sizes[0])
    grads = [draw(training.sizes[1]) for _ in range(training.steps)]
    params = [nn.Parameter(value.clone()) for value in first]
    optimizer = training.make(params)
    change = training.schedule(optimizer)
    for step, values in enumerate(grads):
        change(step)
        for param, grad in zip(params, values, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return Plain(first, grads, optimizer)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank found after the last step.

    Attributes:
        different: what has other bits than the plain run: "parameter 3", "momentum_buffer of 0".
        elements: of each parameter's fragment.
        collectives: that the last step started, counted by the process groups, but for those by which ranks agree.
        report: of the wrapped optimizer.
    """

    different: list[str]
    elements: list[int]
    collectives: int
    report: dict[str, Any]


def train(training: Training, cases: Sequence[Case], dtype: torch.dtype, **options: Any) -> Outcome:
    """What becomes of the wrapped optimizer on this rank's fragments, fed the plain run's gradients."""
    return trained(training, cases, dtype, **options)[1]


def trained(
    training: Training,
    cases: Sequence[Case],
    dtype: torch.dtype,
    restored: bool = False,
    among: Shared = SHARED,
    **options: Any,
) -> tuple[Any, Outcome]:
    """The same, and the optimizer.

    Args:
        restored: load its own state in mid-run.
        among: those that share captures, see `share_captures`.
        options: of `wrap`.
    """
    plain = plain_run(training, dtype)
    laid = Laid(plain.first, *cases)
    optimizer: Any = training.make(laid.params)
    canzona_compile.wrap(optimizer, replicate=replicate_of(*cases), **options)
    share_captures(optimizer, among)
    change = training.schedule(optimizer)
    before = 0
    for step, values in enumerate(plain.grads):
        change(step)
        if restored and step == training.steps // 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for i, param in enumerate(laid.params):
            param.grad = laid.like_param(values[i], i)
        before = collectives()
        optimizer.step()
    sessions = getattr(optimizer.canzona, "sessions", None) or [optimizer.canzona.session]  # of a chain
    agreed = {ranks for own in sessions for ranks in own.driver.numbers()}  # one all-reduce each, before any update
    started = collectives() - before - len(agreed)
    elements = [index.numel() for index in laid.indices]
    report = optimizer.canzona.report().to_dict()
    return optimizer, Outcome([*differences(plain, optimizer, laid)], elements, started, report)


def differences(plain: Plain, optimizer: Optimizer, laid: Laid) -> Iterator[str]:
    """Compare parameters and all tensors, numbers and words of their states."""
    place = {id(param): i for i, param in enumerate(laid.params)}
    state = optimizer.state_dict()["state"]
    for k, (mine, whole) in enumerate(zip(params_of(optimizer), params_of(plain.optimizer), strict=True)):
        i = place[id(mine)]
        if not equal(mine.detach(), whole.detach(), laid, i):
            yield f"parameter {k}"
        expected, found = (leaves_of(s) for s in (plain.optimizer.state.get(whole, {}), state.get(k, {})))
        if expected.keys() != found.keys():
            yield f"state of {k} has {sorted(found)}"
        for leaf in expected.keys() & found.keys():
            if isinstance(expected[leaf], Tensor | int | float | str) and not equal(
                found[leaf], expected[leaf], laid, i
            ):
                yield f"{leaf} of {k}"


def leaves_of(state: dict[str, Any]) -> dict[str, Any]:
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(dict(state))[0]}


def equal(found: Any, whole: Any, laid: Laid, i: int) -> bool:
    """Has this leaf of parameter i, or the parameter itself, the bits of the whole one?

    Compared is what torch gathers, and this rank's fragment where the leaf is laid out as the parameter is.
    """
    if not isinstance(found, DTensor):
        return same_bits(found, whole)
    param = laid.params[i]
    assert isinstance(param, DTensor)
    gathered = full(found) if gathers(found) else whole  # a collective: on every rank, whatever this rank holds
    alike = found.shape == param.shape and found.placements == param.placements
    return same_bits(gathered, whole) and (
        not alike or same_bits(local(found).flatten(), laid.fragment(whole, i).flatten())
    )


def gathers(tensor: Tensor) -> bool:
    """Does torch gather it right? Where ranks descend it puts fragments in the wrong order."""
    if not isinstance(tensor, DTensor):
        return True
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    return bool(ranks == sorted(ranks))


def on_ranks(
    train: Callable[..., Outcome], name: str, cases: Sequence[Case], dtype: torch.dtype, **options: Any
) -> list[Outcome]:
    """`train(name, cases, dtype, ...)` of a test file on all ranks, which have it behind them in one process.

    So the plain run is made once, and once what is captured.
    """
    alone = functools.partial(train, name, [ALONE], dtype)
    return run(cases[0].world, train, name, cases, dtype, after=alone, **options)


def check(outcomes: Sequence[Outcome], fallbacks: bool = False) -> dict[str, Any]:
    """The right bits everywhere, by graphs, with as many collectives as reported: the report."""
    assert [o.different for o in outcomes] == [[]] * len(outcomes)
    assert [bool(o.report["fallbacks"]) for o in outcomes] == [fallbacks] * len(outcomes)
    assert all(o.collectives == o.report["collectives_per_step"] for o in outcomes if not fallbacks)
    return outcomes[0].report
