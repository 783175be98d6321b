"""Torch takes a step of zeros to see what the state of a fresh optimizer looks like. It must not count."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from tests.harness.checkpointing import OPTIMIZERS, SAVED, Holder, Run, first_values, once
from tests.harness.layouts import Case
from tests.harness.marks import first, full
from tests.harness.pairs import Pair, parameters, params_of
from tests.harness.ranks import run
from tests.harness.toys import Counting, CountingInGroup, CountingInState, CountingOnItself, RootOfNorm
from tests.harness.traps.grammar import toy

# Begins with noise.
Drawing = toy("drawing")("""
    if not state:
        state["noise"] = torch.rand(param.shape)
    param.add_(cube(grad) * state["noise"], alpha=-group["lr"])
""")


COUNTING: dict[str, Callable[[list[Any]], Optimizer]] = {
    "in its group": CountingInGroup,
    "on itself": CountingOnItself,
    "in its state": CountingInState,
    "nan for zeros": RootOfNorm,
    "shampoo": OPTIMIZERS["shampoo"],
    "soap": OPTIMIZERS["soap"],
    "objects": OPTIMIZERS["objects"],
}


def look(optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint would hold; torch takes its step if the optimizer took none."""
    return get_optimizer_state_dict(Holder(params_of(optimizer)), optimizer)


def plain_look(name: str) -> Optimizer:
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(v.clone()) for v in first_values()])
    look(optimizer)
    return optimizer


def looked_at(name: str, case: Case) -> list[str]:
    """The run, after its optimizer was looked at: what differs."""
    part = Run(name, case)
    shown = look(part.optimizer)
    wrong = [f"looked at: {what}" for what in part.differs_from(plain_look(name))]
    for param, state in zip(part.laid.params, shown["state"].values(), strict=True):
        like = {leaf for leaf, value in state.items() if getattr(value, "shape", None) == param.shape}
        wrong += [leaf for leaf in like if isinstance(state[leaf], DTensor) != isinstance(param, DTensor)]
    look(part.optimizer)
    part.steps(0, SAVED)
    return wrong + part.differs(SAVED)


LOOKS = [("muon", "ddp"), ("shampoo", "fsdp"), full("soap", "fsdp"), full("soap", "ddp")]


@pytest.mark.parametrize(("name", "layout"), LOOKS)
def test_shows_what_a_plain_one_shows_and_begins_afterwards(name: str, layout: str) -> None:
    assert run(2, looked_at, name, Case(layout, (2,)), after=once(name)) == [[], []]


@pytest.mark.full
def test_no_code_is_captured_for_it_alone() -> None:
    pairs = [Pair(OPTIMIZERS["shampoo"], captures_anew=True) for _ in range(2)]
    look(pairs[0].wrapped)
    for pair in pairs:
        pair.steps(2)
    assert pairs[0].report.captures == pairs[1].report.captures > 0


@pytest.mark.parametrize("name", [n if n in ("in its group", "objects") else full(n) for n in COUNTING])
def test_nothing_was_counted_and_no_parameter_changed(name: str) -> None:
    pair = Pair(COUNTING[name])
    groups, own = copy.deepcopy(pair.wrapped.param_groups[0]), {**vars(pair.wrapped)}
    look(pair.wrapped)
    assert pair.wrapped.param_groups[0].keys() == groups.keys()
    assert pair.wrapped.param_groups[0] | {"params": ()} == groups | {"params": ()}
    assert vars(pair.wrapped).keys() == own.keys()
    pair.steps(4)
    assert pair.wrapped.param_groups[0] | {"params": ()} == pair.plain.param_groups[0] | {"params": ()}


@pytest.mark.filterwarnings("ignore:Drawing draws random numbers")
def test_random_numbers_go_on_where_they_were() -> None:
    optimizer = canzona_compile.wrap(Drawing(parameters()))
    before = torch.get_rng_state()
    look(optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_schedule_may_have_begun() -> None:
    pair = Pair(Counting)
    schedulers = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in pair.both]
    look(pair.wrapped)
    for _ in range(4):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()


def test_a_user_s_own_step_of_zeros_counts() -> None:
    """A warm-up from 0, and a last layer of zeros: the same gradients and the same lr."""
    pair = Pair(Counting)
    rates = [o.param_groups[0]["lr"] for o in pair.both]
    pair.set("lr", 0.0)
    for optimizer in pair.both:
        for param in params_of(optimizer):
            param.grad = torch.zeros_like(param)
        optimizer.step(closure=None)
    pair.set("lr", rates[0])
    pair.steps(4)


def unwrapped(optimizer: Any) -> Any:
    return canzona_compile.wrap(canzona_compile.unwrap(optimizer))


@pytest.mark.parametrize("how", first([unwrapped, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]))
def test_what_becomes_of_it_begins_afresh(how: Callable[[Any], Any]) -> None:
    pair = Pair(Counting)
    look(pair.wrapped)
    pair.wrapped = how(pair.wrapped)
    assert not pair.wrapped.state
    pair.steps(3)


def test_a_new_group_after_it() -> None:
    pair = Pair(Counting)
    look(pair.wrapped)
    for optimizer in pair.both:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 5))]})
    pair.steps(3)


def test_an_optimizer_without_state_is_looked_at_between_steps() -> None:
    pair = Pair(CountingInGroup)
    for _ in range(3):
        pair.steps(2)
        pair.wrapped.zero_grad()
        look(pair.wrapped)
