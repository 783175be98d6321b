"""One device: its streams, what is recorded on it, and its memory."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fake_cuda.graphs import Capture, MemoryPool
from tests.fake_cuda.memory import Block, empty_like_strided, overwritten, when_freed
from tests.fake_cuda.scheduler import DeviceError, Item, Queue, Scheduler


class FakeStream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.queue = device, device.scheduler.queue(name)

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent()
        event.record(other)
        event.wait(self)

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.device.finish(self)


class FakeEvent:
    """Stands in for `torch.cuda.Event`: what the stream had to do when the event was recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timed, self.happened = enable_timing, 0
        self.items: list[Item] = []
        self.capture: Capture | None = None
        self.clock: dict[Queue, int] = {}

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or current_device().current
        capture = stream.device.capture
        self.capture = None
        if capture is not None and stream.queue in capture.lanes:
            self.capture, self.clock = capture, capture.clock_of(stream.queue)
        else:
            if self.timed:
                scheduler = stream.device.scheduler
                stream.device.put("a timed event", lambda: setattr(self, "happened", scheduler.count))
            self.items = stream.queue.tail

    def elapsed_time(self, end: FakeEvent) -> float:
        """Stands in for milliseconds: how many items all devices did between the two events."""
        if any(not item.done for event in (self, end) for item in event.items):
            raise RuntimeError("the event has not happened yet")
        return float(end.happened - self.happened)

    def wait(self, stream: FakeStream | None = None) -> None:
        stream = stream or current_device().current
        device = stream.device
        if self.capture is not None:
            if device.capture is not self.capture:
                raise DeviceError("an event of a recording is waited for outside of it")
            device.capture.join(stream.queue, self.clock)
        elif device.capture is not None and stream.queue in device.capture.lanes:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        elif any(not item.done for item in self.items):
            device.scheduler.put(Item("an event", stream.queue, lambda: None, list(self.items)))


class FakeMemPool:
    """Stands in for `torch.cuda.MemPool`: as long as it exists, nobody else gets its memory."""

    dead = False


@dataclass(eq=False)
class Workspace:
    """The library's scratch memory for products on one stream.

    Attributes:
        home: the pool that it is from; None for ordinary memory.
        forgotten: whether torch has given it back.
    """

    home: Callable[[], FakeMemPool | MemoryPool | None]
    forgotten: bool = False

    @property
    def freed(self) -> bool:
        """Whether others may have its memory."""
        home = self.home()
        return self.forgotten and (home is None or home.dead)


class FakeDevice:
    """Stands in for a GPU.

    Args:
        index: of the device; also the rank that it belongs to.
        scheduler: decides when work is done.
        block: lets other ranks go on until a condition is met.

    Attributes:
        current: the stream on which work of this thread is put.
        capture: what is being recorded; None if nothing is.
        pools: the memory of recordings by handle.
        workspaces: for each stream that ran a product, the scratch memory of the library for it.
        scratch: the pool that memory is taken from in `use_mem_pool`; None outside of it.
        offset: of the random numbers of all recordings, as up to torch 2.12.
        capacity: the bytes of its memory; None for as many as anybody wants.
        cached: by stream, the bytes that are free and that only this stream gets.
        failures: what the next ends of recordings raise.
    """

    def __init__(self, index: int, scheduler: Scheduler, block: Callable[[Callable[[], bool]], None]) -> None:
        self.index, self.scheduler, self.block = index, scheduler, block
        self.default = FakeStream(self, f"the default stream of {index}")
        self._of_thread = threading.local()
        self.capture: Capture | None = None
        self.pools: dict[tuple[int, int], MemoryPool] = {}
        self.workspaces: dict[Queue, Workspace] = {}
        self.scratch: FakeMemPool | None = None
        self.offset = 0
        self.capacity: int | None = None
        self.cached: Counter[Queue] = Counter()
        self.failures: list[Exception] = []
        self.free: dict[Queue, list[Tensor]] = {}  # by maker, memory that it may use anew
        self.graveyard: list[Tensor] = []  # memory stays, since generated kernels work on addresses
        self.room = 1 << 40  # bytes that are free before the first plan
        self.held = self.most = 0  # bytes of tensors that are alive and of pools, now and at most
        self.calls: Counter[str] = Counter()  # of names of `torch.cuda`, and of replays
        self.launches: Counter[str] = Counter()  # of work that was put on a stream, by name
        self.shown = False  # whether parameters say that they lie here, see `model_on_device`
        self.state: list[Any] = []  # of optimizers; as long as a tensor is in it, its memory is not used anew
        self.copied: list[int] = []  # the bytes of each copy from the host
        self.waits = 0  # how often the host waited for the device
        self.sync_mode = "default"  # what `torch.cuda.set_sync_debug_mode` was told
        self.forced = False  # whether `finish` may wait now without counting: the test itself looks

    @property
    def current(self) -> FakeStream:
        found: FakeStream = getattr(self._of_thread, "stream", self.default)
        return found

    @current.setter
    def current(self, stream: FakeStream) -> None:
        self._of_thread.stream = stream

    def put(self, name: str, work: Callable[[], None]) -> None:
        """Let the current stream do some work. What other threads put on other streams than a recording's runs."""
        queue = self.current.queue
        self.launches[name] += 1
        if self.capture is not None and (queue in self.capture.lanes or self.capture.thread == threading.get_ident()):
            self.capture.put(name, queue, work)
            return
        self.scheduler.put(Item(f"{name} on {queue.name}", queue, work, []))
        self.scheduler.run_some()

    def wait_for(self, items: Sequence[Item]) -> None:
        """Let the host wait until some items are done."""
        for item in items:
            while not item.done:
                if not self.scheduler.advance(item):
                    self.block(lambda item=item: item.done)  # type: ignore[misc]

    def finish(self, stream: FakeStream) -> None:
        """Let the host wait until a stream has done all of its work."""
        if self.capture is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        if not self.forced:
            self.waits += 1
            if self.sync_mode == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
        self.wait_for(stream.queue.tail)

    def finish_all(self) -> None:
        """Let the host wait until all streams have done all of their work."""
        if self.capture is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        for queue in self.scheduler.queues:
            if queue.name.endswith(f" of {self.index}"):
                self.wait_for(queue.tail)

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Block]:
        """New memory of the current stream."""
        capture = self.capture
        if capture is None:  # a recording takes memory of its pool
            for old in self.free.pop(self.current.queue, ()):
                self.scheduler.put(overwritten(old, self.current.queue))
        memory, tensor = empty_like_strided(size, stride, dtype)
        self.graveyard.append(memory)
        if capture is not None and self.current.queue not in capture.lanes:
            raise DeviceError(f"memory on {self.current.queue.name}, which takes no part in the recording")
        taken = rounded(memory)
        if capture is None:
            self.cached[self.current.queue] -= min(taken, self.cached[self.current.queue])
            self.held += self.fitting(taken)
        else:
            self.held += capture.pool.take(self.current.queue, taken, self.fitting)
        self.most = max(self.most, self.held)
        block = Block(memory, self.current.queue, None if capture is None else capture.pool)
        when_freed(block, self.freed)
        return tensor, block

    def fitting(self, size: int) -> int:
        """The bytes, if there is room for them. While something is recorded, none that are cached are given back."""
        if self.capacity is not None and self.held + self.cached.total() + size > self.capacity:
            if self.capture is None:
                self.cached.clear()
            if self.held + self.cached.total() + size > self.capacity:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        return size

    def freed(self, memory: Tensor, maker: Queue, pool: MemoryPool | None) -> None:
        """Give memory back: the next tensor that is made on its stream may lie in it."""
        if pool is not None:
            pool.held[maker] -= rounded(memory)
            if self.capture is not None and self.capture.pool is pool:
                self.capture.overwrite(memory, maker)
            pool.free.append((memory, maker))
            return
        self.held -= rounded(memory)
        self.cached[maker] += rounded(memory)
        if not self.scheduler.prompt and self.capture is None:
            self.free.setdefault(maker, []).append(memory)

    def workspace(self) -> Workspace:
        """The library's scratch memory for products on the current stream."""
        queue = self.current.queue
        if queue not in self.workspaces:
            home = self.scratch or (self.capture and self.capture.pool)
            self.workspaces[queue] = Workspace(weakref.ref(home) if home else lambda: None)
        return self.workspaces[queue]

    def forget_workspaces(self) -> None:
        """Stands in for `torch._C._cuda_clearCublasWorkspaces`, which Inductor calls around its own recordings."""
        for own in self.workspaces.values():
            own.forgotten = True
        self.workspaces.clear()


def rounded(memory: Tensor) -> int:
    """The bytes that torch's allocator gives away for some memory."""
    return -(-memory.numel() // 512) * 512


_devices: dict[int, Any] = {}  # by the id of a thread


def has_device() -> bool:
    """Whether this thread is a rank."""
    return threading.get_ident() in _devices


def current_device() -> FakeDevice:
    """The device of the rank that asks."""
    found: FakeDevice = _devices[threading.get_ident()]
    return found


def use_device(device: FakeDevice | None) -> None:
    """Make a device that of this thread."""
    if device is None:
        _devices.pop(threading.get_ident(), None)
    else:
        _devices[threading.get_ident()] = device
