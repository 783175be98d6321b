"""Collectives of devices: one call per rank and communicator, in the same order on all ranks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.fake_cuda.device import FakeDevice, current_device
from tests.fake_cuda.scheduler import DeviceError, Item, Queue, Scheduler
from tests.fake_cuda.tensors import DeviceTensor, plainly

# Torch 2.13 gave them new names.
RENAMED = hasattr(threaded.ProcessLocalGroup, "all_to_all_single")
ALL_TO_ALL = "all_to_all_single" if RENAMED else "alltoall_base"
REDUCE_SCATTER = "reduce_scatter_single" if RENAMED else "_reduce_scatter_base"
ALL_GATHER = "all_gather_single" if RENAMED else "_allgather_base"

Transfer = Callable[[dict[int, Any]], None]  # does a collective with what each rank gave


@dataclass(eq=False)
class Exchange:
    """One collective: what each rank called, and with what."""

    kind: str
    items: list[Item] = field(default_factory=list)
    given: dict[int, Any] = field(default_factory=dict)


class DeviceWork:
    """A collective that a rank has started."""

    def __init__(self, device: FakeDevice, item: Item) -> None:
        self.device, self.item = device, item

    def wait(self, *_: Any) -> bool:
        """Let the current stream wait for the collective. The host does not wait."""
        if self.device.capture is not None:
            raise DeviceError("a recording waits for a collective")
        queue = self.device.current.queue
        self.device.scheduler.put(Item(f"{queue.name} waits for {self.item.name}", queue, lambda: None, [self.item]))
        self.item.kept.clear()  # from here on, only the stream that waits is behind the collective
        self.device.scheduler.run_some()
        return True

    def is_completed(self) -> bool:
        return self.item.done


class Communicators:
    """All communicators of all ranks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.queues: dict[tuple[str, int], Queue] = {}
        self.calls: dict[str, list[Exchange]] = defaultdict(list)
        self.made: dict[tuple[str, int], int] = defaultdict(int)

    def start(self, kind: str, group: DeviceGroup, tensors: list[Tensor], given: Any, work: Transfer) -> DeviceWork:
        """Start a collective on the current device.

        Args:
            kind: which collective.
            group: its ranks.
            tensors: what it reads and writes. As torch does, it keeps them until a stream waits for it.
            given: what `work` needs of this rank.
            work: does it, with what all ranks gave.
        """
        name, rank, size = group.pg_name, group.rank(), group.size()
        device = current_device()
        if device.capture is not None:
            raise DeviceError(f"{kind} is recorded: NCCL would wait for peers that may not replay it")
        own = name, device.index
        if own not in self.queues:
            self.queues[own] = self.scheduler.queue(f"{name} of {device.index}")
        number = self.made[own]
        self.made[own] += 1
        if number == len(self.calls[name]):
            self.calls[name].append(Exchange(kind))
        call = self.calls[name][number]
        if call.kind != kind:
            raise DeviceError(f"{name}: rank {rank} calls {kind} where others call {call.kind}")
        call.given[rank] = given
        item = Item(f"{kind} {number} of {name}", self.queues[own], lambda: work(call.given), device.current.queue.tail)
        item.kept += tensors
        call.items.append(item)
        item.together, item.members = call.items, size
        self.scheduler.put(item)
        self.scheduler.run_some()
        return DeviceWork(device, item)


class DeviceGroup(threaded.ProcessLocalGroup):
    """A process group of threads that knows collectives of device tensors, too."""

    communicators: Communicators

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, device: Any) -> DeviceGroup:
        return self

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, received_sizes: Any, sent_sizes: Any, opts: Any = None
    ) -> Any:
        if not isinstance(received, DeviceTensor) or not isinstance(sent, DeviceTensor):
            return getattr(super(), ALL_TO_ALL)(received, sent, received_sizes, sent_sizes)
        even = [received.shape[0] // self.size()] * self.size()
        sizes = list(received_sizes or even), list(sent_sizes or even)
        for tensor, split in zip((received, sent), sizes, strict=True):
            if sum(split) != tensor.shape[0]:
                raise DeviceError(f"splits {split} of {tensor.shape[0]} elements")
        given = received.inner, sent.inner, *sizes
        return self.communicators.start("all_to_all", self, [received, sent], given, exchange)

    alltoall_base = all_to_all_single

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if not isinstance(tensors[0], DeviceTensor):
            return super().allreduce(tensors, *given_only(opts))
        combine = COMBINED[op_of(opts)]
        return self.communicators.start(
            "all_reduce", self, [tensors[0]], tensors[0].inner, lambda given: combine_all(given, combine)
        )

    def reduce_scatter(self, received: Any, sent: Any, opts: Any = None) -> Any:
        if not isinstance(received[0], DeviceTensor):
            return super().reduce_scatter(received, sent, *given_only(opts))
        combine = COMBINED[op_of(opts)]
        parts = [part.inner for part in sent[0]]
        return self.communicators.start(
            "reduce_scatter",
            self,
            [received[0], *sent[0]],
            (received[0].inner, parts),
            lambda given: combine_shards(given, combine),
        )

    def reduce_scatter_single(self, received: Tensor, sent: Tensor, opts: Any = None) -> Any:
        if not isinstance(received, DeviceTensor):
            return getattr(super(), REDUCE_SCATTER)(received, sent, *given_only(opts))
        return self.reduce_scatter([received], [equal_shards(sent, received, self.size())], opts)

    _reduce_scatter_base = reduce_scatter_single

    def allgather(self, received: Any, sent: Any, opts: Any = None) -> Any:
        if not isinstance(sent[0], DeviceTensor):
            return super().allgather(received, sent, *given_only(opts))
        given = [part.inner for part in received[0]], sent[0].inner
        return self.communicators.start("all_gather", self, [*received[0], sent[0]], given, give_shards)

    def all_gather_single(self, received: Tensor, sent: Tensor, opts: Any = None) -> Any:
        if not isinstance(sent, DeviceTensor):
            return getattr(super(), ALL_GATHER)(received, sent, *given_only(opts))
        return self.allgather([equal_shards(received, sent, self.size())], [sent], opts)

    _allgather_base = all_gather_single

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        if not isinstance(tensors[0], DeviceTensor):
            return super().broadcast(tensors, *given_only(opts))
        source = opts.rootRank
        return self.communicators.start(
            f"broadcast from {source}", self, [tensors[0]], tensors[0].inner, lambda given: copy_of(source, given)
        )


COMBINED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}


def given_only(options: Any) -> list[Any]:
    """The argument for options, if there are any."""
    return [] if options is None else [options]


def op_of(options: Any) -> Any:
    """What a reduction does with two values."""
    return dist.ReduceOp.SUM if options is None else options.reduceOp.op


def equal_shards(whole: Tensor, shard: Tensor, size: int) -> list[Tensor]:
    """What is each rank's of a whole tensor, where all have equally much."""
    if whole.numel() != size * shard.numel():
        raise DeviceError(f"{size} shards of {shard.numel()} elements are no {whole.numel()}")
    return list(whole.view(-1).split(shard.numel()))


def exchange(given: dict[int, Any]) -> None:
    """Move the bytes of an all-to-all."""
    with plainly():
        for to, (received, _, received_sizes, _) in given.items():
            at = 0
            for source in sorted(given):
                _, sent, _, sent_sizes = given[source]
                count = received_sizes[source]
                if sent_sizes[to] != count:
                    raise DeviceError(f"rank {source} sends {sent_sizes[to]} to {to}, which expects {count}")
                start = sum(sent_sizes[:to])
                received[at : at + count].copy_(sent[start : start + count])
                at += count


def combined(tensors: Iterable[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the tensors of all ranks, in the order of ranks."""
    found = list(tensors)
    if len({tensor.shape for tensor in found}) > 1:
        raise DeviceError(f"ranks reduce tensors of shapes {[tuple(tensor.shape) for tensor in found]}")
    return functools.reduce(combine, found)


def combine_all(given: dict[int, Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Give every rank what the tensors of all are together."""
    with plainly():
        total = combined((given[rank] for rank in sorted(given)), combine).clone()
        for tensor in given.values():
            tensor.copy_(total)


def combine_shards(given: dict[int, Any], combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Give every rank what its shard is of all ranks together."""
    with plainly():
        for to, (received, _) in given.items():
            received.copy_(checked(combined((given[rank][1][to] for rank in sorted(given)), combine), received))


def give_shards(given: dict[int, Any]) -> None:
    """Give every rank the shards of all."""
    with plainly():
        for parts, _ in given.values():
            for source, part in enumerate(parts):
                part.copy_(checked(given[source][1], part))


def copy_of(source: int, given: dict[int, Tensor]) -> None:
    """Give every rank the values of one."""
    with plainly():
        for rank, tensor in given.items():
            if rank != source:
                tensor.copy_(checked(given[source], tensor))


def checked(values: Tensor, target: Tensor) -> Tensor:
    """The values, if they are as many as the target has room for."""
    if values.shape != target.shape:
        raise DeviceError(f"a collective brings {tuple(values.shape)} to a rank that expects {tuple(target.shape)}")
    return values
