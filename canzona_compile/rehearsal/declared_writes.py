"""See whether operators write all that their schemas declare to be written.

Those of bitsandbytes that update 8-bit state declare the table of its codes as written, which all parameters have in
common. Taken at its word, such an update couples all parameters. A trial proves nothing about other sizes and values,
so only packages are tried whose code was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canzona_compile.compat.torch_private import FakeTensor, pytree
from canzona_compile.replica.memory import given_to
from canzona_compile.replica.raised import NoCollectives
from canzona_compile.replica.randomness import undisturbed
from canzona_compile.replica.snapshot import bits_of

OVERSTATED = {"bitsandbytes"}  # packages whose operators declare to write tables that they read
MOST_ELEMENTS = 2**24  # of all tensors of a call that is made to see what it writes
SCALES = (1.0, 1e4, 0.0, float("nan"))  # of the values that such calls are given

# The arguments of an operator, with tensors that have no values.
DeclaredCall = tuple[tuple[Any, ...], Mapping[str, Any]]


class DeclaredWrites:
    """Calls that are declared to write tensors with values, such as tables that all parameters share.

    Other tensors of these calls have no values, so that the calls themselves are not made.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, str], DeclaredCall] = {}  # by operator and argument, the smallest
        self._kept: set[tuple[Any, str]] = set()

    def keeps(self, func: Any, argument: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note a call. Tell whether its operator is known to leave an argument as it is."""
        if func.namespace not in OVERSTATED:
            return False
        key = func, argument
        if key not in self._calls or elements((args, kwargs)) < elements(self._calls[key]):
            self._calls[key] = args, kwargs
        return key in self._kept

    def try_calls(self) -> bool:
        """Make the smallest of these calls on random values. From then on it is known which arguments they keep.

        Returns:
            Whether anything is known now that was not known before.
        """
        known = len(self._kept)
        self._kept |= {key for key, call in self._calls.items() if not writes(*key, call)}
        return len(self._kept) > known


def writes(func: Any, argument: str, call: DeclaredCall) -> bool:
    """Make a call on random values, and tell whether it writes an argument. What is too large or fails counts as so."""
    if elements(call) > MOST_ELEMENTS:
        return True
    random = torch.Generator().manual_seed(0)
    try:
        return any(writes_at(func, argument, call, scale, random) for scale in SCALES)
    except Exception:  # whatever an operator raises for such values
        return True


def writes_at(func: Any, argument: str, call: DeclaredCall, scale: float, random: torch.Generator) -> bool:
    """Make a call on random values of a scale, and tell whether it writes an argument."""
    args, kwargs = pytree.tree_map(lambda leaf: with_values(leaf, scale, random), call)
    given = given_to(func, args, kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(given[argument]) if isinstance(leaf, Tensor)]
    before = [bits_of(tensor) for tensor in tensors]
    with undisturbed(tensors[0].device), NoCollectives():
        func(*args, **kwargs)
    return before != [bits_of(tensor) for tensor in tensors]


def with_values(leaf: Any, scale: float, random: torch.Generator) -> Any:
    """Make a random tensor for one without values, and a copy of one with values."""
    if isinstance(leaf, FakeTensor):
        if not leaf.is_floating_point():
            return torch.randint(0, 2, leaf.shape, generator=random, device="cpu").to(leaf.device, leaf.dtype)
        made = torch.randn(leaf.shape, generator=random, device="cpu") * scale
        return made.to(leaf.device, leaf.dtype)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def elements(call: Any) -> int:
    """Count the elements of all tensors of a call."""
    return sum(leaf.numel() for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor))
