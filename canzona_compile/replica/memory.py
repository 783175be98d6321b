"""Which memory tensors lie in and operators write, and where gradients lay that an optimizer still holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import InvalidGradient, some
from canzona_compile.ir.layout import local_part
from canzona_compile.replica.snapshot import inner_tensors


def memory_of(*values: Any) -> set[StorageWeakRef]:
    """Name the memory of tensors on this rank, without keeping it. Views of one tensor have the same.

    No other memory gets an equal name while this one is held, not even after the memory is freed. What has no memory of
    its own has no name: sparse tensors, classes that are made of other tensors, values that are not tensors.
    """
    tensors = [local_part(value) for value in values if isinstance(value, Tensor)]
    own = [t for t in tensors if t.layout is torch.strided and not inner_tensors(t)]
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in own}


def storage_of(tensor: Tensor) -> int:
    """Name the memory of a tensor, also if that is fake, for as long as it is not freed."""
    return int(tensor.untyped_storage()._cdata)


def given_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, without those that have their defaults."""
    declared = func._schema.arguments
    return {argument.name: value for argument, value in zip(declared, args, strict=False)} | dict(kwargs)


def written_by(func: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, int, Tensor]]:
    """The tensors that an operator writes: the name of the argument, the position if it is a list, the tensor.

    Args:
        func: the operator.
        given: its arguments by name.
    """
    for argument in func._schema.arguments:
        value = given.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
            for i, tensor in enumerate(value if isinstance(value, list | tuple) else [value]):
                if isinstance(tensor, Tensor):
                    yield argument.name, i, tensor


def overlap(one: Any, other: Any) -> bool:
    """Whether two values are tensors that may have elements in common. Views of fake tensors are known, too."""
    if one is other:
        return isinstance(one, Tensor)
    if not memory_of(one) & memory_of(other):
        return False
    (begin, end), (start, stop) = extent(one), extent(other)
    return begin < stop and start < end


def expanded(tensor: Tensor) -> bool:
    """Whether a tensor shows one element at several places."""
    strided = tensor.layout is torch.strided
    return strided and any(n > 1 and not stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory between which a tensor lies."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin


class GradientAliases:
    """Notes the memory of gradients by parameter, as far as it is not freed since. It outlives plans."""

    def __init__(self) -> None:
        self._memory = WeakTensorKeyDictionary()

    def note(self, param: Tensor, tensors: Any) -> None:
        """Note the memory of a gradient, or of all tensors in a state, which may be one."""
        known = {memory for memory in self._memory.get(param, ()) if not memory.expired()}
        self._memory[param] = known | memory_of(*pytree.tree_leaves(tensors))

    def check(self, params: Mapping[str, Tensor], places: Iterable[str]) -> None:
        """Raise if a gradient lies in memory that was noted, which the optimizer holds.

        Args:
            params: the parameters of this step, by name.
            places: where the optimizer holds gradients.

        Raises:
            InvalidGradient: the plain optimizer would find this gradient there. A plan keeps a copy of the earlier one.
        """
        for name, param in params.items() if len(self._memory) else ():
            if memory_of(param.grad) & self._memory.get(param, set()):
                raise InvalidGradient(
                    f"it was written over an earlier gradient, which the optimizer holds in {some(places)}",
                    at=name,
                    hint="call zero_grad(set_to_none=True) after every step, or let the optimizer keep a clone",
                )
