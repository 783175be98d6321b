"""Rehearse residents: one object of all parameters beside one object per parameter, and those saved and put back.

What an optimizer keeps on itself, and what it draws, makes the ordinary rehearsal refuse it. Whether its parameters
are independent shows here. The runs draw equal numbers, so that those of optimizers that draw can be compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from canzona_compile.capture.asked import ADDRESS
from canzona_compile.capture.construction import Construction, NotConstructible, ParamGroup, beginnings
from canzona_compile.capture.contents import Contents, changed
from canzona_compile.capture.coupling import NamesByGroup, attribute_of, caches, where
from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.held_optimizers import advice
from canzona_compile.capture.joint_rehearsal import rehearse_jointly
from canzona_compile.capture.place_names import held_in, in_a_list, is_held, is_option, once_for_all, path_of
from canzona_compile.capture.real_sizes import coupled_at_real_sizes
from canzona_compile.capture.rehearsal import (
    Rehearsal,
    all_of,
    default_names,
    habits_of,
    rehearse,
    scenarios,
    takes_foreach,
)
from canzona_compile.capture.resident import Recipe
from canzona_compile.capture.resident_trial import Dependent, StepsTogether, apart, is_value, kept_in, together
from canzona_compile.capture.trial import RehearsedSteps, Scenario
from canzona_compile.capture.twin import plain_class
from canzona_compile.errors import DrawsRandomNumbers, UnsupportedOptimizer, some


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


class Residency:
    """Decides which parameters of an optimizer are resident: where it would be refused, and residents are a way out.

    Args:
        optimizer: the optimizer, not yet stepped.

    Attributes:
        began: the hyperparameters of its groups, as its constructor saw them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.began = optimizer, beginnings(optimizer)
        self._drawing: dict[Any, Rehearsal] = {}
        self._counting: set[str] = set()  # the attributes of the optimizer that show what residents count

    def rehearse(self, names: NamesByGroup = ()) -> Rehearsal:
        """Rehearse the optimizer; where it is refused, rehearse it as residents, and then all parameters at once.

        Args:
            names: those of its parameters by group, for errors.

        Raises:
            UnsupportedOptimizer: it is refused, and neither is a way out.
        """
        try:
            return rehearse(self.optimizer, names)
        except UnsupportedOptimizer as refused:
            hides = False
            try:
                return self._rehearse_residents(refused, names)
            except HidesValues as unseen:
                twice, hides = unseen.refusal, True
            except UnsupportedOptimizer as problem:
                twice = problem
            try:
                return rehearse_jointly(self.optimizer, twice, names, refused.hint or "")
            except UnsupportedOptimizer as last:
                if hides:  # no option that users have set
                    return self._rehearse_residents(refused, names, showing_all=False)
                raise advised(self.optimizer, last) from refused

    def of(self, manner: Any, known: Iterable[Rehearsal]) -> Rehearsal | None:
        """Find the rehearsal by which parameters are resident, or step all at once; None if they do neither.

        Args:
            manner: the key of what these parameters have in common.
            known: the rehearsals of the whole optimizer.
        """
        shown = (rehearsal for rehearsal in known if rehearsal.resident or rehearsal.joint is not None)
        return next(shown, None) or self._drawing.get(manner)

    def check_rehearsed(self, manner: Any, name: str, rehearsal: Rehearsal) -> Rehearsal | None:
        """Raise unless a rehearsal has shown that parameters are independent, which no graph shows.

        Args:
            manner: the key of what these parameters have in common.
            name: the name of one of them, for the error.
            rehearsal: that of the whole optimizer.

        Returns:
            The rehearsal of residents if that is what shows it; None otherwise.

        Raises:
            UnsupportedOptimizer: nothing shows it.
        """
        if rehearsal.resident or not rehearsal.draws:
            return rehearsal if rehearsal.resident else None
        refused = UnsupportedOptimizer(
            f"{plain_class(self.optimizer).__name__} draws random numbers in what cannot be traced, so that nothing "
            "shows whether its parameters depend on one another",
            at=name,
            hint="use a variant of it that draws none",
        )
        self._drawing[manner] = found = self._rehearse_residents(refused, (), showing_all=False)
        return found

    def _rehearse_residents(
        self, refused: UnsupportedOptimizer, names: NamesByGroup, showing_all: bool = True
    ) -> Rehearsal:
        found = rehearse_residents(self.optimizer, refused, names, self.began, self._counting, showing_all)
        if found.recipe is not None:
            self._counting |= {path.split("/")[1] for path in found.recipe.shared}
        return found

    def with_habits(self, rehearsal: Rehearsal) -> Rehearsal:
        """Add to the habits of a whole optimizer those that its resident parameters show."""
        for own in self._drawing.values():
            rehearsal = replace(
                rehearsal,
                writes_gradients=rehearsal.writes_gradients or own.writes_gradients,
                aliases=all_of((rehearsal.aliases, own.aliases)),
                needs_gradients=rehearsal.needs_gradients or own.needs_gradients,
                asks_frozen=rehearsal.asks_frozen or own.asks_frozen,
                asks_layout=rehearsal.asks_layout | own.asks_layout,
            )
        return rehearsal


def advised(optimizer: Optimizer, refused: UnsupportedOptimizer) -> UnsupportedOptimizer:
    """Add the remedy to a refusal if the optimizer holds another one, whose steps it may take."""
    hint = advice(optimizer)
    if not hint:
        return refused
    return UnsupportedOptimizer(refused.problem, at=refused.at, hint=f"{hint}; {refused.hint or ''}".rstrip("; "))


def rehearse_residents(
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
    counts = [len(group["params"]) for group in optimizer.param_groups]
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    try:
        construction = Construction.of(optimizer, began, counting)
        found = [
            rehearse_one(optimizer, construction, scenario, device, names or default_names(optimizer), showing_all)
            for scenario in scenarios(counts)
        ]
        if at := coupled_at_real_sizes(optimizer, names or default_names(optimizer), construction=construction):
            raise Dependent(f"the update of {at} depends on other parameters, of the sizes that they have")
    except (NotConstructible, Dependent) as problem:
        hint = f"{refused.hint}; " if refused.hint else ""
        refusal = UnsupportedOptimizer(
            refused.problem, at=refused.at, hint=f"{hint}it cannot run as one object per matrix either: {problem}"
        )
        raise (HidesValues(refusal) if isinstance(problem, Unshown) else refusal) from refused
    if any(one.draws for one in found):
        warnings.warn(
            DrawsRandomNumbers(
                f"{plain_class(optimizer).__name__} draws random numbers. Every matrix has generators of its own, "
                "which its name seeds, so that the number of ranks does not matter; the bits are not those of one "
                "device."
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
    return f"{kind} steps otherwise on copies" if not does else f"{kind} steps otherwise on copies: {does}"


def rehearse_one(
    optimizer: Optimizer,
    construction: Construction,
    scenario: Scenario,
    device: torch.device,
    names: NamesByGroup,
    showing_all: bool,
) -> Rehearsal:
    """Rehearse one scenario; if need be without a frozen parameter, missing gradients, or `foreach`.

    Raises:
        Unshown: the wrapped optimizer would not show some attributes, or what the step adds to groups.
        Dependent: the runs differ.
        NotConstructible: the constructor fails on small parameters, or keeps values of parameters.
    """
    thawed = replace(scenario, frozen=None)
    variants = [scenario, thawed, replace(scenario, missing={}), replace(thawed, missing={})]
    if takes_foreach(optimizer):
        variants += [replace(variant, loops=True) for variant in variants]
    for one in variants:
        whole = together(optimizer, construction, one, device)
        if whole.steps.error is not None and not whole.steps.after:
            error = whole.steps.error
            raise Dependent(f"its step fails on small parameters: {first_line(error)}{blamed(error)}")
        if any(value is not None for value in whole.steps.returned):
            raise Dependent("its step returns a value")
        moving: set[str] = set()
        recipe = Recipe(construction, *kept_in(whole))
        parts = apart(optimizer, recipe, one, device, moving)
        if difference(whole.steps, parts):
            continue
        recipe = replace(recipe, numbers=frozenset(moving))
        shared = shared_in(whole, parts, recipe, sum(map(len, one.chosen)))
        recipe = replace(recipe, shared=shared)
        again = apart(optimizer, recipe, one, device, moving, restored_at=one.steps // 2)
        if places := difference(whole.steps, again):
            problem = f"{some(places)} differs" if again.error is None else first_line(again.error)
            raise Dependent(f"what it keeps cannot be saved and put back: {problem}")
        places = unseen(whole, again, sum(map(len, one.chosen)))
        if changes := [place for place in places if is_option(place, whole.first)]:
            raise Dependent(f"its step leaves values of the last parameter at {some(changes)}, for all to see")
        if places and showing_all:
            raise Unshown(f"its step leaves values of the last parameter at {some(places)}, for all to see")
        return Rehearsal(
            writes_gradients=whole.steps.writes_gradients,
            aliases=tuple(whole.steps.aliases),
            needs_gradients=one.missing != scenario.missing,
            asks_frozen=one.frozen != scenario.frozen,
            asks_layout=frozenset(whole.steps.asks_layout) - {ADDRESS},
            rounds_in_foreach=one.loops,
            draws=whole.drew,
            recipe=recipe,
        )
    if parts.error is not None and whole.steps.error is None:
        raise Dependent(f"it fails for one parameter alone: {first_line(parts.error)}{blamed(parts.error)}")
    places = difference(whole.steps, parts)
    raise Dependent(f"the update of {where(places, one, names)} depends on other parameters")


def difference(whole: RehearsedSteps, parts: RehearsedSteps) -> list[str]:
    """The places of parameters at which two runs differ first; the end of the run if one ends before the other."""
    for one, other in zip(whole.after, parts.after, strict=False):
        if places := changed(parameters_in(one), parameters_in(other)):
            return places
    if len(whole.after) != len(parts.after) or type(whole.error) is not type(parts.error):
        return ["the end of the run"]
    return []


def parameters_in(found: Contents) -> Contents:
    """The values of parameters among what was found."""
    return {place: value for place, value in found.items() if place.startswith("parameter ")}


def shared_in(whole: StepsTogether, parts: RehearsedSteps, recipe: Recipe, params: int) -> frozenset[str]:
    """Find what the optimizer keeps once for all parameters and changes, such as a counter of steps.

    Args:
        whole: all parameters together.
        parts: each by itself.
        recipe: what the optimizer keeps.
        params: the number of parameters.

    Returns:
        The paths of such values, see `kept`. Every object has the same there.

    Raises:
        Dependent: objects do not have the same, as of the mean over all parameters. It changes no parameter, but users
            may read it, and nobody would compute it. Or it is not there before the first step, such as a log.
    """
    for all_of_them, each in zip(whole.steps.after, parts.after, strict=True):
        anywhere = {value for place, value in each.items() if place.startswith("object ") and is_value(value)}
        for place, value in all_of_them.items():
            kept = attribute_of(place) in recipe.attributes and value != whole.first.get(place)
            if kept and is_value(value) and value not in anywhere:
                raise Dependent(f"it changes {place}, which belongs to no parameter")
    last = {place: v for place, v in whole.steps.after[-1].items() if attribute_of(place) in recipe.attributes}
    held = held_in(parts.after[-1])
    objects = max(map(len, held.values()), default=0)
    for_all = once_for_all(whole.first, last, held, params)
    found = set()
    for place, value in last.items():
        if not is_value(value) or value == whole.first.get(place):
            continue
        if place in for_all:
            if place not in whole.first and held.get(place) == [value] * objects and in_a_list(place):
                raise Dependent(f"it adds {place}, which belongs to no parameter")
            if held.get(place) == [value] * objects:
                if place not in whole.first and not is_held(place, whole.first, last):
                    raise Dependent(f"it makes what holds {place} in its step")
                found.add(path_of(place))
    return frozenset(found)


def unseen(whole: StepsTogether, parts: RehearsedSteps, params: int) -> list[str]:
    """The places in groups and attributes where the wrapped optimizer shows other values. Caches do not count.

    Args:
        whole: all parameters together.
        parts: each by itself, beside the shadow of all.
        params: the number of parameters.
    """
    cached, before = caches(whole.steps), whole.first
    for one, other in zip(whole.steps.after, parts.after, strict=False):
        for_all = once_for_all(before, one, held_in(other), params)
        places = [
            place
            for place in changed(one, other)
            if place.startswith("param_groups") or (place in for_all and attribute_of(place) not in cached)
        ]
        if places := [p for p in places if is_leaf(one.get(p, other.get(p))) and one.get(p) != before.get(p)]:
            return places
    return []


def is_leaf(value: Any) -> bool:
    """Tell whether `contents` found a value, and not the length of a container or the name of a class."""
    return is_value(value) or (isinstance(value, tuple) and value[0] in ("bool", "str", "complex", "bytes", "NoneType"))
