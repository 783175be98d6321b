"""Rehearse the step of all parameters at once, beside the plain optimizer's: on whole copies, without the real ones."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.asked import ADDRESS
from canzona_compile.capture.cached_calls import CachedCalls
from canzona_compile.capture.contents import changed
from canzona_compile.capture.coupling import NamesByGroup, attribute_of, difference, where
from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.joint import JointUpdate, attributes_of, show, step_at_once, whole_copy
from canzona_compile.capture.kept import Finder, NoPlace
from canzona_compile.capture.miniature import Miniature
from canzona_compile.capture.outside import Outside
from canzona_compile.capture.randomness import seeded
from canzona_compile.capture.real_sizes import check_outside
from canzona_compile.capture.rehearsal import Rehearsal, all_of, check_address, check_returned, default_names, scenarios
from canzona_compile.capture.trial import RehearsedSteps, Scenario, run, together
from canzona_compile.capture.twin import odd_state, plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import UnsupportedOptimizer, some

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def rehearse_jointly(
    optimizer: Optimizer, refused: UnsupportedOptimizer, names: NamesByGroup = (), advice: str = ""
) -> Rehearsal:
    """Rehearse an optimizer that steps all parameters at once. Every rank gets the same, without communication.

    Args:
        optimizer: the optimizer.
        refused: why parameters cannot be stepped one by one.
        names: those of its parameters by group, for errors.
        advice: what its author can do about it.

    Raises:
        UnsupportedOptimizer: `refused`, with the reason why this is no way out.
    """
    counts = [len(group["params"]) for group in optimizer.param_groups]
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    names = names or default_names(optimizer)
    try:
        check_held(optimizer)
        found = [rehearse_one(optimizer, scenario, device, refused, names) for scenario in scenarios(counts)]
        check_outside(optimizer)
    except UnsupportedOptimizer as problem:
        if problem is refused or problem.problem == refused.problem:
            raise refused from None
        hint = f"{refused.hint}; " if refused.hint else ""
        told = f"{problem.problem} (at {problem.at})" if problem.at else problem.problem
        raise UnsupportedOptimizer(
            refused.problem, at=refused.at, hint=f"{hint}one rank cannot step all parameters at once either: {told}"
        ) from refused
    places = frozenset().union(*(one.places for one in found))
    return Rehearsal(
        writes_gradients=any(one.whole.writes_gradients for one in found),
        aliases=all_of(one.whole.aliases for one in found),
        drops_gradients=any(not one.whole.keeps_gradients for one in found),
        needs_gradients=any(one.needs_gradients for one in found),
        asks_layout=frozenset().union(*(one.whole.asks_layout for one in found)) - {ADDRESS},
        joint=JointUpdate(
            refused.problem,
            advice,
            frozenset(attribute_of(place) for place in places) - {""},
            frozenset(p.partition("['")[2].partition("']")[0] for p in places if p.startswith("param_groups")),
        ),
    )


class Rehearsed(NamedTuple):
    """What one scenario showed: what the plain steps did, the places that they changed, and whether they fail at
    missing gradients."""

    whole: RehearsedSteps
    places: frozenset[str]
    needs_gradients: bool


def check_held(optimizer: Optimizer) -> None:
    """Raise if an optimizer holds what a step of whole parameters must not meet, or what ranks cannot be shown.

    Raises:
        UnsupportedOptimizer: it holds fragments beside its parameter groups, or random generators.
    """
    kind, own = plain_class(optimizer).__name__, {**attributes_of(optimizer), "state": odd_state(optimizer)}
    finder = Finder(torch.empty(0, device="cpu"))
    try:
        for name, value in own.items():
            finder.look(("self", name), value, lambda _: None)
    except NoPlace as error:
        raise UnsupportedOptimizer(f"{kind} holds what cannot be told apart: {error}") from error
    if sharded := [path for path, place in finder.found.items() if isinstance(place.value, DTensor)]:
        raise UnsupportedOptimizer(f"{kind} holds DTensors in {some(path.replace('/', '.') for path in sharded)}")
    leaves = [place.value for place in finder.found.values()] + pytree.tree_leaves(own)
    if any(isinstance(leaf, GENERATORS) for leaf in leaves):
        raise UnsupportedOptimizer(
            f"{kind} draws from a random generator of its own, which only one rank would advance"
        )


def rehearse_one(
    optimizer: Optimizer, scenario: Scenario, device: torch.device, refused: UnsupportedOptimizer, names: NamesByGroup
) -> Rehearsed:
    """Rehearse one scenario; if the plain step fails at missing gradients, without these.

    Raises:
        UnsupportedOptimizer: the step does something else on whole copies, draws random numbers, communicates or fails,
            or changes what other ranks cannot be shown.
    """
    kind = plain_class(optimizer).__name__
    for one in (scenario, replace(scenario, missing={})):
        with seeded(device) as dice:
            whole = together(optimizer, one)
        if whole.error is None:
            break
    if whole.error is not None and not whole.after:
        raise refused
    if dice.rolled:
        raise UnsupportedOptimizer(f"{kind} draws random numbers")
    check_returned(optimizer, whole)
    check_address(optimizer, whole)
    with seeded(device):
        copies = at_once(optimizer, one)
    if places := difference(whole, copies):
        failed = copies.error if whole.error is None else None
        reason = "" if failed is None else f": {first_line(failed)}{blamed(failed)}"
        raise UnsupportedOptimizer(
            f"{kind}.step does something else on copies of its parameters{reason}", at=where(places, one, names)
        )
    moments = zip([whole.first, *whole.after], whole.after, strict=False)
    moved = frozenset(place for before, after in moments for place in changed(before, after))
    return Rehearsed(whole, moved, one.missing != scenario.missing)


def at_once(optimizer: Optimizer, scenario: Scenario) -> RehearsedSteps:
    """Step whole copies of all parameters on a twin, as the rank does that steps them all.

    Raises:
        UnsupportedOptimizer: the step communicates, or changes what other ranks cannot be shown.
    """
    small = Miniature(optimizer, scenario.chosen, scenario.stateful, scenario.loops)
    outside = Outside(optimizer, small.label, small.kept, CachedCalls())

    def step() -> None:
        real = small.optimizer
        copies: dict[Tensor, Tensor] = {param: whole_copy(param, param.grad, param) for param in small.params}
        state = {own: real.state[param] for param, own in copies.items() if param in real.state}
        with hidden(small.params):
            result = step_at_once(real, [[copies[p] for p in group["params"]] for group in real.param_groups], state)
        show(result.homes, result.same, real)
        for param, own in copies.items():
            param.data.copy_(own.detach())
            real.state.pop(param, None)
            if own in result.state:
                real.state[param] = result.state[own]

    try:
        return run(small, scenario, step)
    finally:
        outside.restore()


@contextlib.contextmanager
def hidden(params: Sequence[Tensor]) -> Iterator[None]:
    """Inside this context, parameters have no gradients and no values, as real ones are fragments on this rank."""
    before = [(param, param.grad, param.detach().clone()) for param in params]
    for param, _, values in before:
        param.grad = None
        param.data.fill_(float("nan") if values.is_floating_point() else 0)
    try:
        yield
    finally:
        for param, grad, values in before:
            param.data.copy_(values)
            param.grad = grad
