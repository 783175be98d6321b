"""Send Python values with tensors in them from one rank to others."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.compat.torch_private import pytree
from canzona_compile.ir.program_ops import Watch
from canzona_compile.replica.snapshot import ATOMS
from canzona_compile.tensors import memory_of

LARGE = 2**16  # bytes; tensors from this size on are sent as they are, smaller ones with the pickled values
ALIGNED = 16  # bytes; large tensors begin at multiples of it, so that any dtype may be read there


class LargeTensor(NamedTuple):
    """Stands in pickled values for a tensor whose elements are sent beside them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    start: int  # the byte at which its elements begin

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def send_values(values: Any, source: int, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> Any:
    """Send values from one rank to all ranks of a group. A collective.

    Plain values and small tensors are pickled. The elements of large tensors are sent from device to device.

    Args:
        values: on the source, what can be pickled; one tensor in several places stays one. Other ranks give anything.
        device: the device of the group's communicator.

    Returns:
        The values; tensors that lie on a GPU there lie on `device` here.
    """

    def sent(data: Tensor) -> Tensor:
        if len(data):
            watch.wait(dist.broadcast(data, source, group=group, async_op=True))
        return data

    here = dist.get_rank() == source
    form, large = without_large(values) if here else (None, {})
    pickled = packed(form) if here else torch.empty(0, dtype=torch.uint8, device="cpu")
    end = max((own.start + own.bytes for own in large), default=0)
    sizes = sent(torch.tensor([len(pickled), end], device=device)).tolist()
    pickled = sent(pickled.to(device) if here else torch.empty(sizes[0], dtype=torch.uint8, device=device))
    elements = torch.empty(sizes[1], dtype=torch.uint8, device=device)
    for own, tensor in large.items():
        elements[own.start : own.start + own.bytes].view(own.dtype).copy_(tensor.reshape(-1))
    sent(elements)
    return values if here else with_large(unpacked(pickled.cpu(), device), elements)


def without_large(values: Any) -> tuple[Any, dict[LargeTensor, Tensor]]:
    """Put a `LargeTensor` in the place of every large tensor that is nothing but its elements.

    Nothing is replaced where tensors may be in objects, or share memory with others: pickle keeps both.
    """
    leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(values)}.values()
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(isinstance(leaf, (Tensor, *ATOMS)) for leaf in leaves) or len(memory_of(*tensors)) < len(tensors):
        return values, {}
    found: dict[int, LargeTensor] = {}
    large: dict[LargeTensor, Tensor] = {}

    def form(value: Any) -> Any:
        if not is_large(value):
            return value
        if id(value) not in found:
            end = max((own.start + own.bytes for own in large), default=0)
            own = LargeTensor(tuple(value.shape), value.dtype, value.device.type == "cpu", -(-end // ALIGNED) * ALIGNED)
            found[id(value)], large[own] = own, value
        return found[id(value)]

    return pytree.tree_map(form, values), large


def is_large(value: Any) -> bool:
    """Whether a value is a plain tensor, contiguous and without history, that is sent beside the pickled values."""
    plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad and not vars(value)
    return plain and value.nbytes >= LARGE and value.is_contiguous() and not value.is_quantized


def with_large(form: Any, elements: Tensor) -> Any:
    """Put tensors in the places of `LargeTensor`s, given the elements of all."""
    made: dict[int, Tensor] = {}

    def tensor(value: Any) -> Any:
        if not isinstance(value, LargeTensor):
            return value
        if value.start not in made:
            own = elements[value.start : value.start + value.bytes].view(value.dtype).view(value.shape).clone()
            made[value.start] = own.cpu() if value.on_host else own
        return made[value.start]

    return pytree.tree_map(tensor, form, is_leaf=lambda value: isinstance(value, LargeTensor))


def packed(values: Any) -> Tensor:
    """Write values as bytes. A view of a larger tensor is sent alone."""

    def alone(value: Any) -> Any:
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.numel() * value.itemsize:
            return value.clone()
        return value

    file = io.BytesIO()
    torch.save(pytree.tree_map(alone, values), file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(data: Tensor, device: torch.device) -> Any:
    """Read what `packed` wrote."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=place, weights_only=False)
