"""Residents: one ordinary optimizer object per matrix, whole, on its owner, for the whole run.

It is the way for optimizers that keep on themselves what belongs to a parameter. Nothing of them is shared or copied:
the object is made by its class's constructor, gets whole gradients, and steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError, some
from canzona_compile.replica.construction import Construction, NotConstructible
from canzona_compile.replica.homes import hypers, own_attributes
from canzona_compile.replica.object_state import (
    NOTES,
    KeptPlace,
    NoPlace,
    lacking,
    numbers_in,
    pattern_of,
    places,
    put_back,
    saved,
    texts_of,
)
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.raised import blamed, first_line
from canzona_compile.replica.randomness import MatrixGenerators
from canzona_compile.replica.snapshot import Contents, Snapshot, changed
from canzona_compile.replica.twin import as_written, step_plainly

OWN_OBJECT = "resident"  # the key of the object in `optimizer.state[param]` on its owner
GENERATOR, CUDA_GENERATOR = "generator", "generator_cuda"  # leaves of its portable state, beside what it keeps
TRIALS = 12  # steps of an object that is loaded, at most, until it has all the state that was saved


@dataclass(frozen=True, eq=False, slots=True)
class Recipe:
    """How to make a resident, and what it keeps.

    Attributes:
        construction: how to construct the optimizer.
        attributes: the attributes in which its steps keep something.
        hyperparameters: the hyperparameters in which they do, such as a counter in the group.
        numbers: the patterns of paths, see `kept`, at which numbers change. Others are options, and belong to the
            constructor's arguments.
        shared: the paths in attributes at which something is kept once for all parameters, such as a counter.
    """

    construction: Construction
    attributes: frozenset[str] = frozenset()
    hyperparameters: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()

    @property
    def is_shown(self) -> bool:
        """Whether the real optimizer has to be shown something that the objects count."""
        return bool(self.shared or self.hyperparameters)


class OwnObject:
    """An optimizer object with one whole parameter.

    Args:
        recipe: how to make it.
        name: the name of the matrix. It seeds the generators that the object draws from.
        spec: the shape, dtypes, device and marks of the parameter.
        group: the parameter group of the real optimizer.
        began: the hyperparameters that the group had when the real optimizer was constructed.

    Attributes:
        optimizer: the object, of the class that the user wrote.
        param: its parameter, which has memory of its own.

    Raises:
        NotConstructible: the constructor fails.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        spec: ParameterSpec,
        group: Mapping[str, Any],
        began: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe, self.name, self.spec = recipe, name, spec
        self.param = torch.nn.Parameter(torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device))
        if spec.grad_dtype != spec.dtype:
            self.param.grad_dtype = spec.grad_dtype
        vars(self.param).update(spec.marks)
        self.generators = MatrixGenerators(name, spec.device)
        with self.generators.in_use():
            own = {**hypers(group), "params": [self.param], "param_names": [name]}
            self.optimizer: Optimizer = recipe.construction.make([own], [] if began is None else [began])
        self._given = dict(hypers(group)), dict(recipe.construction.atoms)
        self._texts: dict[str, Any] | None = None  # those after the first step
        self._still = self._rest()
        if sharded := [path for path, place in self._all_places().items() if isinstance(place.value, DTensor)]:
            raise NotConstructible(f"it holds DTensors in {some(sharded)}, which belong to the model")
        self._first_numbers = numbers_in(self._all_places())

    # -- steps -----------------------------------------------------------------------------------------

    def follow(self, group: Mapping[str, Any], atoms: Mapping[str, Any]) -> None:
        """Take over what users changed since the last step, beside what steps change themselves.

        Args:
            group: the parameter group of the real optimizer.
            atoms: its attributes that are plain values.
        """
        recipe = self.recipe
        homes: list[tuple[Any, Mapping[str, Any], Mapping[str, Any], Container[str]]] = [
            (self.optimizer.param_groups[0], self._given[0], hypers(group), recipe.hyperparameters),
            (vars(self.optimizer), self._given[1], atoms, recipe.attributes),
        ]
        followed = False
        for home, before, now, counted in homes:
            for name, value in now.items():
                if name not in counted and (name not in before or differs(before[name], value)):
                    home[name] = value
                    followed = True
        self._given = dict(hypers(group)), dict(atoms)
        if followed:
            self._still = self._rest()

    def step(self, param: Tensor, grad: Tensor) -> Tensor:
        """Take a step.

        Args:
            param: the whole parameter; it is not written.
            grad: its whole gradient; it is not written.

        Returns:
            The new parameter.
        """
        with torch.no_grad():
            self.param.copy_(param)
        self.param.grad = grad.clone()
        with self.generators.in_use():
            step_plainly(self.optimizer)
        self.param.grad = None
        if self._texts is None:
            self._texts = texts_of(self._places())
        return self.param.detach().clone()

    @property
    def stepped(self) -> bool:
        """Whether the object has taken a step."""
        return self._texts is not None

    def label(self, value: Any) -> str | None:
        """Name the parameter and the optimizer, for a `Snapshot`."""
        return "parameter" if value is self.param else "the optimizer" if value is self.optimizer else None

    # -- portable state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Copy all that the object keeps, as plain tensors and numbers by path.

        Raises:
            CanzonaError: it keeps something that cannot be saved.
        """
        late = self.moving_numbers() - self.recipe.numbers
        if places_changed := [*changed(self._still, self._rest()), *sorted(late)]:
            raise CanzonaError(
                f"the optimizer changed {some(places_changed)} after many steps for the first time, so it is not in "
                "the checkpoint",
                at=self.name,
                hint="please report it; counters and buffers that change within the first 40 steps are saved",
            )
        try:
            found = saved(self._places(), self._texts or {})
        except NoPlace as error:
            raise CanzonaError(
                f"what the optimizer keeps cannot be saved: {error}",
                at=self.name,
                hint="give these values different names",
            ) from error
        kinds = (GENERATOR, CUDA_GENERATOR)
        return {**found, **dict(zip(kinds, self.generators.states, strict=False))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what another object of the same optimizer kept.

        Trial steps make the state that steps make; then the values are put in their places.

        Args:
            state: what `state` returned there. It may have gone through a checkpoint.

        Raises:
            CanzonaError: it does not fit.
        """
        own = {path: value for path, value in state.items() if path not in (GENERATOR, CUDA_GENERATOR)}
        drawn = [state[kind].cpu().to(torch.uint8) for kind in (GENERATOR, CUDA_GENERATOR) if kind in state]
        try:
            self._try_steps(own)
            put_back(self._places(), own)
        except NoPlace as error:
            raise CanzonaError(
                f"the saved state does not fit what the optimizer keeps: {error}",
                at=self.name,
                hint="load a checkpoint of the same optimizer class, built with the same arguments",
            ) from error
        if len(drawn) == len(self.generators.states):
            self.generators.states = drawn

    def _try_steps(self, leaves: Mapping[str, Any]) -> None:
        """Take steps with random numbers until the object has a place for every leaf, or too many."""
        random = torch.Generator().manual_seed(0)
        for _ in range(TRIALS):
            values, grad = (torch.randn(self.spec.shape, generator=random, device="cpu") for _ in range(2))
            before = self.generators.states
            try:
                with as_written():
                    self.step(values.to(self.param), grad.to(self.spec.device, self.spec.grad_dtype))
            except Exception as error:  # whatever its code raises
                raise NoPlace(f"its step fails on random numbers: {first_line(error)}{blamed(error)}") from error
            finally:
                self.generators.states = before
            if not lacking(self._places(), leaves):
                break

    def moving_numbers(self) -> set[str]:
        """The patterns of paths at which there are other numbers than at the beginning."""
        now = numbers_in(self._all_places())
        return {pattern_of(path) for path, value in now.items() if not same(self._first_numbers.get(path), value)}

    def _places(self) -> dict[str, KeptPlace]:
        """The places of what is saved."""
        found = self._all_places()
        options = {path for path in numbers_in(found) if pattern_of(path) not in self.recipe.numbers}
        return {path: place for path, place in found.items() if path not in options}

    def _all_places(self) -> dict[str, KeptPlace]:
        return places(self.optimizer, self.param, self.recipe.attributes, self.recipe.hyperparameters)

    def _rest(self) -> Contents:
        """What lies in the attributes that do not change, with tensors by version."""
        walk = Snapshot(self.label, bits=False)
        changing = {*self.recipe.attributes, "defaults"}
        walk.add_home("self", {k: v for k, v in own_attributes(self.optimizer).items() if k not in changing})
        return walk.found


def same(one: Any, other: Any) -> bool:
    """Compare two numbers; NaN is equal to itself."""
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def differs(one: Any, other: Any) -> bool:
    """Tell whether a hyperparameter was changed. A tensor is the same as long as it is the same object."""
    if one is other:
        return False
    with contextlib.suppress(Exception):  # whatever a comparison of a user's class raises
        return bool(one != other)
    return True


def is_portable(state: Mapping[str, Any]) -> bool:
    """Tell whether a state is what `OwnObject.state` returned."""
    return NOTES in state


def portable_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the portable form of a parameter's state, in which its resident may be."""
    own = state.get(OWN_OBJECT)
    return own.state() if isinstance(own, OwnObject) else state
