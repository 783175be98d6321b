"""Collectives of devices: one call per rank and communicator, in the same order on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.fake_cuda.device import FakeDevice, current_device
from tests.fake_cuda.scheduler import DeviceError, Item, Queue, Scheduler
from tests.fake_cuda.tensors import DeviceTensor, plainly

# Torch 2.13 gave it a new name.
ALL_TO_ALL = "all_to_all_single" if hasattr(threaded.ProcessLocalGroup, "all_to_all_single") else "alltoall_base"


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

    def start(
        self, kind: str, name: str, rank: int, size: int, given: Any, work: Callable[[dict[int, Any]], None]
    ) -> DeviceWork:
        """Start a collective on the current device.

        Args:
            kind: which collective.
            name: of the communicator.
            rank: of the caller within it.
            size: how many ranks it has.
            given: what `work` needs of this rank.
            work: does it, with what all ranks gave.
        """
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
        call.items.append(item)
        item.together, item.members = call.items, size
        self.scheduler.put(item)
        self.scheduler.run_some()
        return DeviceWork(device, item)


class DeviceGroup(threaded.ProcessLocalGroup):
    """A process group of threads that knows collectives of device tensors, too."""

    communicators: Communicators

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
            tensor.block.lent |= {self.queue()} - {None}
        given = received.inner, sent.inner, *sizes
        return self.communicators.start("all_to_all", self.pg_name, self.rank(), self.size(), given, exchange)

    alltoall_base = all_to_all_single

    def queue(self) -> Any:
        return self.communicators.queues.get((self.pg_name, current_device().index))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if not isinstance(tensors[0], DeviceTensor):
            return super().allreduce(tensors, *([] if opts is None else [opts]))
        tensor = tensors[0]
        return self.communicators.start("all_reduce", self.pg_name, self.rank(), self.size(), tensor.inner, add_up)


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


def add_up(given: dict[int, Any]) -> None:
    """Add the tensors of all ranks."""
    with plainly():
        total = sum(tensor.clone() for tensor in given.values())
        for tensor in given.values():
            tensor.copy_(total)
