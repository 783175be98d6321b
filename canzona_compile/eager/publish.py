"""What a step leaves beside parameters and their state: published to every rank, as far as it is plain.

A rank that steps parameters for others steps a twin of the optimizer. What there is in parameter groups and attributes
belongs to every rank; it has to be plain, so that it can be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.replica.homes import homes_of
from canzona_compile.replica.snapshot import Contents, Snapshot

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
MOST_WATCHED = 1000  # places in attributes that cannot be sent; looking at them costs time on every step
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
    """What an optimizer holds beside parameters and their state, as far as it is plain."""
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
