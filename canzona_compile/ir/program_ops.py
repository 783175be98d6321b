"""The vocabulary of rank programs: what their generated code calls beside ATen.

Functions of lists of tensors, one entry per task, and of buffers. They decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

Index = tuple[Any, ...]


class EagerContext(Protocol):
    """Where an eager step finds what it needs of its task beside the gathered tensors."""

    def eager_optimizer(self) -> Optimizer:
        """The optimizer whose own code takes the step."""

    def param_group_of(self, task: str) -> dict[str, Any]:
        """The parameter group of the task, with the hyperparameters of this step."""

    def state_of(self, task: str) -> dict[str, Any]:
        """The state that the step reads and writes."""

    def drew_random_numbers(self, task: str) -> None:
        """Hear that the step drew random numbers; raises UnsupportedOptimizer where that cannot be."""


@dataclass(frozen=True, eq=False, slots=True)
class EagerTask:
    """A task for an eager step: its name, and where the step finds the rest."""

    name: str
    context: EagerContext


class Watch(Protocol):
    """Waits for a collective, and turns a peer's alarm into an error instead of waiting for ever."""

    def wait(self, work: dist.Work) -> None: ...


class Streams(Protocol):
    """The streams of a program, one of which is current, and its events by number."""

    def switch(self, name: str) -> None: ...
    def record(self, event: int) -> None: ...
    def wait(self, event: int) -> None: ...
    def lend(self, tensors: Sequence[Tensor]) -> None: ...


def each(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`op` for every task: lists of tensors (or of tasks for eager steps) are zipped, all else is the same for all.

    Returns a list, or a tuple of lists where `op` returns tuples.
    """
    single = [not per_task(a) for a in args]
    shared = {k: v for k, v in kwargs.items() if not per_task(v)}
    own = {k: v for k, v in kwargs.items() if k not in shared}
    first = next(iter(own.values())) if all(single) else args[single.index(False)]
    count = length(first)
    results = []
    for i in range(count):
        mine = [a if s else pick(a, i) for a, s in zip(args, single, strict=True)]
        results.append(op(*mine, **shared, **{k: pick(v, i) for k, v in own.items()}))
    if results and isinstance(results[0], tuple):
        return tuple(map(list, zip(*results, strict=True)))
    return results


def per_task(value: Any) -> bool:
    """Is it a list with an entry per task, or a list of such lists?"""
    if not isinstance(value, list | tuple) or not value:
        return False
    return isinstance(value[0], (Tensor, EagerTask)) or nested(value)


def nested(value: Sequence[Any]) -> bool:
    """Is it a list of lists per task: the operands of a concatenation, or indices, some of which are None?"""
    return any(per_task(own) for own in value if isinstance(own, list | tuple))


def pick(value: Any, i: int) -> Any:
    """Entry i, or of a list of lists entry i of each."""
    return [own if own is None else pick(own, i) for own in value] if nested(value) else value[i]


def length(value: Sequence[Any]) -> int:
    """How many tasks it has entries for."""
    return length(next(own for own in value if own is not None)) if nested(value) else len(value)


def stack(values: Sequence[Tensor]) -> Tensor:
    """n tensors [...] to one [n, ...]."""
    return torch.stack(list(values))


def unstack(values: Tensor) -> list[Tensor]:
    """One tensor [n, ...] to n views [...]."""
    return list(values.unbind(0))


def spread(values: Tensor, ndim: int) -> Tensor:
    """[n, *rest] with ones between, so that it broadcasts against [n, ...] of `ndim` + 1 dims."""
    missing = ndim + 1 - values.ndim
    return values.reshape(values.shape[0], *(1,) * missing, *values.shape[1:])


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, casting as needed: packing, unpacking, committing."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def repeated(value: Any, count: int) -> list[Any]:
    """The same for every task."""
    return [value] * count


def parts(values: Tensor | Sequence[Tensor], index: Sequence[Index]) -> list[Tensor]:
    """Views of parts: of one stacked tensor, or, with the task's number first, of a list."""
    if isinstance(values, Tensor):
        return [values[i] for i in index]
    return [values[i[0]][i[1:]] for i in index]


def compact(values: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies of parts that are strided: strided operands are other code, and other bits."""
    return [v.contiguous() for v in values]


def start_all_to_all(
    received: Tensor, sent: Tensor, received_bytes: list[int], sent_bytes: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """Start one fused exchange of bytes. The buffers must stay untouched until `finish`."""
    work: dist.Work = dist.all_to_all_single(received, sent, received_bytes, sent_bytes, group=group, async_op=True)
    return work


def start_meeting(device: str, group: dist.ProcessGroup) -> dist.Work:
    """Start the smallest collective there is: it ends when every rank has come."""
    work: dist.Work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    return work


def finish(work: dist.Work, watch: Watch) -> None:
    """Wait for a collective: the host on CPU, the current stream on CUDA."""
    watch.wait(work)


# -- streams, in programs for CUDA alone ----------------------------------------------------------


def on_stream(streams: Streams, name: str) -> None:
    """What follows runs on this stream."""
    streams.switch(name)


def record(streams: Streams, event: int) -> None:
    """The event happens when the current stream has done what it was given so far."""
    streams.record(event)


def wait(streams: Streams, event: int) -> None:
    """The current stream goes on when the event has happened; the host does not wait."""
    streams.wait(event)


def lend(values: Any, streams: Streams) -> None:
    """The current stream reads tensors of another one: their memory is not used anew before it has done so."""
    streams.lend(tensors_in(values))


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors of nested lists and tuples."""
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in tensors_in(v)] if isinstance(values, list | tuple) else []
