"""Modes that look at the operators of trials: which products they call, where they draw, and what rounding changes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.compat.torch_private import TorchDispatchMode, pytree
from canzona_compile.replica.raised import NoCollectives, name_of
from canzona_compile.tensors import storage_of

# What may round otherwise in a stack than alone.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_linalg_eigh", "linalg_qr", "_linalg_svd"}
FILLS = {"fill_", "copy_", "zero_"}  # that write all of their first operand, and do not read it
SUMS = {"sum", "mean", "linalg_vector_norm", "norm", "var", "std"}


class Operators(NoCollectives):
    """Inside this mode, operators are noted.

    Attributes:
        products: the products, decompositions and sums that were called, with the shapes of their operands.
        generators: those that were passed to operators which draw random numbers.
        unwritten: tensors that nobody has written yet, by their memory.
        reads_unwritten: whether an operator read such memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: set[tuple[Any, ...]] = set()
        self.generators: list[torch.Generator] = []
        self.unwritten: dict[int, Tensor] = {}
        self.reads_unwritten = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) in PRODUCTS | SUMS:
            self.products.add((name_of(func), *(tuple(one.shape) for one in args if isinstance(one, Tensor))))
        if self.unwritten and not func.is_view:
            memory = [storage_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            fills = name_of(func) in FILLS
            self.reads_unwritten |= not self.unwritten.keys().isdisjoint(memory[fills:])
            self.unwritten.pop(memory[0] if fills else 0, None)
        if (generator := (kwargs or {}).get("generator")) is not None:
            self.generators.append(generator)
        return super().__torch_dispatch__(func, types, args, kwargs)


class InDouble(TorchDispatchMode):
    """Inside this mode new floats have 64 bits, whatever code asks for: rounding changes next to nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        wide, named = tuple(map(doubled, args)), {key: doubled(value) for key, value in given.items()}
        if any(issubclass(kind, DTensor) for kind in types):  # which then calls operators on its local tensors
            if all(a is b for a, b in zip((*wide, *named.values()), (*args, *given.values()), strict=True)):
                return NotImplemented
            with self:
                return func(*wide, **named)
        found = func(*wide, **named)
        return pytree.tree_map(doubled_tensor, found) if makes_new(func) else found


@functools.cache
def makes_new(func: Any) -> bool:
    """Whether what an operator returns has memory of its own."""
    return all(one.alias_info is None for one in func._schema.returns)


def doubled(value: Any) -> Any:
    """The dtype of 64 bits in place of another one of floats; anything else as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def doubled_tensor(value: Any) -> Any:
    """A tensor of floats with 64 bits; anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
