"""The cells of a plan: the matrices that this rank steps by the optimizer's own code.

A matrix steps on a twin of the optimizer that sees it alone, or by an optimizer object of its own, which its owner
holds in `optimizer.state`, where portable state takes its place when the plan ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from canzona_compile.compat.interrupts import one_thread
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.eager.cell import step_alone, whole_copy
from canzona_compile.eager.own_object import OWN_OBJECT, OwnObject, is_portable
from canzona_compile.errors import CanzonaError, DrawsRandomNumbers, UnsupportedOptimizer
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.randomness import watched
from canzona_compile.replica.snapshot import Contents, Snapshot
from canzona_compile.session.plan import BoundParam
from canzona_compile.session.state import StateStore, put
from canzona_compile.tensors import plain_attributes


class Cells:
    """Steps the tasks of one plan that are not compiled, and first steps. Implements `program_ops.EagerContext`."""

    def __init__(self, store: StateStore) -> None:
        self.plan, self.store = store.plan, store
        self._kind = plain_class(store.optimizer).__name__
        self._warned = False

    def step(self, task: str, param: Tensor, grad: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Take the step of a task that this rank computes, see `program_ops.EagerContext`."""
        bound = self.plan.bound[task]
        if bound.kind.maker is not None:
            return self._step_object(task, param, grad), {}
        own = whole_copy(param, grad, plain_attributes(bound.origin), memory=torch.preserve_format)
        before = self.store.eager_state(task)
        state = before if bound.kind.recorder is not None else self.store.unstored(task, before)
        with one_thread():  # captures of other threads seed the generators that are watched here
            drew = watched(param.device)
            group = self.store.optimizer.param_groups[bound.task.param_group]
            new = step_alone(self.store.optimizer, group, own, state)
            drawn = drew()
        if drawn:
            self._check_draws(task)
        if state is not before:
            put(before, self.store.stored(task, state, before))
        return new, state

    def _check_draws(self, task: str) -> None:
        """Warn, once per plan, that the step of a task drew random numbers."""
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

    def begin(self) -> None:
        """Make the objects whose state is there, of the tasks that this rank computes, and one of each other kind.

        The others are made at their first step, when this rank has their values. One of each kind is tried now, as
        nothing has been sent yet.
        """
        tried: set[ParameterSpec] = set()
        for task in self.plan.owned.tasks:
            bound = self.plan.bound[task.name]
            if bound.kind.maker is None or not self.store.owns(task):
                continue
            state: dict[str, Any] = self.store.optimizer.state.get(bound.param) or {}
            if is_portable(state):
                made = self._made(bound)
                made.load(state)
                self.store.optimizer.state[bound.param] = {OWN_OBJECT: made}
            elif state or bound.spec not in tried:
                tried.add(bound.spec)
                made = self._made(bound)
                if state and not same_values(state, made.optimizer.state.get(made.param) or {}):
                    raise CanzonaError(
                        "the plain optimizer has already stepped, and its state cannot be moved to the optimizer "
                        "objects of owner ranks",
                        at=task.name,
                        hint="call wrap before the first step, and load only checkpoints that the wrapped optimizer "
                        "saved",
                    )

    def _made(self, bound: BoundParam, values: Tensor | None = None) -> OwnObject:
        assert bound.kind.maker is not None
        group = self.store.optimizer.param_groups[bound.task.param_group]
        return OwnObject(bound.kind.maker, bound.task.name, bound.spec, self.store.optimizer, group, values)

    def _step_object(self, task: str, param: Tensor, grad: Tensor) -> Tensor:
        bound = self.plan.bound[task]
        own: OwnObject | None = (self.store.optimizer.state.get(bound.param) or {}).get(OWN_OBJECT)
        if own is None:  # it is the first step, or the user cleared the state
            own = self._made(bound, param)
            self.store.optimizer.state[bound.param] = {OWN_OBJECT: own}
        own.follow(self.store.optimizer.param_groups[bound.task.param_group], self.store.optimizer)
        return own.step(param, grad)


def same_values(state: dict[str, Any], made: dict[str, Any]) -> bool:
    """Tell whether the state of a parameter is what an object's constructor makes; None is what others hold."""
    one, two = (pytree.tree_flatten(dict(s)) for s in (state, made))
    return one[1] == two[1] and all(
        a is None
        or (
            torch.equal(a, b)
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape
            else contents_of(a) == contents_of(b)
        )
        for a, b in zip(one[0], two[0], strict=True)
    )


def contents_of(leaf: Any) -> Contents:
    """What a leaf holds, such as a preconditioner, but for parameters, and for texts, which may say their numbers."""
    walk = Snapshot(lambda value: "a parameter" if isinstance(value, Parameter) else None)
    walk.add("", leaf)
    return {place: found for place, found in walk.found.items() if found[0] != "str"}
