"""The optimizer objects of a plan's resident tasks on this rank: made, loaded, and put where state is looked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canzona_compile.capture.construction import NotConstructible, atoms_of
from canzona_compile.capture.contents import ATOMS, Contents, Walk
from canzona_compile.capture.resident import RESIDENT, Recipe, Resident, is_portable
from canzona_compile.capture.resident_shadow import ResidentShadow
from canzona_compile.capture.templates import Capture
from canzona_compile.capture.twin import marks_of, plain_class
from canzona_compile.capture.variant import ParameterSpec
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.step import Task
from canzona_compile.session.bound import BoundParam
from canzona_compile.session.plan import Plan
from canzona_compile.session.state import StateStore


class ResidentTasks:
    """The resident tasks of a plan.

    The owner of a task holds its object in `optimizer.state`, where portable state takes its place when the plan ends.

    Args:
        capture: the captured code of the wrapped optimizer, which never steps. Users change its hyperparameters.
        plan: the plan.
        store: the tensors of the plan's tasks.
    """

    def __init__(self, capture: Capture, plan: Plan, store: StateStore) -> None:
        self.optimizer, self.began, self.plan, self.store = capture.optimizer, capture.residency.began, plan, store
        self._objects: dict[str, Resident] = {}
        self._shadow: ResidentShadow | None = None

    def begin(self, needs_gradients: bool) -> None:
        """Make the objects of the tasks that this rank computes, and load the state that is there.

        Args:
            needs_gradients: whether the optimizer counts steps of parameters that have no gradient.

        Raises:
            CanzonaError: state does not fit, or a parameter came later than others.
        """
        tasks = list(self._tasks())
        begun = [task.name for task, _ in tasks if task.name in self.store.initialised]
        late = [task.name for task, _ in tasks if task.name not in self.store.initialised]
        if needs_gradients and begun and late:
            raise CanzonaError(
                f"{plain_class(self.optimizer).__name__} counts steps for all parameters together, and this one came "
                "after others had stepped: its own optimizer object would begin at zero",
                at=late[0],
                hint="give all parameters to the optimizer before its first step",
            )
        for task, bound in tasks:
            if self.store.owns(task):
                self._objects[task.name] = self._begun(task, bound)
        recipe = tasks[0][1].kind.recipe if tasks else None
        if recipe is not None and recipe.is_shown:
            self._shadow = self._shadow_of(recipe)

    def _shadow_of(self, recipe: Recipe) -> ResidentShadow:
        try:
            return ResidentShadow(self.optimizer, self._renewed(recipe), self.began)
        except NotConstructible as error:
            raise CanzonaError(f"it cannot be constructed for tiny parameters: {error}") from error

    def _renewed(self, recipe: Recipe) -> Recipe:
        """A recipe with the arguments that the optimizer has now."""
        return replace(recipe, construction=recipe.construction.renewed(self.optimizer))

    def count(self) -> None:
        """Show on the real optimizer what this step counted for all parameters together."""
        if self._shadow is not None:
            self._shadow.count()

    def _tasks(self) -> Iterator[tuple[Task, BoundParam]]:
        for task in self.plan.owned.tasks:
            bound = self.plan.bound[task.name]
            if bound.kind.recipe is not None:
                yield task, bound

    def _begun(self, task: Task, bound: BoundParam) -> Resident:
        made = self._made(task, bound)
        state: dict[str, Any] = self.optimizer.state.get(bound.param) or {}
        if is_portable(state):
            made.load(state)
            self.optimizer.state[bound.param] = {RESIDENT: made}
        elif state and not same_state(state, made.optimizer.state.get(made.param) or {}):
            raise CanzonaError(
                "its state is that of a plain optimizer which has stepped; an optimizer object of its own cannot "
                "take that over",
                at=task.name,
                hint="wrap before the first step, and load checkpoints that the wrapped optimizer saved",
            )
        return made

    def _made(self, task: Task, bound: BoundParam) -> Resident:
        assert bound.kind.recipe is not None
        param, g = bound.param, bound.param_group
        recipe = self._renewed(bound.kind.recipe)
        began = self.began[g] if g < len(self.began) else None
        marks = tuple(sorted(marks_of(bound.origin).items()))
        spec = ParameterSpec(task.shape, param.dtype, bound.kind.grad_dtype, param.device, marks)
        try:
            return Resident(recipe, task.name, spec, self.optimizer.param_groups[g], began)
        except NotConstructible as error:
            raise CanzonaError(f"its optimizer object cannot be made: {error}", at=task.name) from error

    def step(self, task: str, param: Tensor, grad: Tensor) -> Tensor:
        """Take the step of a task that this rank computes; return the new parameter."""
        bound = self.plan.bound[task]
        state = self.optimizer.state[bound.param]
        own = self._objects[task]
        if state.get(RESIDENT) is not own:
            if own.stepped:  # the user cleared the state
                own = self._objects[task] = self._made(self.plan.owned.task(task), bound)
            self.optimizer.state[bound.param] = {RESIDENT: own}
        own.follow(self.optimizer.param_groups[bound.param_group], atoms_of(self.optimizer))
        return own.step(param, grad)


def same_state(state: dict[str, Any], made: dict[str, Any]) -> bool:
    """Tell whether the state that a constructor made for a parameter is still as it was made."""
    one, two = (pytree.tree_flatten(dict(s)) for s in (state, made))
    return one[1] == two[1] and all(same_value(a, b) for a, b in zip(one[0], two[0], strict=True))


def same_value(one: Any, other: Any) -> bool:
    """Compare two leaves of states; those that this rank does not hold are equal to all."""
    if one is None:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, int | float | str | bool):
        return type(one) is type(other) and one == other
    return type(one) is type(other) and inside(one) == inside(other)


def inside(value: Any) -> Contents:
    """What an object in a state holds, without values: tensors may be views, and others tell places in the group."""

    def label(held: Any) -> str | None:
        if isinstance(held, Tensor):
            return f"{list(held.shape)} of {held.dtype}"
        return type(held).__name__ if isinstance(held, ATOMS) else None

    walk = Walk(label)
    walk.add("value", value)
    return walk.found
