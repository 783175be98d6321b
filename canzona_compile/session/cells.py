"""The cells of a plan: what this rank steps by the optimizer's own code, for matrices or for the whole model.

A matrix steps on a twin of the optimizer that sees it alone, or by an optimizer object of its own, which its owner
holds in `optimizer.state`, where portable state takes its place when the plan ends. Where parameters depend on one
another, one rank steps whole copies of all of them between two programs: the first brings them, the second takes the
new ones back.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canzona_compile.capture.templates import Capture
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.eager.cell import carried, check_no_fragments, step_all, step_alone, whole_copy
from canzona_compile.eager.nodes import Part
from canzona_compile.eager.own_object import OWN_OBJECT, OwnObject, Recipe, is_portable
from canzona_compile.eager.publish import ObjectShadow, show
from canzona_compile.errors import CanzonaError, DrawsRandomNumbers, OneRankSteps, UnsupportedOptimizer
from canzona_compile.ir.step import Task
from canzona_compile.replica.construction import NotConstructible, atoms_of
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.randomness import watched
from canzona_compile.replica.snapshot import ATOMS, Contents, Snapshot
from canzona_compile.replica.twin import plain_attributes
from canzona_compile.runtime.send_values import send_values
from canzona_compile.session.bound import BoundParam
from canzona_compile.session.program_cache import ProgramKey
from canzona_compile.session.state import StateStore
from canzona_compile.session.variant_selection import Names


class Cells:
    """Steps the tasks of one plan that are not compiled, and first steps. Implements `program_ops.EagerContext`.

    Args:
        capture: the captured code of the wrapped optimizer, which never steps. Users change its hyperparameters.
        store: the tensors of the plan's tasks.
    """

    def __init__(self, capture: Capture, store: StateStore) -> None:
        self.optimizer, self.began, self.plan, self.store = capture.optimizer, capture.ways.began, store.plan, store
        self._kind = plain_class(self.optimizer).__name__
        self._objects: dict[str, OwnObject] = {}
        self._shadow: ObjectShadow | None = None
        self._brought: dict[str, Tensor] = {}
        self._warned = False

    def step(self, task: str, param: Tensor, grad: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Take the step of a task that this rank computes, see `program_ops.EagerContext`."""
        bound = self.plan.bound[task]
        if bound.kind.recipe is not None:
            return self._step_object(task, param, grad), {}
        own = whole_copy(param, grad, plain_attributes(bound.origin), memory=torch.preserve_format)
        state = self.store.eager_state(task)
        with watched(param.device) as dice:
            new = step_alone(self.optimizer, self.optimizer.param_groups[bound.param_group], own, state)
        if dice.drew_random:
            self._check_draws(task)
        return new, state

    def _check_draws(self, task: str) -> None:
        """Warn, once per plan, that the step of a task drew random numbers.

        Raises:
            UnsupportedOptimizer: several ranks compute the task, and each would draw different numbers.
        """
        own = self.plan.owned.task(task)
        if own.owner is None and own.layout.grid.size > 1:
            raise UnsupportedOptimizer(
                f"{self._kind} draws random numbers, and every rank computes this matrix, so their copies would differ",
                at=task,
                hint='wrap with strategy="owner"',
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                DrawsRandomNumbers(
                    f"{self._kind} draws random numbers (first for {task}). They come from the generator of the "
                    "matrix's owner, so results do not have the bits of the plain optimizer on one device."
                ),
                stacklevel=2,
            )

    # -- objects of their own ------------------------------------------------------------------------

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
                f"{self._kind} keeps one step counter for all parameters, and this parameter was "
                "added after others had stepped, so its counter would start at zero",
                at=late[0],
                hint="add all parameters to the optimizer before its first step",
            )
        for task, bound in tasks:
            if self.store.owns(task):
                self._objects[task.name] = self._begun(task, bound)
        recipe = tasks[0][1].kind.recipe if tasks else None
        if recipe is not None and recipe.is_shown:
            self._shadow = self._shadow_of(recipe)

    def _shadow_of(self, recipe: Recipe) -> ObjectShadow:
        try:
            return ObjectShadow(self.optimizer, self._renewed(recipe), self.began)
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

    def _begun(self, task: Task, bound: BoundParam) -> OwnObject:
        made = self._made(task, bound)
        state: dict[str, Any] = self.optimizer.state.get(bound.param) or {}
        if is_portable(state):
            made.load(state)
            self.optimizer.state[bound.param] = {OWN_OBJECT: made}
        elif state and not same_state(state, made.optimizer.state.get(made.param) or {}):
            raise CanzonaError(
                "the plain optimizer has already stepped, and its state cannot be moved to the optimizer objects of "
                "owner ranks",
                at=task.name,
                hint="call wrap before the first step, and load only checkpoints that the wrapped optimizer saved",
            )
        return made

    def _made(self, task: Task, bound: BoundParam) -> OwnObject:
        assert bound.kind.recipe is not None
        g = bound.param_group
        recipe = self._renewed(bound.kind.recipe)
        began = self.began[g] if g < len(self.began) else None
        spec = ParameterSpec.of(bound.origin, task.shape, bound.kind.grad_dtype)
        try:
            return OwnObject(recipe, task.name, spec, self.optimizer.param_groups[g], began)
        except NotConstructible as error:
            raise CanzonaError(
                f"the optimizer object for this parameter cannot be constructed: {error}", at=task.name
            ) from error

    def _step_object(self, task: str, param: Tensor, grad: Tensor) -> Tensor:
        bound = self.plan.bound[task]
        state = self.optimizer.state[bound.param]
        own = self._objects[task]
        if state.get(OWN_OBJECT) is not own:
            if own.stepped:  # the user cleared the state
                own = self._objects[task] = self._made(self.plan.owned.task(task), bound)
            self.optimizer.state[bound.param] = {OWN_OBJECT: own}
        own.follow(self.optimizer.param_groups[bound.param_group], atoms_of(self.optimizer))
        return own.step(param, grad)

    # -- the whole model -----------------------------------------------------------------------------

    def bring(self, task: str, param: Tensor, grad: Tensor | None) -> None:
        """Keep copies of a whole parameter, and of its gradient if it has one."""
        origin = self.plan.bound[task].origin
        self._brought[task] = whole_copy(param, grad, carried(origin), origin.requires_grad)

    def take(self, task: str) -> Tensor:
        """Return the new value of a parameter."""
        return self._brought[task].detach()

    def step_brought(self) -> tuple[Any, Any, list[str]]:
        """Step what was brought; return what every rank has to know: `show`'s arguments, and which tasks have state.

        Raises:
            UnsupportedOptimizer: the step draws random numbers, or changes what other ranks cannot be shown.
        """
        by_group: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        states, brought = self.optimizer.state, self._brought
        for name, bound in self.plan.bound.items():
            by_group[bound.param_group].append(brought[name])
        state = {brought[n]: states[b.param] for n, b in self.plan.bound.items() if b.param in states}
        with watched(next(iter(brought.values())).device) as dice:
            left = step_all(self.optimizer, by_group, state)
        if dice.drew_random:
            raise UnsupportedOptimizer(f"{self._kind} did not draw random numbers at first, but does now")
        for name, bound in self.plan.bound.items():
            states.pop(bound.param, None)
            if brought[name] in left.state:
                states[bound.param] = left.state[brought[name]]
        stateful = [name for name, bound in self.plan.bound.items() if bound.param in states]
        return left.homes, left.same, stateful

    def forget_brought(self) -> None:
        """Free the copies."""
        self._brought = {}


class CoupledStep:
    """Steps all parameters of an optimizer that couples them: they are brought to one rank, stepped, and taken back.

    Args:
        cells: of the plan, in which one rank owns all tasks.

    Raises:
        UnsupportedOptimizer: the plan does not hold a parameter whole.
    """

    def __init__(self, cells: Cells) -> None:
        self.cells, self.store = cells, cells.store
        self.plan = plan = cells.plan
        task = plan.owned.tasks[0]
        self.ranks = task.layout.grid.members()
        self.owner = self.ranks[0] if task.owner is None else task.layout.grid.ranks[task.owner[0]][task.owner[1]]
        rank = self.store.rank
        self.here = self.owner == rank
        first = next(iter(plan.bound.values()))
        update, kind = first.kind.coupled, plain_class(cells.optimizer).__name__
        assert update is not None
        self.device = first.param.device
        check_whole(plan.bound)
        if self.here and len(self.ranks) > 1:
            size = sum(math.prod(t.shape) * first.param.element_size() for t in plan.owned.tasks)
            advice = f"; to let every rank step its share, {update.hint}" if update.hint else ""
            warnings.warn(
                OneRankSteps(
                    f"rank {rank} alone steps all parameters of {kind} and keeps their "
                    f"state ({len(plan.bound)} parameters, {size / 2**20:.3g} MiB), because {update.reason}{advice}"
                ),
                stacklevel=2,
            )

    def step(self, ready: Names, run: Callable[[ProgramKey], None]) -> list[str]:
        """Take the step.

        Args:
            ready: the tasks that have gradients.
            run: runs the program of some tasks and variants.

        Returns:
            The tasks that have state after it.
        """
        there = set(ready)
        names = tuple(self.plan.bound)
        try:
            run(self._program(names, [Part.BRING if name in there else Part.STILL for name in names]))
            left: Any = self.cells.step_brought() if self.here else None
            if len(self.ranks) > 1:
                group = self.store.groups.of(self.ranks)
                left = send_values(left, self.owner, group, self.device, self.store.watch)
            homes, same, stateful = left
            show(homes, same, self.cells.optimizer)
            run(self._program(names, [Part.TAKE] * len(names)))
        finally:
            self.cells.forget_brought()
        return list(stateful)

    def _program(self, names: Names, parts: Sequence[Part]) -> ProgramKey:
        """The program in which tasks take these parts of the step."""
        bound = [(self.plan.bound[name], part) for name, part in zip(names, parts, strict=True)]
        assignment = tuple((b.kind.templates[part].name, b.param_group, (b.task.name,)) for b, part in bound)
        return ProgramKey(names, assignment)


def check_whole(bound: Mapping[str, BoundParam]) -> None:
    """Raise unless every task is a whole parameter.

    Raises:
        UnsupportedOptimizer: one is a piece of a parameter, a plain fragment, some entries of a stack, it is not
            contiguous, or one of its attributes is a DTensor.
    """
    for name, own in bound.items():
        check_no_fragments(own.origin)
        if own.division is not None or own.stand_in is not None or tuple(own.param.shape) != own.task.shape:
            raise UnsupportedOptimizer(
                "the optimizer steps all parameters at once and needs each one whole, but this one is cut",
                at=name,
                hint="call wrap without split= and layout=, and do not shard a stack between its matrices",
            )
        if not torch.empty_strided(own.task.shape, own.param.stride(), device="meta").is_contiguous():
            raise UnsupportedOptimizer(
                "the optimizer steps contiguous copies of all parameters at once. This parameter is not contiguous, so "
                "sums over its copy would round differently",
                at=name,
                hint="make the parameter contiguous before constructing the optimizer",
            )


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

    walk = Snapshot(label)
    walk.add("value", value)
    return walk.found
