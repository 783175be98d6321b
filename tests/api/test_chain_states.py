"""State dicts, copies and pickles of chains, wrapped or not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, AdamW, Muon

import canzona_compile
from canzona_compile import CanzonaError, Chain, chain
from tests.harness.chains import Hand, both, chained, either, steps
from tests.harness.mistakes import refused
from tests.harness.optimizers import share_captures
from tests.harness.pairs import parameters, params_of, same_bits

pytestmark = pytest.mark.usefixtures("captures_shared")

# -- state dicts, copies, pickles --------------------------------------------------------------


@both
@either
def test_state_dicts_are_those_of_one_plain_optimizer(name: str, wrapped: bool) -> None:
    made, hand = chained(name, wrapped), Hand(name)
    steps(made, range(3), hand)
    saved = made.state_dict()
    assert saved.keys() == {"state", "param_groups"}
    assert [i for group in saved["param_groups"] for i in group["params"]] == list(range(6))
    flat = [entry for own in hand.optimizers for entry in own.state_dict()["state"].values()]
    for number, entry in enumerate(flat):
        assert saved["state"][number].keys() == entry.keys()
        assert all(same_bits(saved["state"][number][key], value) for key, value in entry.items())


@both
@pytest.mark.parametrize(("saves", "loads"), [(False, True), (True, False), (True, True)])
def test_state_dict_round_trip(name: str, saves: bool, loads: bool) -> None:
    first, hand = chained(name, saves), Hand(name)
    steps(first, range(3), hand)
    second = chained(name, loads, seed=5)
    with torch.no_grad():
        for mine, theirs in zip(params_of(second), params_of(first), strict=True):
            mine.copy_(theirs)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert hand.different(second) == []
    steps(second, range(3, 5), hand)


@either
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_is_loaded(wrapped: bool) -> None:
    made, hand = chained("three", wrapped), Hand("three")
    steps(made, range(2), hand)
    saved = made.state_dict()
    for groups in (saved["param_groups"][:-1], [{**g, "params": g["params"] * 2} for g in saved["param_groups"]]):
        with refused(at="chain.load_state_dict"):
            made.load_state_dict({**saved, "param_groups": groups})
    stray = {**saved, "state": {**saved["state"], 99: {}}}
    with pytest.raises(CanzonaError, match="99"):
        made.load_state_dict(stray)
    steps(made, range(2, 4), hand)


def test_groups_of_another_order_are_refused_and_nothing_is_loaded() -> None:
    params = parameters(((6, 4), (5, 4)))
    there = chain(AdamW(params[:1], lr=0.1), Muon(params[1:], lr=0.1))
    here = chain(Muon(params[1:], lr=0.2), AdamW(params[:1], lr=0.2))
    with refused(at="chain.load_state_dict"):
        here.load_state_dict(there.state_dict())
    assert [group["lr"] for group in here.param_groups] == [0.2, 0.2]
    older = here.state_dict()
    del older["param_groups"][1]["maximize"]
    here.load_state_dict(older)


@both
@either
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_are_independent(name: str, wrapped: bool, how: str) -> None:
    made, hand = chained(name, wrapped), Hand(name)
    steps(made, range(2), hand)
    copied = pickle.loads(pickle.dumps(made)) if how == "pickle" else copy.deepcopy(made)
    assert canzona_compile.is_wrapped(copied) is wrapped
    assert hand.different(copied) == []
    if wrapped:
        share_captures(copied)
    steps(made, range(2, 3))
    steps(copied, range(2, 4), hand)
    if wrapped:
        assert [part.session.optimizer for part in copied.canzona.parts] == list(copied.optimizers)
        assert len(copied.canzona.report().tasks) == 4


def test_a_copy_with_its_model_trains_the_copied_model() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    made = chain(SGD(matrices, lr=0.1), AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.1))
    copied_model, copied = copy.deepcopy((model, made))
    assert {id(p) for p in params_of(copied)} == {id(p) for p in copied_model.parameters()}


@both
@either
def test_helpers_of_distributed_checkpoint(name: str, wrapped: bool) -> None:
    """A new chain takes a dummy step there, which must not count."""

    def model_of(made: Chain) -> nn.Module:
        model = nn.Module()
        for i, param in enumerate(params_of(made)):
            model.register_parameter(f"p{i}", param)  # type: ignore[arg-type]
        return model

    first, hand = chained(name, wrapped), Hand(name)
    steps(first, range(3), hand)
    first.zero_grad()
    saved = get_optimizer_state_dict(model_of(first), first)
    second = chained(name, wrapped, seed=5)
    with torch.no_grad():
        for mine, theirs in zip(params_of(second), params_of(first), strict=True):
            mine.copy_(theirs)
    set_optimizer_state_dict(model_of(second), second, saved)
    assert hand.different(second) == []
    steps(second, range(3, 5), hand)


def test_reading_state_makes_none() -> None:
    made = chained("two")
    first = params_of(made)[0]
    assert made.state.get(first) is None
    assert made.state.pop(first, 7) == 7
    assert made.state_dict()["state"] == {}
    assert made.state.setdefault(first, {"mine": 1}) == made.optimizers[0].state[first] == {"mine": 1}
    assert made.state.pop(first) == {"mine": 1}
    assert first not in made.state
