"""Counters and statistics that belong to no parameter: in parameter groups and on the optimizer itself.

Twins step in place of the optimizer, several of them per step or none, so these values do not advance by themselves.
Numbers that count steps are supported: a shadow of the optimizer with one tiny matrix per parameter group takes every
step too, and its counts are copied. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.replica.copies import with_own_containers
from canzona_compile.replica.homes import hypers, odd_state, own_attributes
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.replica.snapshot import Snapshot, known_parameters, parameter_label
from canzona_compile.replica.twin import as_written, scratch_of, step_plainly

Home = Literal["group", "self", "state"]


class Counter(NamedTuple):
    """A place outside of the state of parameters where code may count.

    Attributes:
        home: "group" for a parameter group, "self" for the attributes of the optimizer, "state" for keys of
            `optimizer.state` that are not parameters.
    """

    home: Home
    key: str

    def __str__(self) -> str:
        return f"{self.home}.{self.key}"


Counts = dict[Counter, Any]


def step_alone(twin: Optimizer) -> tuple[Counts, list[str]]:
    """Run a twin's step; what it counted outside of the state of its parameters, and all else that it changed there."""
    vars(twin).update(with_own_containers(vars(twin)))
    before = surroundings(twin)
    with as_written():
        step_plainly(twin)
    after = surroundings(twin)
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    numbers = counts_of(twin)
    others = [str(name) for name in changed if name not in numbers]
    return {name: numbers[name] for name in changed if name in numbers}, others


def changed_places(twin: Optimizer, others: Sequence[str]) -> list[str]:
    """Where a twin's step has kept something by parameter, and what else it has changed, see `step_alone`."""
    walk = Snapshot(parameter_label(twin), bits=False)
    walk.add_home("self", own_attributes(twin))
    kept = known_parameters(walk.found)  # the twin's parameters are new, so nothing else knew them
    holders = tuple(place.partition("[")[0] for place in kept)
    return kept + [place for place in others if not place.startswith(holders)]


def surroundings(twin: Optimizer) -> dict[Counter, Any]:
    """Record everything that an optimizer holds outside of the state of its parameters."""
    found: dict[Counter, Any] = {}
    scratch = scratch_of(twin)
    for home, values in around(twin):
        for name, value in state_leaves(values):
            if id(value) in scratch:
                continue
            if isinstance(value, Tensor):
                found[Counter(home, name)] = id(value), value._version
            elif isinstance(value, int | float | str | torch.SymInt | torch.SymFloat):
                found[Counter(home, name)] = str(value)
    return found


def counts_of(optimizer: Optimizer) -> Counts:
    """Return the plain numbers directly in a parameter group, on the optimizer, or under odd keys of its state."""
    return {
        Counter(home, str(key)): value
        for home, values in around(optimizer)
        for key, value in values.items()
        if isinstance(value, int | float)
    }


def around(optimizer: Optimizer) -> list[tuple[Home, Mapping[str, Any]]]:
    """List what an optimizer holds outside of the state of parameters.

    Returns:
        Its attributes, the entries of its state whose keys are not parameters, and then each parameter group.
    """
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}
    groups: list[tuple[Home, Mapping[str, Any]]] = [("group", hypers(group)) for group in optimizer.param_groups]
    return [("self", attributes), ("state", odd_state(optimizer)), *groups]


def give_counts(twin: Optimizer, counts: Mapping[Counter, Any], known: Iterable[Counter] = ()) -> None:
    """Give a twin the numbers that an optimizer keeps outside of parameter groups."""
    homes: dict[Home, dict[Any, Any]] = {"self": vars(twin), "state": twin.state}
    for counter, value in counts.items():
        if counter.home in homes:
            homes[counter.home][counter.key] = value
    for counter in known:
        if counter.home in homes and counter not in counts:
            homes[counter.home].pop(counter.key, None)


def counts_elsewhere(optimizer: Optimizer, counters: Collection[Counter]) -> Counts:
    """Return the current values of those counters that are not in a parameter group."""
    if not counters:
        return {}
    own = {counter: value for counter, value in counts_of(optimizer).items() if counter.home != "group"}
    for counter in counters:  # one may begin as an attribute of the class
        if counter.home == "self" and hasattr(optimizer, counter.key):
            own[counter] = getattr(optimizer, counter.key)
    return {counter: own[counter] for counter in counters if counter in own}
