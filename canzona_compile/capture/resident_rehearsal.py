"""Rehearse residents: one object of all parameters beside one object per parameter, and those saved and put back.

What an optimizer keeps on itself, and what it draws, makes the ordinary rehearsal refuse it. Whether its parameters
are independent shows here. The runs draw equal numbers, so that those of optimizers that draw can be compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.construction import (
    Construction,
    Group,
    NotConstructible,
    atoms_of,
    beginnings,
    reads_values,
)
from canzona_compile.capture.contents import Contents, changed
from canzona_compile.capture.coupling import NamesByGroup, attribute_of, where
from canzona_compile.capture.dynamo_oracle import ParameterSpec
from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.miniature import Miniature
from canzona_compile.capture.outside import Outside
from canzona_compile.capture.randomness import MutedDraws, seeded
from canzona_compile.capture.rehearsal import Rehearsal, default_names, rehearse, scenarios, takes_foreach
from canzona_compile.capture.resident import Recipe, Resident
from canzona_compile.capture.trial import RehearsedSteps, Scenario, contents_of, run
from canzona_compile.capture.twin import marks_of, plain_class, step_plainly
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer, some


class Dependent(Exception):
    """Parameters cannot be stepped by objects of their own; the message says why."""


@dataclass(slots=True)
class Found:
    """What a run of all parameters together showed.

    Attributes:
        steps: what it did.
        first: what the optimizer held before the first step.
        drew: whether it drew random numbers.
    """

    steps: RehearsedSteps
    first: Contents
    drew: bool


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

    def rehearse(self, names: NamesByGroup = ()) -> Rehearsal:
        """Rehearse the optimizer; where it is refused, rehearse it as residents.

        Args:
            names: those of its parameters by group, for errors.

        Raises:
            UnsupportedOptimizer: it is refused, and residents are no way out.
        """
        try:
            return rehearse(self.optimizer, names)
        except UnsupportedOptimizer as refused:
            return rehearse_residents(self.optimizer, refused, names, self.began)

    def of(self, manner: Any, known: Iterable[Rehearsal]) -> Rehearsal | None:
        """Find the rehearsal by which parameters are resident; None if they are not, as far as is known.

        Args:
            manner: the key of what these parameters have in common.
            known: the rehearsals of the whole optimizer.
        """
        return next((rehearsal for rehearsal in known if rehearsal.resident), None) or self._drawing.get(manner)

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
        self._drawing[manner] = found = rehearse_residents(self.optimizer, refused, (), self.began)
        return found

    def with_habits(self, rehearsal: Rehearsal) -> Rehearsal:
        """Add to the habits of a whole optimizer those that its resident parameters show."""
        for own in self._drawing.values():
            rehearsal = replace(
                rehearsal,
                writes_gradients=rehearsal.writes_gradients or own.writes_gradients,
                needs_gradients=rehearsal.needs_gradients or own.needs_gradients,
                asks_frozen=rehearsal.asks_frozen or own.asks_frozen,
            )
        return rehearsal


def rehearse_residents(
    optimizer: Optimizer, refused: UnsupportedOptimizer, names: NamesByGroup = (), began: Sequence[Group] = ()
) -> Rehearsal:
    """Rehearse an optimizer as residents. Every rank gets the same result, without communication.

    Args:
        optimizer: the optimizer.
        refused: why it cannot be captured or interpreted.
        names: those of its parameters by group, for errors.
        began: the hyperparameters of its groups when it was wrapped.

    Raises:
        UnsupportedOptimizer: `refused`, with the reason why residents are no way out.
    """
    numbers = [len(group["params"]) for group in optimizer.param_groups]
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    try:
        construction = Construction.of(optimizer, began)
        found = [
            rehearse_one(optimizer, construction, scenario, device, names or default_names(optimizer))
            for scenario in scenarios(numbers)
        ]
    except (NotConstructible, Dependent) as problem:
        hint = f"{refused.hint}; " if refused.hint else ""
        raise UnsupportedOptimizer(
            refused.problem, at=refused.at, hint=f"{hint}it cannot run as one object per matrix either: {problem}"
        ) from refused
    if any(one.draws for one in found):
        warnings.warn(
            f"{plain_class(optimizer).__name__} draws random numbers. Every matrix has generators of its own, which "
            "its name seeds, so that the number of ranks does not matter; the bits are not those of one device.",
            stacklevel=2,
        )
    own = [one.recipe for one in found if one.recipe is not None]
    keeps = [frozenset().union(*sets) for sets in ((r.attributes for r in own), (r.hyperparameters for r in own))]
    return Rehearsal(
        writes_gradients=any(one.writes_gradients for one in found),
        needs_gradients=any(one.needs_gradients for one in found),
        asks_frozen=any(one.asks_frozen for one in found),
        rounds_in_foreach=any(one.rounds_in_foreach for one in found),
        draws=any(one.draws for one in found),
        recipe=Recipe(construction, *keeps),
        resident=refused.problem,
    )


def rehearse_one(
    optimizer: Optimizer, construction: Construction, scenario: Scenario, device: torch.device, names: NamesByGroup
) -> Rehearsal:
    """Rehearse one scenario; if need be without a frozen parameter, missing gradients, or `foreach`.

    Raises:
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
        recipe = Recipe(construction, *kept_in(whole))
        parts = apart(optimizer, recipe, one, device)
        if difference(whole.steps, parts):
            continue
        check_shared(whole.steps, parts, recipe)
        again = apart(optimizer, recipe, one, device, restored_at=one.steps // 2)
        if places := difference(whole.steps, again):
            problem = again.error if isinstance(again.error, CanzonaError) else f"{some(places)} differs"
            raise Dependent(f"what it keeps cannot be saved and put back: {problem}")
        return Rehearsal(
            writes_gradients=whole.steps.writes_gradients,
            needs_gradients=one.missing != scenario.missing,
            asks_frozen=one.frozen != scenario.frozen,
            rounds_in_foreach=one.loops,
            draws=whole.drew,
            recipe=recipe,
        )
    if parts.error is not None and whole.steps.error is None:
        raise Dependent(f"it fails for one parameter alone: {first_line(parts.error)}{blamed(parts.error)}")
    places = difference(whole.steps, parts)
    raise Dependent(f"the update of {where(places, one, names)} depends on other parameters")


def together(optimizer: Optimizer, construction: Construction, scenario: Scenario, device: torch.device) -> Found:
    """Step one object of all parameters.

    Raises:
        Dependent: the constructor or the step changes something outside of the optimizer, or communicates.
    """
    small = Miniature(optimizer, scenario.chosen, loops=scenario.loops)
    outside = Outside(optimizer, small.label)
    muted = MutedDraws(device)
    try:
        with seeded(device), muted:
            if places := reads_values(construction, small.optimizer.param_groups):
                raise Dependent(f"its constructor keeps values of parameters in {some(places)}")
            small.optimizer = construction.copied().make(small.optimizer.param_groups)
        first = contents_of(small)

        def step() -> None:
            muted.moment += 1
            with seeded(device), muted:
                step_plainly(small.optimizer)

        found = run(small, scenario, step)
        if places := changed(outside.contents, Outside(optimizer, small.label).contents):
            raise Dependent(f"it changes {some(places)}, outside of the optimizer")
        if muted.communicated:
            raise Dependent(f"it communicates by itself, by {muted.communicated}")
    finally:
        outside.restore()
    return Found(found, first, muted.drew)


def apart(
    optimizer: Optimizer, recipe: Recipe, scenario: Scenario, device: torch.device, restored_at: int | None = None
) -> RehearsedSteps:
    """Step one object per parameter, as owners do.

    Args:
        restored_at: the step before which every object is replaced by one that is made anew and gets what it kept.

    Returns:
        What they did. All that they hold is found under the place of the parameter.
    """
    small = Miniature(optimizer, scenario.chosen, loops=scenario.loops)
    outside = Outside(optimizer, small.label)
    muted = MutedDraws(device)
    own = Recipe(recipe.construction.copied(), recipe.attributes, recipe.hyperparameters)
    objects: dict[int, Resident] = {}
    held: Contents = {}
    atoms = atoms_of(optimizer)

    def made(i: int) -> Resident:
        param = small.params[i]
        grad_dtype = param.dtype if param.grad is None else param.grad.dtype
        spec = ParameterSpec(tuple(param.shape), param.dtype, grad_dtype, param.device, tuple(marks_of(param).items()))
        return Resident(own, f"parameter {i}", spec, group_of(i))

    def group_of(i: int) -> Mapping[str, Any]:
        return small.optimizer.param_groups[small.group_of[i]]

    def step() -> None:
        muted.moment += 1
        with seeded(device), muted:
            step_objects()

    def step_objects() -> None:
        if muted.moment - 1 == restored_at:
            for i, old in objects.items():
                objects[i] = made(i)
                objects[i].load(old.state())
        for i in reversed(range(len(small.params))):  # backwards, so that what one step leaves to the next shows
            grad = small.params[i].grad
            if grad is None:
                continue
            if i not in objects:
                objects[i] = made(i)
            objects[i].follow(group_of(i), atoms)
            small.params[i].data.copy_(objects[i].step(small.params[i].detach(), contiguous(grad)))
        held.clear()  # noted after every step, because the next one may fail halfway
        for i, resident in objects.items():
            held.update(held_by(resident, i))

    try:
        found = run_caught(small, scenario, step)
    finally:
        outside.restore()
    if found.after:
        found.after[-1] |= held
    return found


def run_caught(small: Miniature, scenario: Scenario, step: Any) -> RehearsedSteps:
    """Run a scenario; an error of ours ends it as one of the optimizer does."""
    found = RehearsedSteps()
    try:
        return run(small, scenario, step)
    except (CanzonaError, NotConstructible) as error:
        found.error = error
        return found


def contiguous(tensor: Tensor) -> Tensor:
    """Copy a tensor to contiguous memory, as gathering it does."""
    return tensor.clone(memory_format=torch.contiguous_format)


def held_by(resident: Resident, index: int) -> Contents:
    """What the attributes of a resident's object hold, by place; the places begin with the object's own."""
    small = Shown(resident)
    return {f"object {index}: {place}": value for place, value in contents_of(small).items()}  # type: ignore[arg-type]


class Shown:
    """A resident, as `contents_of` takes a miniature."""

    def __init__(self, resident: Resident) -> None:
        self.optimizer, self.params = resident.optimizer, [resident.param]

    def label(self, value: Any) -> str | None:
        """Name the parameter."""
        return "parameter" if value is self.params[0] else None


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


def kept_in(whole: Found) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes and the hyperparameters that steps changed."""
    attributes: set[str] = set()
    before = whole.first
    for after in whole.steps.after:
        attributes |= {attribute_of(place) for place in changed(before, after)} - {""}
        before = after
    counters = {counter.key for counter in whole.steps.counters if counter.home == "group"}
    return frozenset(attributes), frozenset(counters)


def check_shared(whole: RehearsedSteps, parts: RehearsedSteps, recipe: Recipe) -> None:
    """Raise if the optimizer keeps something that none of the objects keeps, such as the mean over all parameters.

    It changes no parameter, but users may read it, and nobody would compute it.

    Raises:
        Dependent: there is such a thing.
    """
    last = {place: v for place, v in whole.after[-1].items() if attribute_of(place) in recipe.attributes}
    own = set(values_in(parts.after[-1]))
    for place, value in last.items():
        if is_value(value) and value not in own:
            raise Dependent(f"it changes {place}, which belongs to no parameter")


def values_in(found: Contents) -> Iterator[Any]:
    """The numbers and the bits of tensors that objects hold."""
    for place, value in found.items():
        if place.startswith("object ") and is_value(value):
            yield value


def is_value(value: Any) -> bool:
    """Tell whether `contents` found a number, or the bits of a tensor."""
    if not isinstance(value, tuple):
        return False
    return (len(value) == 4 and isinstance(value[3], bytes)) or value[0] in ("int", "float")
