"""What a step leaves beside parameters and their state: published to every rank, as far as it is plain.

A rank that steps parameters for others steps a twin of the optimizer. What there is in parameter groups and attributes
belongs to every rank; it has to be plain, so that it can be sent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import UnsupportedOptimizer, some
from canzona_compile.replica.homes import homes_of
from canzona_compile.replica.snapshot import Contents, Snapshot, changed

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
MOST_OBJECTS = 1000  # places in attributes that cannot be sent; looking at them costs time on every step
MOST_PLAIN = 20_000  # places in what can be sent
Homes = list[dict[Any, Any]]  # attributes, entries of the state that belong to no parameter, and parameter groups


@dataclass(frozen=True, slots=True)
class CoupledUpdate:
    """What an optimizer does whose update of a parameter depends on others.

    Attributes:
        reason: why they step together.
        hint: what its author can do about it.
        by_group: whether parameters depend on those of their own group only.
        attributes: the attributes that its steps change.
        hyperparameters: the hyperparameters that they change.
    """

    reason: str
    hint: str = ""
    by_group: bool = False
    attributes: frozenset[str] = frozenset()
    hyperparameters: frozenset[str] = frozenset()

    @property
    def cell(self) -> str:
        """What steps together: a "group" or the "model"."""
        return "group" if self.by_group else "model"

    def shows(self, other: CoupledUpdate | None) -> bool:
        """Whether ranks that show what this one changes show all that another one changes, for the same reason."""
        return (
            other is not None
            and (self.reason, self.hint, self.by_group) == (other.reason, other.hint, other.by_group)
            and self.attributes >= other.attributes
            and self.hyperparameters >= other.hyperparameters
        )


class Published(NamedTuple):
    """What the step of some parameter groups left, for every rank.

    Attributes:
        groups: the positions of the groups.
        homes: all that is plain: attributes, entries of the state that belong to no parameter, and these groups.
        same: by home, the keys at which there is the same object as before the step.
    """

    groups: tuple[int, ...]
    homes: Homes
    same: list[set[Any]]


def cells_of(group_sizes: Sequence[int], by_group: bool) -> list[tuple[int, ...]]:
    """Divide parameter groups into those whose parameters step together; every group is in one cell.

    Args:
        group_sizes: the number of parameters of each group.
        by_group: whether each group steps by itself. Those without parameters go with the first of the others.
    """
    filled = [g for g, size in enumerate(group_sizes) if size]
    if not by_group or not filled:
        return [tuple(range(len(group_sizes)))]
    first, *others = filled
    empty = [g for g, size in enumerate(group_sizes) if not size]
    return [tuple(sorted([first, *empty])), *((g,) for g in others)]


def plain_homes(optimizer: Optimizer, groups: Collection[int] | None = None) -> Homes:
    """What an optimizer holds beside parameters and their state, as far as it is plain; of all groups or of some."""
    homes = homes_of(optimizer)
    names = homes if groups is None else ["self", "self.state", *(f"param_groups[{g}]" for g in groups)]
    return [{k: v for k, v in homes[name].items() if is_plain(v)} for name in names]


def objects_in(optimizer: Optimizer) -> Contents:
    """What lies in all that is not plain, with tensors by version, and which keys there are."""
    return _held(optimizer, plain=False)


def plain_objects_in(optimizer: Optimizer) -> Contents:
    """What lies in all that is plain, with tensors by version, and which keys there are."""
    return _held(optimizer, plain=True)


def _held(optimizer: Optimizer, plain: bool) -> Contents:
    most = MOST_PLAIN if plain else MOST_OBJECTS
    walk = Snapshot(lambda value: "the optimizer" if value is optimizer else None, bits=False, most=most)
    for name, home in homes_of(optimizer).items():
        walk.add_home(name, {key: value for key, value in home.items() if is_plain(value) is plain})
    return walk.found


def is_plain(value: Any) -> bool:
    """Tell whether a value is made of tensors, numbers and texts, in containers."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return type(value) is Tensor or isinstance(value, PLAIN)


def check_agreed(published: Sequence[Published], optimizer: Optimizer) -> None:
    """Raise unless the steps of several cells left the same in what belongs to all groups.

    Raises:
        UnsupportedOptimizer: one left something else than another.
    """
    if len(published) < 2:
        return
    first, *others = map(shared_contents, published)
    if places := sorted({place for other in others for place in changed(first, other)}):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step leaves something else in {some(places)} for one parameter group "
            "than for another one",
            hint="keep what belongs to a group in the group",
        )


def shared_contents(published: Published) -> Contents:
    """What a step left in the homes that belong to all groups, by place."""
    walk = Snapshot()
    for name, home in zip(("self", "self.state"), published.homes, strict=False):
        walk.add_home(name, home)
    return walk.found


def show(published: Published, optimizer: Optimizer) -> None:
    """Give an optimizer what a step left on another one.

    Where the step left the object that was there, that object stays here, too.

    Args:
        published: all that is plain there.
        optimizer: gets it. What is plain in these homes here and not among it goes.
    """
    real: Homes = [vars(optimizer), optimizer.state, *(optimizer.param_groups[g] for g in published.groups)]
    there = plain_homes(optimizer, published.groups)
    for home, here, new, kept in zip(real, there, published.homes, published.same, strict=True):
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
