"""What chains refuse, with the words that help."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
from torch import nn
from torch.optim import LBFGS, AdamW, Muon

import canzona_compile
from canzona_compile import CanzonaError, Chain, UnsupportedOptimizer, chain
from tests.harness.chains import SHAPES, chained
from tests.harness.mistakes import refused
from tests.harness.pairs import parameters


def test_what_is_no_chain_is_refused() -> None:
    params = parameters(SHAPES)
    muon, adamw = Muon(params[:2], lr=0.1), AdamW(params[2:], lr=0.1)
    wrong: list[tuple[Any, ...]] = [(), (muon, muon), (chain(muon), adamw), ([muon, adamw],), (muon, params)]
    wrong += [(muon, AdamW(params[1:3], lr=0.1))]
    for given in wrong:
        with pytest.raises(CanzonaError) as error:
            chain(*given)
        assert error.value.hint
    assert chain(muon, adamw).optimizers == (muon, adamw)


def test_a_parameter_of_two_optimizers_is_named() -> None:
    (weight,) = parameters([(4, 4)])
    with refused(at="layers.0.weight") as error:
        chain(Muon([("layers.0.weight", weight)], lr=0.1), AdamW([("layers.0.weight", weight)], lr=0.1))
    assert "Muon" in error.value.problem
    assert "AdamW" in error.value.problem


def test_a_subclass_of_chain_is_refused() -> None:
    class Mine(Chain):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    with pytest.raises(CanzonaError, match="Mine is a subclass"):
        canzona_compile.wrap(Mine([Muon(parameters(SHAPES)[:2], lr=0.1)]))


def test_names_that_two_optimizers_have_are_refused_before_any_step() -> None:
    models = [nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)]
    made = chain(*[Muon(model.named_parameters(), lr=0.1) for model in models])
    for call in (canzona_compile.wrap, canzona_compile.explain):
        with refused(at="weight"):
            call(made)


def test_lbfgs_is_refused_by_name() -> None:
    params = parameters(SHAPES)
    with pytest.raises(UnsupportedOptimizer, match="LBFGS"):
        chain(Muon(params[:2], lr=0.1), LBFGS(params[2:]))


def test_a_member_that_wrap_refuses_leaves_all_of_them_as_they_were() -> None:
    params = parameters(SHAPES)
    adamw = AdamW(params[2:], lr=0.1)
    made = chain(Muon(params[:2], lr=0.1), adamw)
    adamw.step = adamw.step  # type: ignore[method-assign]  # hides that of the class
    with pytest.raises(CanzonaError):
        canzona_compile.wrap(made)
    assert [type(own) for own in (made, *made.optimizers)] == [Chain, Muon, AdamW]


# -- unwrap ----------------------------------------------------------------------------------------


def test_an_optimizer_of_a_wrapped_chain_is_not_unwrapped_alone() -> None:
    made = chained("two", wrapped=True)
    muon = made.optimizers[0]
    for copied in (made, copy.deepcopy(made)):
        with pytest.raises(CanzonaError, match="Muon is part of a wrapped chain"):
            canzona_compile.unwrap(copied.optimizers[0])
        assert all(map(canzona_compile.is_wrapped, copied.optimizers))
    del made, copied
    gc.collect()
    assert type(canzona_compile.unwrap(muon)) is Muon


def test_optimizers_that_were_wrapped_one_by_one_are_unwrapped_together() -> None:
    params = parameters(SHAPES)
    made = chain(canzona_compile.wrap(Muon(params[:2], lr=0.1)), AdamW(params[2:], lr=0.1))
    assert canzona_compile.unwrap(made) is made
    assert [type(own) for own in made.optimizers] == [Muon, AdamW]
