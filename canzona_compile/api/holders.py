"""Objects around optimizers that others made: containers, chains and proxies of frameworks.

`wrap` wraps what is inside of such an object if all that the object does to parameters is to step that. So the object
is stepped some times on stand-ins: optimizers that only note that they were called, over parameters of one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.api.chain import Chain, is_chain
from canzona_compile.replica.copies import CachedCalls, Copies
from canzona_compile.replica.homes import held_in
from canzona_compile.replica.outside import Outside
from canzona_compile.replica.raised import NoCollectives
from canzona_compile.replica.snapshot import changed

STEPS = 50  # that are tried, because an object may do something different every tenth step


class Noted(Optimizer):
    """Stands for an optimizer while its holder is tried, and does nothing.

    Args:
        params: the stand-ins of its parameters, by group.
        original: the optimizer.
        called: gets this object at every step.
    """

    def __init__(self, params: list[list[nn.Parameter]], original: Optimizer, called: list[Noted]) -> None:
        own = [
            {**{name: value for name, value in group.items() if name != "params"}, "params": stand_ins}
            for group, stand_ins in zip(original.param_groups, params, strict=True)
        ]
        super().__init__(own, dict(original.defaults))
        self.called = called

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("a closure is handed on")
        self.called.append(self)


def only_steps(holder: Any, inner: tuple[Optimizer, ...]) -> bool:
    """Tell whether every step of an object is one step of each optimizer that it holds, and nothing else.

    Args:
        holder: the object. It is not changed, nor what its code writes elsewhere.
        inner: the optimizers.

    Returns:
        False also if the object cannot be tried.
    """
    copies, called = Copies(), list[Noted]()
    stand_ins: dict[int, nn.Parameter] = {}

    def stand_in(param: Tensor) -> nn.Parameter:
        if id(param) not in stand_ins:
            stand_ins[id(param)] = made = nn.Parameter(torch.full((1,) * param.ndim, 0.5, device="cpu"))
            made.grad = torch.full_like(made, 0.25)
            copies.put(param, made)
        return stand_ins[id(param)]

    try:
        with torch.random.fork_rng(devices=[]), NoCollectives():
            noted = [Noted([[stand_in(p) for p in g["params"]] for g in o.param_groups], o, called) for o in inner]
            for original, one in zip(inner, noted, strict=True):
                copies.put(original, one)
            for group in getattr(holder, "param_groups", ()):  # the holder has its own groups with the same parameters
                for param in group["params"]:
                    stand_in(param)
            tried = object.__new__(type(holder))
            copies.put(holder, tried)
            vars(tried).update({name: copies.of(value) for name, value in vars(holder).items()})
            before = Outside(holder, kept=copies.kept, calls=CachedCalls())
            try:
                for _ in range(STEPS):
                    called.clear()
                    tried.step()
                    if sorted(map(id, called)) != sorted(map(id, noted)) or any(map(touched, stand_ins.values())):
                        return False
                if changed(before.contents, Outside(holder, kept=copies.kept).contents):
                    return False
            finally:
                before.restore()
    except Exception:  # the object may raise anything on stand-ins
        return False
    return True


def touched(param: nn.Parameter) -> bool:
    """Whether a stand-in has another value or gradient than at first."""
    same_grad = param.grad is not None and bool((param.grad == 0.25).all())
    return not same_grad or not bool((param.detach() == 0.5).all())


def members_of(held: Sequence[Any]) -> tuple[Any, ...]:
    """The optimizers in what `inside` found, with each optimizer of a chain listed separately."""
    return tuple(own for one in held for own in (one.optimizers if is_chain(one) else (one,)))


def chain_of(held: Sequence[Any]) -> Chain | None:
    """The chain that is all that `inside` found; None if that is not one chain."""
    only, *others = held
    return only if is_chain(only) and not others else None


def inside(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers and chains whose steps are all that an object's step does; of others, and of a chain, itself.

    It tries the steps of an object that holds optimizers.
    """
    if is_chain(optimizer):
        return (optimizer,)
    found = {id(one): one for several in held_in(optimizer).values() for one in several}
    inner = tuple(found.values())
    return inner if inner and hasattr(optimizer, "step") and only_steps(optimizer, inner) else (optimizer,)
