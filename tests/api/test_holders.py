"""Objects around optimizers: what is inside of known ones is wrapped, others are refused with the line that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from canzona_compile import CanzonaError, explain
from tests.harness.own_objects import ByAddress
from tests.harness.pairs import different, feed, parameters, params_of

SHAPES = ((6, 4), (4, 6), (5,))
pytestmark = pytest.mark.usefixtures("captures_shared")


def two(seed: int = 0) -> list[Optimizer]:
    params = parameters(SHAPES, seed=seed)
    return [Muon(params[:2], lr=0.1), AdamW(params[2:], lr=0.1)]


class OptimizersContainer(Optimizer):
    """As torchtitan's: an optimizer by its class, with groups of its own that nobody reads."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        super().__init__([p for own in optimizers for p in params_of(own)], {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    step.__module__ = "torchtitan.components.optimizer"


class OfUsers(OptimizersContainer):
    """As users make them: the step is that of the known one."""


class Chained:
    """As Megatron's: no optimizer by its class."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.chained_optimizers = tuple(optimizers)

    def step(self) -> None:
        for optimizer in self.chained_optimizers:
            optimizer.step()


def accelerated(optimizers: list[Optimizer]) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizers[0])


def of_fabric(optimizers: list[Optimizer]) -> Any:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    model = nn.Module()
    for i, param in enumerate(params_of(optimizers[0])):
        model.register_parameter(f"p{i}", param)  # type: ignore[arg-type]
    return fabric.setup(model, optimizers[0])[1]


HOLDERS: dict[str, Callable[[list[Optimizer]], Any]] = {
    "container": OfUsers,
    "accelerate": accelerated,
    "fabric": of_fabric,
}


@pytest.mark.parametrize("name", list(HOLDERS))
def test_what_known_ones_hold_is_wrapped(name: str) -> None:
    plain, inner = two(), two()
    count = 2 if name == "container" else 1
    holder = HOLDERS[name](inner)
    kind = type(holder)
    before = [p.detach().clone() for own in inner for p in params_of(own)]
    rows = explain(holder).parameters
    assert {row.how for row in rows} == ({"compiled"} if count == 1 else {"compiled", "local"})
    assert canzona_compile.wrap(holder) is holder
    assert all(map(torch.equal, before, (p for own in inner for p in params_of(own))))
    assert canzona_compile.wrap(holder) is holder
    assert type(holder) is kind
    assert [canzona_compile.is_wrapped(own) for own in inner[:count]] == [True] * count
    for step in range(3):
        for i, own in enumerate((*plain, *inner)):
            feed(own, 10 * step + i % 2)
        for own in plain[:count]:
            own.step()
        holder.step()
        assert [d for a, b in zip(plain[:count], inner, strict=False) for d in different(a, b)] == []
    assert len(holder.canzona.report().tasks) == 2
    canzona_compile.unwrap(holder)
    assert [type(own) for own in inner[:count]] == [Muon, AdamW][:count]


class Scaling(OptimizersContainer):
    """Changes gradients before."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in params_of(self):
            if param.grad is not None:
                param.grad.mul_(0.5)
        super().step()


def test_a_known_one_with_another_step_is_refused_and_the_line_is_said() -> None:
    inner = two()
    holder: Any = Scaling(inner)
    feed(holder, 0)
    before = [p.detach().clone() for p in params_of(holder)]
    ahead = {row.how for row in explain(holder).parameters}
    with pytest.raises(CanzonaError) as error:
        canzona_compile.wrap(holder).step()
    assert "self.optimizers" in (error.value.hint or "")
    assert ahead == {"refused"}
    assert all(map(torch.equal, before, params_of(holder)))
    assert [type(own) for own in inner] == [Muon, AdamW]


def test_an_optimizer_that_holds_another_and_leaves_it_alone_is_wrapped_itself() -> None:
    first, second = two()
    first.other = second  # type: ignore[attr-defined]
    canzona_compile.wrap(first)
    assert [canzona_compile.is_wrapped(own) for own in (first, second)] == [True, False]


@pytest.mark.parametrize("first", [True, False], ids=["wrapped-inside", "plain-inside"])
def test_a_container_of_a_chain(first: bool) -> None:
    inner: Any = canzona_compile.chain(*two())
    if first:
        canzona_compile.wrap(inner)
    holder: Any = OptimizersContainer([inner])
    plain = canzona_compile.chain(*two())
    assert canzona_compile.wrap(holder) is holder
    assert holder.canzona is inner.canzona
    for step in range(3):
        feed(inner, step)
        feed(plain, step)
        holder.step()
        plain.step()
    assert different(inner, plain) == []
    assert [p.how for p in explain(holder).parameters] == ["compiled", "compiled", "local"]
    canzona_compile.unwrap(inner)
    assert not canzona_compile.is_wrapped(inner)


def test_a_holder_that_is_no_optimizer_is_refused_with_the_line_that_works() -> None:
    with pytest.raises(CanzonaError) as error:
        canzona_compile.wrap(Chained(two()))  # type: ignore[type-var]
    assert "self.chained_optimizers" in str(error.value.hint)


def test_what_one_of_them_refuses_to_give_back_none_gives_back() -> None:
    params = parameters(SHAPES)
    muon, own = Muon(params[:1], lr=0.1), ByAddress(params[1:2])
    inner = [canzona_compile.wrap(muon), canzona_compile.wrap(own, one_per_matrix=ByAddress)]
    holder: Any = OptimizersContainer(inner)
    for optimizer in inner:
        feed(optimizer, 0)
    holder.step()
    with pytest.raises(CanzonaError, match="cannot be merged back"):
        canzona_compile.unwrap(holder)
    assert [canzona_compile.is_wrapped(optimizer) for optimizer in inner] == [True, True]
    assert type(canzona_compile.unwrap(muon)) is Muon
