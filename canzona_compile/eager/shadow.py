"""What steps count for all parameters together, shown on the real optimizer, which never steps.

Users read such counters. Cells step parameters apart, on some ranks; so every rank has one more optimizer, with one
tiny parameter per group, that takes every step too, and the real optimizer takes over what it counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.eager.own_object import Recipe
from canzona_compile.replica.construction import atoms_of
from canzona_compile.replica.external_counters import around
from canzona_compile.replica.homes import hypers
from canzona_compile.replica.object_state import Finder
from canzona_compile.replica.randomness import MatrixGenerators, devices_among
from canzona_compile.replica.twin import as_written, make_twin, step_plainly

NAME = "the shadow of all matrices"  # seeds the generators of a constructed one, whose numbers reach no matrix


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
