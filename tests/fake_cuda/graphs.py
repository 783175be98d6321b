"""CUDA graphs of the stand-in: what is put on streams while one is recorded, and its replays."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tests.fake_cuda.memory import poison
from tests.fake_cuda.scheduler import DeviceError, Item, Queue

if TYPE_CHECKING:
    from tests.fake_cuda.device import FakeDevice

HANDLES = itertools.count(1)


@dataclass(eq=False)
class MemoryPool:
    """The memory of recordings that share a handle.

    Attributes:
        users: how many recordings it has.
        dead: whether its last recording was dropped; torch cannot record into it again.
        free: memory that later recordings may use, with the stream that it was made on.
        held: by stream, the bytes of tensors that are alive.
        kept: by stream, the most bytes that were alive: the pool gives none of them back before it is dead, and memory
            of one stream serves no other one.
    """

    users: int = 0
    dead: bool = False
    free: list[tuple[Tensor, Queue]] = field(default_factory=list)
    held: Counter[Queue] = field(default_factory=Counter)
    kept: Counter[Queue] = field(default_factory=Counter)

    def take(self, queue: Queue, size: int, fitting: Callable[[int], int]) -> int:
        """Give away memory of a stream; returns how many bytes the pool had to get for that, if there are so many."""
        more = fitting(max(0, self.held[queue] + size - self.kept[queue]))
        self.held[queue] += size
        self.kept[queue] += more
        return more


@dataclass(eq=False)
class GraphNode:
    """One piece of recorded work, and the numbers of those that come before it."""

    name: str
    work: Callable[[], None]
    needs: tuple[int, ...]


class Capture:
    """A recording while it is made.

    Args:
        origin: the stream that the recording was begun on.
        pool: gives it memory.

    Attributes:
        lanes: the streams that take part; for each, what is done of every lane when its next work begins.
        nodes: what was recorded.
    """

    def __init__(self, origin: Queue, pool: MemoryPool) -> None:
        self.origin, self.pool, self.thread = origin, pool, threading.get_ident()
        self.lanes: dict[Queue, dict[Queue, int]] = {origin: {}}
        self.nodes: list[GraphNode] = []
        self.found = list(pool.free)  # what earlier recordings left; this one may use it

    def clock_of(self, lane: Queue) -> dict[Queue, int]:
        """What is done of every lane, by the number of its last node and one, when a lane comes to the present."""
        return dict(self.lanes[lane])

    def join(self, lane: Queue, clock: dict[Queue, int]) -> None:
        """Let a stream wait for an event of this recording; so it takes part."""
        own = self.lanes.setdefault(lane, {})
        for other, at in clock.items():
            own[other] = max(own.get(other, 0), at)

    def put(self, name: str, lane: Queue, work: Callable[[], None]) -> None:
        """Record some work on a stream."""
        if lane not in self.lanes:
            raise DeviceError(f"{name} on {lane.name}, which takes no part in the recording")
        needs = tuple(at - 1 for at in self.lanes[lane].values() if at)
        self.nodes.append(GraphNode(name, work, needs))
        self.lanes[lane][lane] = len(self.nodes)

    def overwrite(self, memory: Tensor, lane: Queue) -> None:
        """Memory of a stream is free: its next work in this recording may use it, and all that comes after that."""
        needs = tuple(at - 1 for at in self.lanes[lane].values() if at)
        self.nodes.append(GraphNode("memory is used anew", lambda: poison(memory), needs))

    def check_end(self) -> None:
        """Raise unless the origin waits for all streams that took part."""
        own = self.lanes[self.origin]
        for lane, clock in self.lanes.items():
            if clock.get(lane, 0) > own.get(lane, 0):
                raise RuntimeError(f"capturing stream has unjoined work: {lane.name}")


class FakeGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    device: FakeDevice

    def __init__(self) -> None:
        self.capture: Capture | None = None
        self.ended = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        from tests.fake_cuda.device import current_device

        self.device = device = current_device()
        if device.capture is not None:
            raise DeviceError("a recording within a recording")
        if device.current is device.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        memory = device.pools.setdefault(pool or (next(HANDLES), 0), MemoryPool())
        if memory.dead:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        device.put("random numbers of recordings", lambda: setattr(device, "offset", 0))
        self.capture = device.capture = Capture(device.current.queue, memory)

    def capture_end(self) -> None:
        device, capture = self.device, self.capture
        assert capture is not None
        device.capture = None
        if device.current.queue is not capture.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if device.failures:
            raise device.failures.pop(0)
        capture.check_end()
        capture.pool.users += 1
        self.ended = True
        weakref.finalize(self, drop, device, capture).atexit = False

    def replay(self) -> None:
        """Put the recorded work on the current stream once more."""
        capture, device = self.capture, self.device
        assert capture is not None
        assert self.ended
        device.calls["CUDAGraph.replay"] += 1
        if device.capture is not None:
            raise DeviceError("a replay within a recording")
        scheduler, queue = device.scheduler, device.current.queue
        begin = scheduler.put(Item(f"a recording begins on {queue.name}", queue, lambda: None, []))
        made: list[Item] = []
        for node in capture.nodes:
            needs = [made[i] for i in node.needs] or [begin]
            made.append(scheduler.put(Item(f"{node.name} in a recording on {queue.name}", None, node.work, needs)))
        for memory, maker in capture.found if not scheduler.prompt else ():
            if maker in capture.lanes:
                made.append(
                    scheduler.put(Item("a recording uses free memory", None, lambda m=memory: poison(m), [begin]))  # type: ignore[misc]
                )
        scheduler.put(Item(f"a recording ends on {queue.name}", queue, lambda: None, [begin, *made]))
        scheduler.run_some()


def drop(device: FakeDevice, capture: Capture) -> None:
    """What torch does when a recording is dropped.

    It frees the library's workspace of the stream that the recording was made on, whoever else uses it, and the pool
    with its last recording.
    """
    workspace = device.workspaces.pop(capture.origin, None)
    if workspace is not None:
        workspace.forgotten = True
    capture.pool.users -= 1
    capture.pool.dead = capture.pool.users == 0
    if capture.pool.dead:
        device.held -= capture.pool.kept.total()
