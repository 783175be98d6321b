"""What a step leaves other than parameters and their state, shown to every rank, as far as it is plain.

Ranks that step parameters for others step twins of the optimizer, or objects of their own; the real optimizer never
steps. What there is in parameter groups and attributes belongs to every rank, and users read it. Where one rank steps
all parameters, it sends that to the others, so it has to be plain. Where matrices step apart, only numbers may count
for all of them: every rank has one more optimizer, with one tiny parameter per group, that takes every step too, and
the real optimizer takes over what it counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.eager.own_object import Recipe
from canzona_compile.replica.construction import atoms_of
from canzona_compile.replica.external_counters import around
from canzona_compile.replica.homes import homes_of, hypers
from canzona_compile.replica.object_state import Finder
from canzona_compile.replica.randomness import MatrixGenerators, devices_among
from canzona_compile.replica.snapshot import Contents, Snapshot
from canzona_compile.replica.twin import as_written, make_twin, step_plainly

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
MOST_WATCHED = 1000  # places in attributes that cannot be sent; looking at them costs time on every step
NAME = "the shadow of all matrices"  # seeds the generators of a constructed one, whose numbers reach no matrix
Homes = list[dict[Any, Any]]  # attributes, entries of the state that belong to no parameter, and each parameter group


@dataclass(frozen=True, slots=True)
class CoupledUpdate:
    """What an optimizer does that steps all of its parameters at once.

    Attributes:
        reason: why it has to.
        hint: what its author can do about it.
        attributes: the attributes that its steps change.
        hyperparameters: the hyperparameters that they change.
    """

    reason: str
    hint: str = ""
    attributes: frozenset[str] = frozenset()
    hyperparameters: frozenset[str] = frozenset()

    def shows(self, other: CoupledUpdate | None) -> bool:
        """Whether ranks that show what this one changes show all that another one changes, for the same reason."""
        return (
            other is not None
            and (self.reason, self.hint) == (other.reason, other.hint)
            and self.attributes >= other.attributes
            and self.hyperparameters >= other.hyperparameters
        )


def plain_homes(optimizer: Optimizer) -> Homes:
    """What an optimizer holds other than parameters and their state, as far as it is plain."""
    return [{k: v for k, v in home.items() if is_plain(v)} for home in homes_of(optimizer).values()]


def objects_in(optimizer: Optimizer) -> Contents:
    """What lies in all that is not plain, with tensors by version, and which keys there are."""
    walk = Snapshot(lambda value: "the optimizer" if value is optimizer else None, bits=False, most=MOST_WATCHED)
    for name, home in homes_of(optimizer).items():
        walk.add_home(name, {key: value for key, value in home.items() if not is_plain(value)})
    return walk.found


def is_plain(value: Any) -> bool:
    """Tell whether a value is made of tensors, numbers and texts, in containers."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return type(value) is Tensor or isinstance(value, PLAIN)


def show(homes: Homes, same: Sequence[set[Any]], optimizer: Optimizer) -> None:
    """Give an optimizer what a step left on another one.

    Args:
        homes: all that is plain there.
        same: by home, the keys at which the step left the object that was there; here, too, that object stays.
        optimizer: gets it. What is plain here and not among it goes.
    """
    real: Homes = [vars(optimizer), optimizer.state, *optimizer.param_groups]
    for home, here, new, kept in zip(real, plain_homes(optimizer), homes, same, strict=True):
        for key in here.keys() - new.keys():
            del home[key]
        for key, value in new.items():
            if key not in kept or key not in home or not refilled(home[key], value):
                home[key] = value


def refilled(there: Any, value: Any) -> bool:
    """Give a tensor or a container the contents of another one, if it can have them."""
    if there is value:
        return True
    if type(there) is not type(value):
        return False
    if isinstance(there, Tensor):
        fits = (there.shape, there.dtype, there.device) == (value.shape, value.dtype, value.device)
        if fits:
            with torch.no_grad():
                there.copy_(value)
        return fits
    if isinstance(there, list):
        there[:] = value
    elif isinstance(there, dict | set):
        there.clear()
        there.update(value)
    else:
        return False
    return True


# -- what is counted where matrices step apart ------------------------------------------------------


class Shadow:
    """A twin of an optimizer with tiny parameters, whose counts the optimizer takes over.

    Args:
        optimizer: the real optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._random = torch.Generator().manual_seed(0)
        self._params: list[Tensor] = []
        self._state: dict[Tensor, dict[str, Any]] = {}

    def count(self) -> None:
        """Take a step, and show what it counted. Groups without gradients do not step."""
        groups = self.optimizer.param_groups
        self._params += [tiny(group["params"]) for group in groups[len(self._params) :]]
        for param, group in zip(self._params, groups, strict=True):
            some = any(p.grad is not None for p in group["params"])
            param.grad = torch.randn(param.shape, generator=self._random, device="cpu").to(param) if some else None
        self._step()

    def _step(self) -> None:
        groups = self.optimizer.param_groups
        twin = make_twin(self.optimizer, {}, [], self._state)
        twin.param_groups = [{**group, "params": [p]} for group, p in zip(groups, self._params, strict=True)]
        before = [dict(values) for _, values in around(twin)]
        with torch.random.fork_rng(devices=devices_among(self._params)), as_written():
            step_plainly(twin)
        self._state = {key: value for key, value in twin.state.items() if isinstance(key, Tensor)}
        homes: list[dict[Any, Any]] = [vars(self.optimizer), self.optimizer.state, *groups]
        for home, old, (_, new) in zip(homes, before, around(twin), strict=True):
            changed = {k: v for k, v in new.items() if isinstance(v, int | float) and (k not in old or old[k] != v)}
            home.update(changed)


class ObjectShadow(Shadow):
    """An object that the optimizer's constructor made, where matrices have such objects.

    Args:
        optimizer: the real optimizer.
        recipe: what it keeps, and how to construct it.
        began: the hyperparameters of its groups when it was constructed.

    Raises:
        NotConstructible: the constructor fails.
    """

    def __init__(self, optimizer: Optimizer, recipe: Recipe, began: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(optimizer)
        self.recipe = recipe
        self._generators = MatrixGenerators(NAME, torch.device("cpu"))
        self._params = [tiny(group["params"]) for group in optimizer.param_groups]
        groups = [{**hypers(g), "params": [p]} for g, p in zip(optimizer.param_groups, self._params, strict=True)]
        with self._generators.in_use():
            self._object = recipe.construction.make(groups, began)

    def _step(self) -> None:
        recipe, real = self.recipe, self.optimizer
        atoms = {name: v for name, v in atoms_of(real).items() if name not in recipe.attributes}
        vars(self._object).update(atoms)
        for own, group in zip(self._object.param_groups, real.param_groups, strict=True):
            own.update({k: v for k, v in hypers(group).items() if k not in recipe.hyperparameters})
        with self._generators.in_use(), as_written():
            step_plainly(self._object)
        for own, group in zip(self._object.param_groups, real.param_groups, strict=True):
            group.update({k: own[k] for k in recipe.hyperparameters if k in own})
        mine, theirs = (self._looked_into(optimizer) for optimizer in (self._object, real))
        for path in sorted(recipe.shared & mine.found.keys()):
            theirs.take_over(path, mine)

    def _looked_into(self, optimizer: Optimizer) -> Finder:
        finder = Finder(self._params[0])
        finder.look_at_attributes(optimizer, {path.split("/")[1] for path in self.recipe.shared})
        return finder


def tiny(params: Sequence[Tensor]) -> Tensor:
    """Make a tiny parameter with as many dims as the first of some; on the CPU, so that no device is waited for."""
    first = params[0] if params else torch.zeros(2, 3, device="cpu")
    shape = tuple(min(n, 2 + i) for i, n in enumerate(first.shape))
    return torch.nn.Parameter(torch.ones(shape, dtype=first.dtype, device="cpu"))
