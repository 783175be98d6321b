"""Tensors as they are held: a rank's part of one, what it is made of and shares, who writes it, what users attached."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

MARKS = (int, float, str, type(None))  # classes of attributes of parameters that plans know


def local_part(tensor: Tensor) -> Tensor:
    """The fragment that this rank holds, without a copy and without autograd."""
    return unwrapped(tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach())


def unwrapped(tensor: Tensor) -> Tensor:
    """The one tensor that a class with an all-gather of its own for FSDP2 works on; any other tensor as it is.

    torchao's class of float8 weights is of this kind.
    """
    kind = type(tensor)
    if kind is Tensor or kind is Parameter or not hasattr(kind, "fsdp_pre_all_gather"):
        return tensor
    if kind not in _inner_names:  # asked once, because flattening may make the host wait for a device
        if not (name := inner_name(tensor)):
            return tensor
        _inner_names[kind] = name
    inner: Tensor = getattr(tensor, _inner_names[kind]).detach()
    return inner if (inner.shape, inner.dtype) == (tensor.shape, tensor.dtype) else tensor


_inner_names: dict[type, str] = {}  # by class, what `inner_name` has found


def inner_name(tensor: Tensor) -> str:
    """The attribute with the one tensor that a class works on, as a trial shows; empty if the class does more."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    held = {name: getattr(tensor, name) for name in names}
    alike = [n for n, own in held.items() if (own.shape, own.dtype) == (tensor.shape, tensor.dtype)]
    if len(alike) != 1 or inner_tensors(held[alike[0]]):
        return ""
    small = torch.tensor([[0.1, 0.7], [1.3, 3.1]], dtype=tensor.dtype, device=tensor.device)
    held[alike[0]], expected = small, small + small * 2  # which a class with fewer bits would round
    try:
        kind: Any = type(tensor)
        made = kind.__tensor_unflatten__(held, context, small.size(), small.stride())
        with torch.no_grad():
            made.add_(made * 2)
        return alike[0] if torch.equal(getattr(made, alike[0]), expected) and torch.equal(small, expected) else ""
    except Exception:  # whatever the class raises: it lacks an operator
        return ""


def made_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that this rank's part of a tensor is made of: itself, unless its class holds others."""
    part = local_part(tensor)
    names = inner_tensors(part)
    return [own for name in names for own in made_of(getattr(part, name))] if names else [part]


def inner_tensors(tensor: Tensor) -> list[str]:
    """The attributes with the tensors that a tensor is made of, such as codes and scales of low-bit state.

    Its other metadata is made again by its code. Classes of this kind seldom have operators to be copied.
    """
    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return []
    names: list[str] = tensor.__tensor_flatten__()[0]
    return names


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of all elements in order, uint8 [n]. A contiguous tensor of one element may have any stride."""
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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
    """The tensors that an operator writes: the name of the argument, the position if it is a list, the tensor."""
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


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """The attributes that users gave to a tensor, and not its class.

    Names that begin with an underscore belong to frameworks.
    """
    of_class = vars(tensor.detach()) if inner_tensors(tensor) else ()
    return {k: v for k, v in vars(tensor).items() if not k.startswith("_") and k not in of_class}


def any_attributes(tensors: Iterable[Tensor]) -> bool:
    """Tell whether users gave attributes to one of these tensors. This is asked on each step, so it loops in C."""
    return not all(name.startswith("_") for name in set[str]().union(*map(vars, tensors)))


def plain_attributes(param: Tensor) -> dict[str, Any]:
    """The attributes that users gave to a parameter, such as `lr_mul`, as far as they are numbers and texts."""
    return {k: v for k, v in user_attributes(param).items() if isinstance(v, MARKS)}


def is_expert(param: Tensor) -> bool:
    """Whether a parameter is marked as Megatron and DeepSpeed mark experts: not to be averaged over all replicas."""
    return getattr(param, "allreduce", True) is False


def other_attributes(param: Tensor) -> dict[str, Any]:
    """The other attributes that users gave to a parameter, such as tensors and dicts."""
    return {k: v for k, v in user_attributes(param).items() if not isinstance(v, MARKS)}


def finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is a NaN or an infinity. The host waits for the device."""
    some = [own for own in tensors if own.numel()]  # an empty tensor has no largest element
    return bool(get_total_norm(some, math.inf).isfinite())
