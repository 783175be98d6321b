"""The functions that rank programs call beside ATen operators.

They work on lists of tensors, with one entry per task, and on buffers. They make no decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, fx

from canzona_compile.compat.duplex import all_to_all
from canzona_compile.compat.matmul_precision import Kept, matmul_precision, put_back, set_precision
from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.ir.layout import Shape

Index = tuple[Any, ...]
MATRIX_ALIGNMENT = 64  # bytes: whole matrices begin at multiples, because libraries choose their rounding by that


class EagerContext(Protocol):
    """Steps whole parameters by the optimizer's own code."""

    def step(self, task: str, param: Tensor, grad: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Take the step of a task. Neither tensor is written."""


@dataclass(frozen=True, eq=False, slots=True)
class EagerTask:
    """A task that runs an eager step: its name, and the context of the step."""

    name: str
    context: EagerContext


class Watch(Protocol):
    """Waits for a collective. If a peer raises an alarm, it raises an error and does not wait for ever."""

    def wait(self, work: dist.Work) -> None: ...


class Streams(Protocol):
    """The streams of a program, one of which is current, and its events by number."""

    def switch(self, name: str) -> None: ...
    def record(self, event: int) -> None: ...
    def wait(self, event: int) -> None: ...


def each(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `op` once per task.

    Args:
        args, kwargs: its arguments. Of a list with an entry per task (tensors, or `EagerTask`s), each call gets one
            entry. All calls get every other argument as it is.

    Returns:
        A list of what the calls return. If these are tuples or lists, a tuple with such a list per entry.
    """
    columns = [entries(a) for a in args]
    named = {k: own for k, v in kwargs.items() if (own := entries(v)) is not None}
    (count,) = {len(own) for own in (*columns, *named.values()) if own is not None}
    shared = {k: v for k, v in kwargs.items() if k not in named}
    call = op._op if isinstance(op, OpOverload) else op  # what an overload's own __call__ calls, once per task
    if shared:
        call = partial(call, **shared)
    rows = [repeat(a, count) if own is None else own for a, own in zip(args, columns, strict=True)]
    if named:
        places = zip(*named.values(), strict=True)
        results = [call(*row, **dict(zip(named, own, strict=True))) for *row, own in zip(*rows, places, strict=True)]
    else:
        results = list(map(call, *rows))
    if results and isinstance(results[0], (tuple, list)):
        return tuple(map(list, zip(*results, strict=True)))
    return NumberPerTask(results) if results and isinstance(results[0], int | float) else results


class NumberPerTask(list[Any]):
    """A number per task, such as what each reads of its counter; other lists of numbers are one argument for all."""


def entries(value: Any) -> Sequence[Any] | None:
    """The entry of every task, if a value is a list that has one per task, or a list of such lists; else None.

    Lists of lists are the operands of a concatenation, and indices, some of which may be None: each task gets the list
    of their entries.
    """
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if isinstance(value[0], (Tensor, EagerTask)) or isinstance(value, NumberPerTask):
        return value
    columns = [entries(own) for own in value]
    count = next((len(own) for own in columns if own is not None), None)
    if count is None:
        return None
    rows = zip(
        *(repeat(one, count) if own is None else own for one, own in zip(value, columns, strict=True)), strict=True
    )
    return list(map(list, rows))


def stack(values: Sequence[Tensor]) -> Tensor:
    """Stack n tensors [...] to one tensor [n, ...].

    Transposed matrices stay transposed in memory. So nothing is read or written across its rows, and libraries, which
    round products of others otherwise, keep their bits.
    """
    first = values[0]
    if not first.is_contiguous() and first.ndim == 2 and first.mT.is_contiguous():
        return torch.stack([value.mT for value in values]).mT
    return torch.stack(list(values))


def join(values: Tensor | Sequence[Tensor], dims: int) -> Tensor:
    """Join n stacks, whose first `dims` dims count matrices, to one stack of all matrices.

    Transposed matrices stay transposed, as in `stack`. One stack is not copied.
    """
    if isinstance(values, Tensor):
        return values.flatten(0, dims)
    flat = [value.flatten(0, dims - 1) for value in values]
    if len(flat) == 1:
        return flat[0]
    first = flat[0]
    if not first.is_contiguous() and first.ndim == 3 and first.mT.is_contiguous():
        return torch.cat([value.mT for value in flat]).mT
    return torch.cat(flat)


def matrices(values: Sequence[Tensor], dims: int) -> list[Tensor]:
    """List the matrices of n stacks, aligned as they are alone; one of zeros if there are none.

    Args:
        dims: how many of the first dims count matrices.
    """
    found = [own for value in values for own in value.flatten(0, dims - 1).unbind()]
    if not found:
        return [values[0].new_zeros(values[0].shape[dims:])]
    if found[0].numel() * found[0].itemsize % MATRIX_ALIGNMENT:
        return [own.clone() for own in found]
    return found


def for_each(values: Sequence[Tensor], count: int) -> list[Tensor]:
    """List a value of each task once for each of its `count` matrices."""
    return [value for value in values for _ in range(max(1, count))]


def divide(values: Tensor | Sequence[Tensor], lead: Shape, tasks: int) -> list[Tensor]:
    """Divide the values of all matrices among tasks that are stacks, which begin with the dims `lead`."""
    count = math.prod(lead)
    whole = values if isinstance(values, Tensor) else stack(values)
    return [whole[i * count : (i + 1) * count].unflatten(0, lead) for i in range(tasks)]


def unstack(values: Tensor) -> list[Tensor]:
    """Split one tensor [n, ...] into n views [...]."""
    return list(values.unbind(0))


def spread(values: Tensor, ndim: int) -> Tensor:
    """View [n, *rest] as [n, 1, ..., 1, *rest] with `ndim` + 1 dims, so that it broadcasts against such a stack."""
    missing = ndim + 1 - values.ndim
    return values.reshape(values.shape[0], *(1,) * missing, *values.shape[1:])


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, and cast it if the dtypes differ."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def repeated(value: Any, count: int) -> list[Any]:
    """A list that holds the same value for every task."""
    return [value] * count


def parts(values: Tensor | Sequence[Tensor], index: Sequence[Index]) -> list[Tensor]:
    """Views of parts of computed values.

    Args:
        values: one tensor [n, ...], or a list of n tensors.
        index: the index of each part. For a list, the first entry of an index is the position in the list.
    """
    if isinstance(values, Tensor):
        return [values[i] for i in index]
    return [values[i[0]][i[1:]] for i in index]


def compact(values: Sequence[Tensor]) -> list[Tensor]:
    """Make every tensor contiguous. Operators run other code on strided operands, which may give other bits."""
    return [v.contiguous() for v in values]


def start_all_to_all(
    received: Tensor, sent: Tensor, received_bytes: list[int], sent_bytes: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """Start one all-to-all of bytes. No one may touch the buffers until `finish`.

    Args:
        received_bytes: bytes from each rank of the process group.
        sent_bytes: bytes to each rank of the process group.
    """
    work: dist.Work = all_to_all(received, sent, received_bytes, sent_bytes, group)
    return work


def set_matmul_precision(precision: str) -> Kept | None:
    """Set torch's float32 matmul precision, and return what puts the one before back."""
    return set_precision(precision)


def put_precision_back(kept: Kept | None) -> None:
    """Undo `set_matmul_precision`."""
    put_back(kept)


def start_meeting(device: str, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-reduce of one element, which ends when every rank of the process group has started it."""
    work: dist.Work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    return work


def finish(work: dist.Work, watch: Watch) -> None:
    """Wait for a collective. The host waits on CPU, the current stream on CUDA."""
    watch.wait(work)


# -- streams, only in programs for CUDA ----------------------------------------------------------


def on_stream(streams: Streams, name: str) -> None:
    """Make a stream the current one: the calls that follow run on it."""
    streams.switch(name)


def record(streams: Streams, event: int) -> None:
    """Record an event on the current stream. It happens when the stream has done all work that it has so far."""
    streams.record(event)


def wait(streams: Streams, event: int) -> None:
    """Let the current stream wait for an event. The host does not wait."""
    streams.wait(event)


def keep(values: Sequence[Any]) -> None:
    """Do nothing. Values that this takes were not freed before: other streams read them."""


@dataclass(frozen=True)
class ProductAt:
    """Target of a graph node: an operator that runs in a given float32 matmul precision.

    Analyses see through it. Passes that rewrite products leave it alone.
    """

    operator: OpOverload
    precision: str

    def __post_init__(self) -> None:
        name = f"{self.operator._schema.name.partition('::')[2]}_at_{self.precision}"
        object.__setattr__(self, "__name__", name)  # FX writes and prints it
        object.__setattr__(self, "__qualname__", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator, and put torch's precision back."""
        with matmul_precision(self.precision):
            return self.operator(*args, **kwargs)


def operator_of(node: fx.Node) -> Any:
    """Return the operator that a node calls, in whichever precision."""
    target: Any = node.target
    return target.operator if isinstance(target, ProductAt) else target
