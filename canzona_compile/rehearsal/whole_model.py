"""Rehearse the step of all parameters at once, beside the plain optimizer's: on whole copies, without the real ones."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.eager.publish import CoupledUpdate
from canzona_compile.errors import UnsupportedOptimizer, some
from canzona_compile.rehearsal.diagnosis import NamesByGroup, attribute_of, difference, where
from canzona_compile.rehearsal.real_sizes import check_outside
from canzona_compile.rehearsal.rehearsal import Compared, Rehearsal, default_names, device_of, habits_of, together
from canzona_compile.rehearsal.scenario import Scenario, scenarios
from canzona_compile.rehearsal.stepping import AtOnce
from canzona_compile.rehearsal.trial import RehearsedSteps, take
from canzona_compile.replica.homes import odd_state, own_attributes
from canzona_compile.replica.object_state import Finder, NoPlace
from canzona_compile.replica.raised import blamed, first_line
from canzona_compile.replica.randomness import seeded
from canzona_compile.replica.snapshot import changed

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def rehearse_coupled(
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
    cast = scenarios([len(group["params"]) for group in optimizer.param_groups])
    names = names or default_names(optimizer)
    try:
        check_held(optimizer)
        found = [rehearse_one(optimizer, scenario, refused, names) for scenario in cast]
        check_outside(optimizer)
    except UnsupportedOptimizer as problem:
        if problem is refused or problem.problem == refused.problem:
            raise refused from None
        hint = f"{refused.hint}; " if refused.hint else ""
        told = f"{problem.problem} (at {problem.at})" if problem.at else problem.problem
        raise UnsupportedOptimizer(
            refused.problem, at=refused.at, hint=f"{hint}one rank cannot step all parameters at once either: {told}"
        ) from refused
    habits = habits_of(one.habits(asked) for one, asked in zip(found, cast, strict=True))
    places = frozenset().union(*(places_changed(one.plain) for one in found))
    attributes = frozenset(attribute_of(place) for place in places) - {""}
    hyperparameters = frozenset(p.partition("['")[2].partition("']")[0] for p in places if p.startswith("param_groups"))
    return replace(
        habits, counters=frozenset(), coupled=CoupledUpdate(refused.problem, advice, attributes, hyperparameters)
    )


def rehearse_one(
    optimizer: Optimizer, scenario: Scenario, refused: UnsupportedOptimizer, names: NamesByGroup
) -> Compared:
    """Rehearse one scenario; if the plain step fails at missing gradients, without these.

    Raises:
        UnsupportedOptimizer: the step does something else on whole copies, draws random numbers, communicates or fails,
            or changes what other ranks cannot be shown.
    """
    kind = plain_class(optimizer).__name__
    for one in (scenario, replace(scenario, missing={})):
        plain = together(optimizer, one)
        if plain.error is None:
            break
    if plain.error is not None and not plain.after:
        raise refused
    if plain.drew:
        raise UnsupportedOptimizer(f"{kind} draws random numbers")
    with seeded(device_of(optimizer)):
        cells = take(optimizer, one, AtOnce())
    if places := difference(plain, cells):
        failed = cells.error if plain.error is None else None
        reason = "" if failed is None else f": {first_line(failed)}{blamed(failed)}"
        raise UnsupportedOptimizer(
            f"{kind}.step gives different results on copies of its parameters{reason}", at=where(places, one, names)
        )
    return Compared(one, plain, cells)


def places_changed(found: RehearsedSteps) -> frozenset[str]:
    """The places at which steps changed something."""
    moments = zip([found.first, *found.after], found.after, strict=False)
    return frozenset(place for before, after in moments for place in changed(before, after))


def check_held(optimizer: Optimizer) -> None:
    """Raise if an optimizer holds what a step of whole parameters must not meet, or what ranks cannot be shown.

    Raises:
        UnsupportedOptimizer: it holds fragments outside of its parameter groups, or random generators.
    """
    kind, own = plain_class(optimizer).__name__, {**own_attributes(optimizer), "state": odd_state(optimizer)}
    finder = Finder(torch.empty(0, device="cpu"))
    try:
        for name, value in own.items():
            finder.look(("self", name), value, lambda _: None)
    except NoPlace as error:
        raise UnsupportedOptimizer(f"what {kind} holds cannot be identified: {error}") from error
    if sharded := [path for path, place in finder.found.items() if isinstance(place.value, DTensor)]:
        raise UnsupportedOptimizer(f"{kind} holds DTensors in {some(path.replace('/', '.') for path in sharded)}")
    leaves = [place.value for place in finder.found.values()] + pytree.tree_leaves(own)
    if any(isinstance(leaf, GENERATORS) for leaf in leaves):
        raise UnsupportedOptimizer(f"{kind} draws from its own random generator, which only one rank would advance")
