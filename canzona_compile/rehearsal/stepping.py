"""The ways to step a miniature that are compared with the plain one: in cells as a plan does, or by objects."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from canzona_compile.compat.torch_private import without_function_modes
from canzona_compile.eager.cell import carried, step_all, step_alone, whole_copy
from canzona_compile.eager.own_object import OwnObject, Recipe
from canzona_compile.eager.publish import ObjectShadow, Shadow, show
from canzona_compile.errors import some
from canzona_compile.rehearsal.trial import Plainly, walk_of
from canzona_compile.replica.construction import Construction, NotConstructible, reads_values
from canzona_compile.replica.homes import hypers
from canzona_compile.replica.miniature import Miniature
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.randomness import MutedDraws, seeded
from canzona_compile.replica.snapshot import Contents
from canzona_compile.replica.twin import plain_attributes


class VisibleContext(enum.Enum):
    """What a step sees other than a copy of its parameter, as the reason for a refusal."""

    NONE = "steps one parameter as all"
    ITSELF = "asks which object its parameter is, for its address, or for its strides"
    ATTRIBUTES = "reads attributes of its parameter that are private, or neither numbers nor strings"
    GROUP = "reads the position of a parameter in its group, or the number of parameters of the group"
    ALL_GROUPS = "reads the hyperparameters or the number of other parameter groups"


class OneByOne(Plainly):
    """Steps each parameter by itself on a twin, as the owners of its matrices do.

    Args:
        counters: whether the optimizer counts outside of the state of parameters.
        in_order: whether parameters step in their order, as random numbers come in it. Otherwise the last one is the
            first, so that what one step leaves to the next shows.
        company: what a step sees other than its parameter.
    """

    asks: ClassVar[bool] = False

    def __init__(self, counters: bool, in_order: bool = False, company: VisibleContext = VisibleContext.NONE) -> None:
        self.counters, self.in_order, self.company = counters, in_order, company

    def begin(self, small: Miniature) -> None:
        """Get ready."""
        self.small, self._shadow = small, Shadow(small.optimizer)

    def step(self) -> None:
        """Step all parameters that have gradients."""
        params = self.small.params
        with hidden(params, values=False) as grads:
            for i in range(len(params)) if self.in_order else reversed(range(len(params))):
                if grads[i] is not None:
                    self._step_one(i, grads)
                    with without_function_modes():
                        drop_gradients(params)  # that the step gave to others
        if self.counters:
            self._shadow.count()

    def _step_one(self, index: int, grads: list[Tensor | None]) -> None:
        small, company = self.small, self.company
        param, optimizer, grad = small.params[index], small.optimizer, grads[index]
        assert grad is not None
        attributes = vars(param) if company is VisibleContext.ATTRIBUTES else plain_attributes(param)
        own = param if company is VisibleContext.ITSELF else whole_copy(param, grad, attributes)
        g = small.group_of[index]
        groups = [
            {**hypers(group), "params": [own if p is param else without_gradient(p) for p in group["params"]]}
            for h, group in enumerate(optimizer.param_groups)
            if company is VisibleContext.ALL_GROUPS or (company is VisibleContext.GROUP and h == g)
        ]
        if own is param:
            param.grad = grad
        param.data.copy_(step_alone(optimizer, optimizer.param_groups[g], own, optimizer.state[param], groups))
        if own is param:
            grads[index] = param.grad


class AtOnce(Plainly):
    """Steps whole copies of all parameters on a twin, as the rank does that steps them all."""

    asks: ClassVar[bool] = False

    def step(self) -> None:
        """Step all parameters."""
        small, real = self.small, self.small.optimizer
        copies: dict[Tensor, Tensor] = {p: whole_copy(p, p.grad, carried(p), p.requires_grad) for p in small.params}
        state = {own: real.state[param] for param, own in copies.items() if param in real.state}
        with hidden(small.params, values=True):
            result = step_all(real, [[copies[p] for p in group["params"]] for group in real.param_groups], state)
        show(result.homes, result.same, real)
        for param, own in copies.items():
            param.data.copy_(own.detach())
            real.state.pop(param, None)
            if own in result.state:
                real.state[param] = result.state[own]


class Constructed(Plainly):
    """Steps one object of all parameters, which the constructor made.

    Args:
        construction: how to construct it.
        device: that of the parameters.

    Attributes:
        muted: gives equal draws to whoever draws.
    """

    def __init__(self, construction: Construction, device: torch.device) -> None:
        self.construction, self.device, self.muted = construction, device, MutedDraws(device)

    def begin(self, small: Miniature) -> None:
        """Construct the object.

        Raises:
            NotConstructible: the constructor fails, or keeps values of parameters.
        """
        self.small = small
        with seeded(self.device), self.muted:
            if places := reads_values(self.construction, small.optimizer.param_groups):
                raise NotConstructible(f"its constructor keeps values of parameters in {some(places)}")
            small.optimizer = self.construction.copied().make(small.optimizer.param_groups)

    def step(self) -> Any:
        """Step all parameters."""
        self.muted.moment += 1
        with seeded(self.device), self.muted:
            return super().step()


class OwnObjects(Plainly):
    """Steps one object per parameter, as owners do, which the constructor made.

    Args:
        recipe: how to make them.
        device: that of the parameters.
        atoms: the attributes of the real optimizer that are plain values.
        restored_at: the step before which every object is replaced by a new one that gets what it kept.

    Attributes:
        moving: the patterns of the paths at which objects have numbers that change.
    """

    asks: ClassVar[bool] = False

    def __init__(
        self, recipe: Recipe, device: torch.device, atoms: Mapping[str, Any], restored_at: int | None = None
    ) -> None:
        self.recipe = replace(recipe, construction=recipe.construction.copied())
        self.device, self.atoms, self.restored_at = device, atoms, restored_at
        self.moving: set[str] = set()
        self._muted = MutedDraws(device)
        self._objects: dict[int, OwnObject] = {}

    def begin(self, small: Miniature) -> None:
        """Get ready."""
        self.small = small
        self._shadow = ObjectShadow(small.optimizer, self.recipe, ()) if self.recipe.is_shown else None

    def step(self) -> None:
        """Step all parameters that have gradients."""
        self._muted.moment += 1
        with seeded(self.device), self._muted:
            self._step_objects()
            if self._shadow is not None:
                self._shadow.count()

    def _step_objects(self) -> None:
        small = self.small
        if self._muted.moment - 1 == self.restored_at:
            for i, old in self._objects.items():
                self._objects[i] = self._made(i)
                self._objects[i].load(old.state())
        for i in reversed(range(len(small.params))):  # backwards, so that what one step leaves to the next shows
            param = small.params[i]
            if param.grad is None:
                continue
            if i not in self._objects:
                self._objects[i] = self._made(i)
            own = self._objects[i]
            own.follow(self._group_of(i), self.atoms)
            param.data.copy_(own.step(param.detach(), param.grad.clone(memory_format=torch.contiguous_format)))

    def _made(self, i: int) -> OwnObject:
        spec = ParameterSpec.of(self.small.params[i])
        return OwnObject(self.recipe, f"parameter {i}", spec, self._group_of(i))

    def _group_of(self, i: int) -> Mapping[str, Any]:
        return self.small.optimizer.param_groups[self.small.group_of[i]]

    def objects(self) -> Contents:
        """What the objects hold; the places begin with the object's own."""
        found: Contents = {}
        for i, own in self._objects.items():
            self.moving |= own.moving_numbers()
            held = walk_of(own.optimizer, [own.param], own.label).found
            found |= {f"object {i}: {place}": value for place, value in held.items()}
        return found


@contextlib.contextmanager
def hidden(params: Sequence[Tensor], values: bool) -> Iterator[list[Tensor | None]]:
    """Inside this context, parameters have no gradients: what an optimizer does to them beside its step shows.

    Args:
        params: the parameters.
        values: whether they have no values either, as real ones are fragments on a rank.

    Yields:
        The gradients that they have afterwards.
    """
    with without_function_modes():
        grads = [param.grad for param in params]
        drop_gradients(params)
    before = [param.detach().clone() for param in params] if values else []
    for param in params if values else ():
        param.data.fill_(float("nan") if param.is_floating_point() else 0)
    try:
        yield grads
    finally:
        for param, own in zip(params, before, strict=False):
            param.data.copy_(own)
        with without_function_modes():
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad


def drop_gradients(params: Iterable[Tensor]) -> None:
    """Let parameters have no gradients."""
    for param in params:
        if param.grad is not None:
            param.grad = None


def without_gradient(param: nn.Parameter) -> nn.Parameter:
    """Copy a parameter that does not step."""
    made = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    vars(made).update(plain_attributes(param))
    return made
