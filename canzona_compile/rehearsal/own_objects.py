"""Rehearse objects: one object of all parameters beside one object per parameter, and those saved and put back.

What an optimizer keeps on itself, and what it draws, makes the ordinary rehearsal refuse it. Whether its parameters
are independent shows here. The runs draw equal numbers, so that those of optimizers that draw can be compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.eager.own_object import Recipe
from canzona_compile.errors import CanzonaError, DrawsRandomNumbers, UnsupportedOptimizer, some
from canzona_compile.rehearsal.diagnosis import NamesByGroup, attribute_of, caches, first_difference, where
from canzona_compile.rehearsal.place_names import held_in, in_a_list, is_held, is_option, once_for_all, path_of
from canzona_compile.rehearsal.real_sizes import coupled_at_real_sizes
from canzona_compile.rehearsal.rehearsal import (
    Compared,
    Rehearsal,
    compared,
    default_names,
    device_of,
    habits_of,
    takes_foreach,
)
from canzona_compile.rehearsal.scenario import Scenario, scenarios
from canzona_compile.rehearsal.stepping import Constructed, OwnObjects
from canzona_compile.rehearsal.trial import RehearsedSteps, read_later, take
from canzona_compile.replica.construction import Construction, NotConstructible, ParamGroup, atoms_of
from canzona_compile.replica.raised import blamed, first_line
from canzona_compile.replica.snapshot import Contents, changed


class Dependent(Exception):
    """Parameters cannot be stepped by objects of their own; the message says why."""


class Unshown(Dependent):
    """The wrapped optimizer would not show some attributes, or what the step adds to groups. All else is right."""


class HidesValues(Exception):
    """Residents would do, but for what they do not show.

    Attributes:
        refusal: what to raise if it has to be shown.
    """

    def __init__(self, refusal: UnsupportedOptimizer) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def rehearse_objects(
    optimizer: Optimizer,
    refused: UnsupportedOptimizer,
    names: NamesByGroup = (),
    began: Sequence[ParamGroup] = (),
    counting: Container[str] = (),
    showing_all: bool = True,
) -> Rehearsal:
    """Rehearse an optimizer as residents. Every rank gets the same result, without communication.

    Args:
        optimizer: the optimizer.
        refused: why it cannot be captured or interpreted.
        names: those of its parameters by group, for errors.
        began: the hyperparameters of its groups when it was wrapped.
        counting: its attributes in which residents have counted since.
        showing_all: whether the wrapped optimizer has to show more than the options in its groups.

    Raises:
        HidesValues: residents would do, but for what the wrapped optimizer does not show.
        UnsupportedOptimizer: `refused`, with the reason why residents are no way out.
    """
    cast = scenarios([len(group["params"]) for group in optimizer.param_groups])
    names = names or default_names(optimizer)
    try:
        construction = Construction.of(optimizer, began, counting)
        found = [rehearse_one(optimizer, construction, scenario, names, showing_all) for scenario in cast]
        if at := coupled_at_real_sizes(optimizer, names, construction=construction):
            raise Dependent(f"the update of {at} depends on other parameters at their real sizes")
    except (NotConstructible, Dependent) as problem:
        hint = f"{refused.hint}; " if refused.hint else ""
        refusal = UnsupportedOptimizer(
            refused.problem, at=refused.at, hint=f"{hint}it cannot run as one object per matrix either: {problem}"
        )
        raise (HidesValues(refusal) if isinstance(problem, Unshown) else refusal) from refused
    if any(one.draws for one in found):
        warnings.warn(
            DrawsRandomNumbers(
                f"{plain_class(optimizer).__name__} draws random numbers. Each matrix has its own generators, "
                "seeded by its name: results do not depend on the number of ranks, but they do not have the bits of "
                "one device."
            ),
            stacklevel=2,
        )
    own = [one.recipe for one in found if one.recipe is not None]
    attributes, hyperparameters, numbers, shared = (
        frozenset().union(*sets)
        for sets in zip(*((r.attributes, r.hyperparameters, r.numbers, r.shared) for r in own), strict=True)
    )
    return replace(
        habits_of(found),
        recipe=Recipe(construction, attributes, hyperparameters, numbers, shared),
        resident=reason(plain_class(optimizer).__name__, attributes, drawing=any(one.draws for one in found)),
    )


def reason(kind: str, attributes: Iterable[str], drawing: bool) -> str:
    """Say why an optimizer runs as residents. Ranks compare it, so it must not depend on addresses."""
    keeps = [f"it keeps {some(f'self.{name}' for name in sorted(attributes))}"] if attributes else []
    does = " and ".join([*keeps, *(["it draws random numbers"] if drawing else [])])
    problem = f"{kind} gives different results when its parameters are stepped separately"
    return f"{problem}: {does}" if does else problem


def rehearse_one(
    optimizer: Optimizer, construction: Construction, scenario: Scenario, names: NamesByGroup, showing_all: bool
) -> Rehearsal:
    """Rehearse one scenario; if need be without a frozen parameter, missing gradients, or `foreach`.

    Raises:
        Unshown: the wrapped optimizer would not show some attributes, or what the step adds to groups.
        Dependent: the runs differ.
        NotConstructible: the constructor fails on small parameters, or keeps values of parameters.
    """
    moving: set[str] = set()

    def plainly(one: Scenario) -> RehearsedSteps:
        return by_one_object(optimizer, construction, one)

    def in_cells(one: Scenario, plain: RehearsedSteps) -> RehearsedSteps:
        return by_objects(optimizer, Recipe(construction, *kept_in(plain)), one, moving)

    found = compared(scenario.easier(takes_foreach(optimizer)), plainly, in_cells, difference)
    plain, cells, one = found.plain, found.cells, found.scenario
    if cells.error is not None and plain.error is None:
        raise Dependent(f"it fails for one parameter alone: {first_line(cells.error)}{blamed(cells.error)}")
    if found.places:
        raise Dependent(f"the update of {where(found.places, one, names)} depends on other parameters")
    recipe = Recipe(construction, *kept_in(plain), numbers=frozenset(moving))
    recipe = replace(recipe, shared=shared_in(found, recipe))
    again = by_objects(optimizer, recipe, one, moving, restored_at=one.steps // 2)
    if places := difference(plain, again):
        problem = f"{some(places)} differs" if again.error is None else first_line(again.error)
        raise Dependent(f"what it keeps cannot be saved and restored: {problem}")
    places = unseen(plain, again, one.params)
    if changes := [place for place in places if is_option(place, plain.first)]:
        raise Dependent(f"its step leaves values of the last parameter in {some(changes)}, where other code reads them")
    if places and showing_all:
        raise Unshown(f"its step leaves values of the last parameter in {some(places)}, where other code reads them")
    return replace(found.habits(scenario), counters=frozenset(), recipe=recipe)


def by_one_object(optimizer: Optimizer, construction: Construction, scenario: Scenario) -> RehearsedSteps:
    """Step one object of all parameters.

    Raises:
        Dependent: the constructor or the step changes something outside of the optimizer, fails, or returns a value.
    """
    drawing: list[Constructed] = []

    def steps(one: Scenario) -> RehearsedSteps:
        drawing.append(Constructed(construction, device_of(optimizer)))
        return take(optimizer, one, drawing[-1])

    found = read_later(steps, scenario)
    found.drew = drawing[0].muted.drew
    if found.outside:
        raise Dependent(f"it changes {some(found.outside)}, outside of the optimizer")
    if drawing[0].muted.from_its_own:
        raise Dependent("it draws from its own random generator, one parameter after the other")
    if found.error is not None and not found.after:
        raise Dependent(f"its step fails on small parameters: {first_line(found.error)}{blamed(found.error)}")
    if any(value is not None for value in found.returned):
        raise Dependent("its step returns a value")
    return found


def by_objects(
    optimizer: Optimizer, recipe: Recipe, scenario: Scenario, moving: set[str], restored_at: int | None = None
) -> RehearsedSteps:
    """Step one object per parameter, as owners do. An error of ours ends the trial as one of the optimizer does.

    Args:
        moving: gets the patterns of the paths at which objects have numbers that change.
        restored_at: the step before which every object is replaced by a new one that gets what it kept.
    """
    stepping = OwnObjects(recipe, device_of(optimizer), atoms_of(optimizer), restored_at)
    try:
        return take(optimizer, scenario, stepping)
    except (CanzonaError, NotConstructible) as error:
        return RehearsedSteps(error=error)
    finally:
        moving |= stepping.moving


def kept_in(plain: RehearsedSteps) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes and the hyperparameters that steps changed."""
    attributes: set[str] = set()
    before = plain.first
    for after in plain.after:
        attributes |= {attribute_of(place) for place in changed(before, after)} - {""}
        before = after
    counters = {counter.key for counter in plain.counters if counter.home == "group"}
    return frozenset(attributes), frozenset(counters)


def difference(plain: RehearsedSteps, cells: RehearsedSteps) -> list[str]:
    """The places of parameters at which two runs differ first; the end of the run if one ends before the other."""
    return first_difference(plain, cells, lambda one, other: changed(parameters_in(one), parameters_in(other)))


def parameters_in(found: Contents) -> Contents:
    """The values of parameters among what was found."""
    return {place: value for place, value in found.items() if place.startswith("parameter ")}


def shared_in(found: Compared, recipe: Recipe) -> frozenset[str]:
    """Find what the optimizer keeps once for all parameters and changes, such as a counter of steps.

    Args:
        found: all parameters together, and each by itself.
        recipe: what the optimizer keeps.

    Returns:
        The paths of such values, see `kept`. Every object has the same there.

    Raises:
        Dependent: objects do not have the same, as of the mean over all parameters. It changes no parameter, but users
            may read it, and nobody would compute it. Or it is not there before the first step, such as a log.
    """
    plain, cells = found.plain, found.cells
    for all_of_them, each in zip(plain.after, cells.after, strict=True):
        anywhere = {value for place, value in each.items() if place.startswith("object ") and is_value(value)}
        for place, value in all_of_them.items():
            kept = attribute_of(place) in recipe.attributes and value != plain.first.get(place)
            if kept and is_value(value) and value not in anywhere:
                raise Dependent(f"it changes {place}, which does not belong to any parameter")
    last = {place: v for place, v in plain.after[-1].items() if attribute_of(place) in recipe.attributes}
    held = held_in(cells.after[-1])
    objects = max(map(len, held.values()), default=0)
    for_all = once_for_all(plain.first, last, held, found.scenario.params)
    shared = set()
    for place, value in last.items():
        if not is_value(value) or value == plain.first.get(place):
            continue
        if place in for_all:
            if place not in plain.first and held.get(place) == [value] * objects and in_a_list(place):
                raise Dependent(f"it adds {place}, which does not belong to any parameter")
            if held.get(place) == [value] * objects:
                if place not in plain.first and not is_held(place, plain.first, last):
                    raise Dependent(f"its step creates the container that holds {place}")
                shared.add(path_of(place))
    return frozenset(shared)


def unseen(plain: RehearsedSteps, cells: RehearsedSteps, params: int) -> list[str]:
    """The places in groups and attributes where the wrapped optimizer shows other values. Caches do not count.

    Args:
        plain: all parameters together.
        cells: each by itself, beside the shadow of all.
        params: the number of parameters.
    """
    cached, before = caches(plain), plain.first

    def unlike(one: Contents, other: Contents) -> list[str]:
        for_all = once_for_all(before, one, held_in(other), params)
        places = [
            place
            for place in changed(one, other)
            if place.startswith("param_groups") or (place in for_all and attribute_of(place) not in cached)
        ]
        return [p for p in places if is_leaf(one.get(p, other.get(p))) and one.get(p) != before.get(p)]

    return first_difference(plain, cells, unlike)


def is_leaf(value: Any) -> bool:
    """Tell whether `contents` found a value, and not the length of a container or the name of a class."""
    return is_value(value) or (isinstance(value, tuple) and value[0] in ("bool", "str", "complex", "bytes", "NoneType"))


def is_value(value: Any) -> bool:
    """Tell whether `contents` found a number, or the bits of a tensor or an array."""
    return isinstance(value, tuple) and (isinstance(value[-1], bytes) or value[0] in ("int", "float"))
