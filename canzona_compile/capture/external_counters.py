"""What of an optimizer belongs to no parameter: counters and statistics in its groups and on itself.

Twins step in place of the optimizer, several per step or none, so nothing of this follows by itself.
Numbers that count steps are supported: a shadow of the optimizer, with one tiny matrix per group, counts
along. All else is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.leaves import state_leaves
from canzona_compile.capture.twin import hypers, make_twin, odd_state, plain_class, step_plainly
from canzona_compile.errors import UnsupportedOptimizer

Counts = dict[str, Any]  # new values of "group.step", "self.steps" or "state.k"


def step_alone(twin: Optimizer) -> Counts:
    """Run the twin's step and tell what it counted outside of its parameters' state.

    Raises:
        UnsupportedOptimizer: it changed something there that is no plain number.
    """
    vars(twin).update({k: copy.copy(v) for k, v in vars(twin).items() if isinstance(v, list | dict | set)})
    before = surroundings(twin)
    step_plainly(twin)
    after = surroundings(twin)
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    numbers = counts_of(twin)
    if others := [name for name in changed if name not in numbers]:
        raise UnsupportedOptimizer(
            f"{plain_class(twin).__name__}.step changes {' and '.join(others)}, which belong to no parameter",
            hint="keep statistics in self.state[param]; only plain numbers may count elsewhere",
        )
    return {name: numbers[name] for name in changed}


def surroundings(twin: Optimizer) -> dict[str, Any]:
    """Everything around parameters by name; tensors are stood for by what tells whether they were written."""
    found: dict[str, Any] = {}
    for prefix, values in around(twin):
        for name, value in state_leaves(values):
            if isinstance(value, Tensor):
                found[prefix + name] = id(value), value._version
            elif isinstance(value, int | float | str | torch.SymInt | torch.SymFloat):
                found[prefix + name] = str(value)
    return found


def counts_of(optimizer: Optimizer) -> Counts:
    """Plain numbers directly in a group or on the optimizer."""
    return {
        prefix + str(key): value
        for prefix, values in around(optimizer)
        for key, value in values.items()
        if isinstance(value, int | float)
    }


def around(optimizer: Optimizer) -> list[tuple[str, Mapping[str, Any]]]:
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}
    groups = [("group.", hypers(group)) for group in optimizer.param_groups]
    return [("self.", attributes), ("state.", odd_state(optimizer)), *groups]


def give_counts(twin: Optimizer, counts: Mapping[str, Any], known: Iterable[str] = ()) -> None:
    """Put numbers on a twin, and in its state under keys that are no parameters; `known` others go."""
    homes: dict[str, dict[Any, Any]] = {"self": vars(twin), "state": twin.state}
    for name, value in counts.items():
        home, key = name.split(".", 1)
        if home in homes:
            homes[home][key] = value
    for name in known:
        home, key = name.split(".", 1)
        if home in homes and name not in counts:
            homes[home].pop(key, None)


def counts_elsewhere(optimizer: Optimizer, names: Iterable[str]) -> Counts:
    """The counters of these names that are not in a group, now."""
    own = {name: value for name, value in counts_of(optimizer).items() if not name.startswith("group.")}
    # A counter may begin as an attribute of the class.
    own |= {n: getattr(optimizer, n[5:]) for n in names if n.startswith("self.") and hasattr(optimizer, n[5:])}
    return {name: own[name] for name in names if name in own}


class Shadow:
    """A copy of an optimizer with one tiny matrix per group: what it counts, the optimizer counts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._random = torch.Generator().manual_seed(0)
        self._params: list[Tensor] = []
        self._state: dict[Tensor, dict[str, Any]] = {}

    def count(self) -> None:
        """Take one step and copy what it changed, for groups in which some parameter has a gradient."""
        groups = self.optimizer.param_groups
        self._params += [self._like(group["params"]) for group in groups[len(self._params) :]]
        for param, group in zip(self._params, groups, strict=True):
            some = any(p.grad is not None for p in group["params"])
            param.grad = torch.randn(param.shape, generator=self._random).to(param) if some else None
        twin = make_twin(self.optimizer, {}, [], self._state)
        twin.param_groups = [{**group, "params": [p]} for group, p in zip(groups, self._params, strict=True)]
        before = [dict(values) for _, values in around(twin)]
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            step_plainly(twin)
        self._state = {key: value for key, value in twin.state.items() if isinstance(key, Tensor)}
        homes: list[dict[Any, Any]] = [vars(self.optimizer), self.optimizer.state, *groups]
        for home, old, (_, new) in zip(homes, before, around(twin), strict=True):
            changed = {k: v for k, v in new.items() if isinstance(v, int | float) and (k not in old or old[k] != v)}
            home.update(changed)

    def _like(self, params: list[Tensor]) -> Tensor:
        """A parameter with as many dims as the group's first one."""
        first = params[0] if params else torch.zeros(2, 3)
        shape = tuple(min(n, 2 + i) for i, n in enumerate(first.shape))
        return torch.nn.Parameter(torch.ones(shape, dtype=first.dtype))  # on the CPU, so that no device is waited for
