"""`wrap_cls`: a class for frameworks that build the optimizer themselves."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, Muon, Optimizer

import canzona_compile
from canzona_compile import CanzonaError, UnsupportedOptimizer, wrap_cls
from tests.harness.pairs import Pair, different, feed, muon, parameters, wrapped_muon


def test_it_builds_what_wrap_makes() -> None:
    factory = wrap_cls(Muon, depth=3)
    built: Any = factory(parameters(), lr=0.1)
    assert type(built) is type(wrapped_muon())
    assert isinstance(built, Muon)
    assert canzona_compile.is_wrapped(built)
    assert built.canzona.session.options == canzona_compile.Options(depth=3)


def test_what_frameworks_ask_of_a_class() -> None:
    """transformers takes a callable that is no such class for a factory that it calls without arguments."""
    factory: Any = wrap_cls(Muon)
    assert isinstance(factory, type)
    assert issubclass(factory, Optimizer)
    assert issubclass(factory, Muon)
    assert inspect.signature(factory) == inspect.signature(Muon)
    assert (factory.__module__, factory.__doc__) == (Muon.__module__, Muon.__doc__)


def test_steps_have_the_bits_of_the_plain_optimizer() -> None:
    factory = wrap_cls(Muon)
    pair = Pair(muon)
    pair.wrapped = factory([{"params": parameters()}], lr=0.1)
    pair.steps(3)
    assert pair.report.tasks


def test_init_runs_once() -> None:
    built = []

    class Counted(Muon):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            built.append(kwargs)
            super().__init__(*args, **kwargs)

    wrap_cls(Counted)(parameters(), lr=0.1)
    assert built == [{"lr": 0.1}]


def test_one_class_builds_many_each_with_its_own_session() -> None:
    factory = wrap_cls(Muon)
    one, two = (factory(parameters(), lr=0.1) for _ in range(2))
    feed(one, 0)
    one.step()
    assert different(two, muon(parameters())) == []
    assert different(one, two) != []


def test_names_come_from_the_model() -> None:
    model = torch.nn.Linear(6, 4, bias=False)
    built: Any = wrap_cls(Muon, model=model, split={"weight": {"a": 2, "b": 2}})(model.parameters(), lr=0.1)
    feed(built, 0)
    built.step()
    assert [task.name for task in built.canzona.report().tasks] == ["weight[a]", "weight[b]"]


@pytest.mark.parametrize(
    "thing",
    [torch.nn.Linear, muon, None, torch.nn.Linear(2, 2)],
    ids=["another class", "function", "nothing", "object"],
)
def test_what_is_no_class_of_optimizers_is_refused(thing: Any) -> None:
    with pytest.raises(CanzonaError, match=r"takes a subclass of torch\.optim\.Optimizer"):
        wrap_cls(thing)


def test_an_optimizer_is_no_class() -> None:
    with pytest.raises(CanzonaError, match=r"takes a subclass of torch\.optim\.Optimizer.*\n.*call wrap"):
        wrap_cls(muon(parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [type(wrapped_muon()), wrap_cls(Muon)], ids=["wrapped", "factory"])
def test_a_class_is_wrapped_once(kind: type[Optimizer]) -> None:
    with pytest.raises(CanzonaError, match="CanzonaMuon is already wrapped"):
        wrap_cls(kind)


def test_errors_come_before_a_framework_builds_the_optimizer() -> None:
    with pytest.raises(UnsupportedOptimizer, match=r"LBFGS\.step requires closure"):
        wrap_cls(LBFGS)
    with pytest.raises(CanzonaError, match="strategy='fastest'"):
        wrap_cls(Muon, strategy="fastest")
    for name in ("speed", "names"):  # no options of users
        with pytest.raises(TypeError, match=name):
            wrap_cls(Muon, **{name: 1})  # type: ignore[arg-type]


def test_a_subclass_of_it_is_refused() -> None:
    """Its own step would be ignored."""
    with pytest.raises(CanzonaError, match=r"the class from wrap_cls\(Muon\) cannot be subclassed"):

        class Mine(wrap_cls(Muon)):  # type: ignore[misc]
            pass
