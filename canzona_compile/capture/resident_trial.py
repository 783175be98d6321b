"""Trial runs of residents in miniature: one object of all parameters, as plain, and one object per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from canzona_compile.capture.cached_calls import CachedCalls
from canzona_compile.capture.construction import Construction, NotConstructible, atoms_of, reads_values
from canzona_compile.capture.contents import Contents, changed
from canzona_compile.capture.coupling import attribute_of
from canzona_compile.capture.miniature import Miniature
from canzona_compile.capture.outside import Outside
from canzona_compile.capture.parts import contiguous
from canzona_compile.capture.randomness import MutedDraws, seeded
from canzona_compile.capture.resident import Recipe, Resident
from canzona_compile.capture.resident_shadow import ResidentShadow
from canzona_compile.capture.trial import RehearsedSteps, Scenario, contents_of, read_later, run
from canzona_compile.capture.twin import marks_of, plain_step
from canzona_compile.capture.variant import ParameterSpec
from canzona_compile.errors import CanzonaError, some


class Dependent(Exception):
    """Parameters cannot be stepped by objects of their own; the message says why."""


@dataclass(slots=True)
class StepsTogether:
    """What a run of all parameters together showed.

    Attributes:
        steps: what it did.
        first: what the optimizer held before the first step.
        drew: whether it drew random numbers.
    """

    steps: RehearsedSteps
    first: Contents
    drew: bool


def together(
    optimizer: Optimizer, construction: Construction, scenario: Scenario, device: torch.device
) -> StepsTogether:
    """Step one object of all parameters.

    Raises:
        Dependent: the constructor or the step changes something outside of the optimizer, or communicates.
    """
    taken: list[StepsTogether] = []

    def take(one: Scenario) -> RehearsedSteps:
        taken.append(all_together(optimizer, construction, one, device))
        return taken[-1].steps

    read_later(take, scenario)
    return taken[0]


def all_together(
    optimizer: Optimizer, construction: Construction, scenario: Scenario, device: torch.device
) -> StepsTogether:
    """Take the steps of `together`."""
    small = Miniature(optimizer, scenario.chosen, loops=scenario.loops)
    outside = Outside(optimizer, small.label, small.kept, CachedCalls())
    muted = MutedDraws(device)
    try:
        with seeded(device), muted:
            if places := reads_values(construction, small.optimizer.param_groups):
                raise Dependent(f"its constructor keeps values of parameters in {some(places)}")
            small.optimizer = construction.copied().make(small.optimizer.param_groups)
        first = contents_of(small)

        def step() -> Any:
            muted.moment += 1
            with seeded(device), muted, torch.no_grad():
                return plain_step(type(small.optimizer))(small.optimizer)

        found = run(small, scenario, step)
        if places := changed(outside.contents, Outside(optimizer, small.label, small.kept).contents):
            raise Dependent(f"it changes {some(places)}, outside of the optimizer")
        if muted.from_its_own:
            raise Dependent("it draws from a random generator of its own, for one parameter after the other")
    finally:
        outside.restore()
    return StepsTogether(found, first, muted.drew)


def apart(
    optimizer: Optimizer,
    recipe: Recipe,
    scenario: Scenario,
    device: torch.device,
    moving: set[str],
    restored_at: int | None = None,
) -> RehearsedSteps:
    """Step one object per parameter, as owners do.

    Args:
        moving: gets the patterns of the paths at which objects have numbers that change.
        restored_at: the step before which every object is replaced by one that is made anew and gets what it kept.

    Returns:
        What they did. All that they hold is found under the place of the parameter. The optimizer's own groups and
        attributes hold what a wrapped one shows there.
    """
    small = Miniature(optimizer, scenario.chosen, loops=scenario.loops)
    outside = Outside(optimizer, small.label, small.kept, CachedCalls())
    muted = MutedDraws(device)
    own = replace(recipe, construction=recipe.construction.copied())
    shadow = ResidentShadow(small.optimizer, own, ()) if recipe.is_shown else None
    objects: dict[int, Resident] = {}
    held: list[Contents] = []
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
            if shadow is not None:
                shadow.count()

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
        held.append({})  # noted at once, because the next step may fail halfway
        for i, resident in objects.items():
            held[-1].update(held_by(resident, i))
            moving.update(resident.moving_numbers())

    try:
        found = run_caught(small, scenario, step)
    finally:
        outside.restore()
    for after, noted in zip(found.after, held, strict=False):
        after.update(noted)
    return found


def run_caught(small: Miniature, scenario: Scenario, step: Callable[[], Any]) -> RehearsedSteps:
    """Run a scenario; an error of ours ends it as one of the optimizer does."""
    found = RehearsedSteps()
    try:
        return run(small, scenario, step)
    except (CanzonaError, NotConstructible) as error:
        found.error = error
        return found


def held_by(resident: Resident, index: int) -> Contents:
    """What the attributes of a resident's object hold, by place; the places begin with the object's own."""
    small = Shown(resident)
    return {f"object {index}: {place}": value for place, value in contents_of(small).items()}  # type: ignore[arg-type]


class Shown:
    """A resident, as `contents_of` takes a miniature."""

    def __init__(self, resident: Resident) -> None:
        self.optimizer, self.params = resident.optimizer, [resident.param]

    def label(self, value: Any) -> str | None:
        """Name the parameter, and the optimizer."""
        return "parameter" if value is self.params[0] else "the optimizer" if value is self.optimizer else None


def kept_in(whole: StepsTogether) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes and the hyperparameters that steps changed."""
    attributes: set[str] = set()
    before = whole.first
    for after in whole.steps.after:
        attributes |= {attribute_of(place) for place in changed(before, after)} - {""}
        before = after
    counters = {counter.key for counter in whole.steps.counters if counter.home == "group"}
    return frozenset(attributes), frozenset(counters)


def is_value(value: Any) -> bool:
    """Tell whether `contents` found a number, or the bits of a tensor or an array."""
    return isinstance(value, tuple) and (isinstance(value[-1], bytes) or value[0] in ("int", "float"))
