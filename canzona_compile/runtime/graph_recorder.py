"""Record what a stretch of a program launches as a CUDA graph.

A recording is begun on a stream of its own, but the work in it is put on a *work stream*, which forks from that stream
and joins it again. Work streams live as long as the process, and every stretch ran on its work stream before it is
recorded. So the scratch memory that libraries keep per stream is there already. Torch frees the scratch memory of the
stream that a recording was begun on when the recording is dropped, although other recordings may use it
(pytorch#193402); that stream never has any.

The recordings of all programs share one pool of memory as long as there are any. Torch cannot use the handle of a pool
again once its last recording was dropped.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from canzona_compile.compat.torch_private import end_allocation_to_pool
from canzona_compile.lowering.stream_sync import CALLER, COMPUTE
from canzona_compile.runtime.streams import index_of, stream_named

Run = Callable[[], None]
ORIGIN = "record"  # the stream that recordings are begun on


@dataclass(eq=False, slots=True, weakref_slot=True)
class GraphPool:
    """The handle of the memory that all recordings on a device share."""

    handle: Any


_pools: weakref.WeakValueDictionary[int, GraphPool] = weakref.WeakValueDictionary()  # by the index of the device


def pool_of(device: int) -> GraphPool:
    """Return the pool of a device: that of the recordings that exist, or a new one."""
    pool = _pools.get(device)
    if pool is None:
        pool = _pools[device] = GraphPool(torch.cuda.graph_pool_handle())
    return pool


@dataclass(frozen=True, eq=False, slots=True)
class RecordedStretch:
    """A CUDA graph, and the pool that it keeps alive."""

    graph: Any
    pool: GraphPool

    def __call__(self) -> None:
        """Replay the graph on the current stream."""
        self.graph.replay()


class GraphRecorder:
    """Rehearses and records stretches of programs.

    Args:
        device: the device of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rehearse(self, run: Run, stream: str) -> None:
        """Run a stretch on its work stream. The current stream waits for it.

        Args:
            run: launches the work.
            stream: the name of the stream on which the program has it.
        """
        caller, work = torch.cuda.current_stream(self.device), self._work(stream)
        if work == caller:
            run()
            return
        work.wait_stream(caller)
        try:
            torch.cuda.set_stream(work)
            run()
        finally:
            torch.cuda.set_stream(caller)
            caller.wait_stream(work)

    def record(self, run: Run, stream: str) -> Run:
        """Record a stretch.

        Other threads, such as NCCL's watchdog, may use the device meanwhile. Only this thread may not do what cannot
        be recorded.

        Args:
            run: launches the work. It was rehearsed.
            stream: the name of the stream on which the program has it.

        Returns:
            A function that replays the recording on the current stream.

        Raises:
            Exception: something in the run cannot be recorded. Nothing was executed, and the device is as it was
                before.
        """
        index = index_of(self.device)
        pool, graph = pool_of(index), torch.cuda.CUDAGraph()
        caller = torch.cuda.current_stream(self.device)
        origin, work = stream_named(ORIGIN, index), self._work(stream)
        try:
            torch.cuda.set_stream(origin)
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                work.wait_stream(origin)
                torch.cuda.set_stream(work)
                run()
                origin.wait_stream(work)
            except BaseException:
                torch.cuda.set_stream(origin)
                with contextlib.suppress(RuntimeError):  # what ended the run says more
                    graph.capture_end()
                raise
            torch.cuda.set_stream(origin)
            graph.capture_end()
        except BaseException:
            torch.cuda.set_stream(caller)
            clean_up(graph, index, pool)
            raise
        torch.cuda.set_stream(caller)
        return RecordedStretch(graph, pool)

    def _work(self, stream: str) -> Any:
        """The work stream for a stream of a program."""
        return stream_named(work_stream(stream), index_of(self.device))


def work_stream(stream: str) -> str:
    """The name of the stream on which work of a stream is recorded. The caller's own may not be able to record."""
    return COMPUTE if stream == CALLER else stream


def clean_up(graph: Any, device: int, pool: GraphPool) -> None:
    """End what torch leaves open after a failed recording, because `CUDAGraph::capture_end` raises too early.

    Otherwise the allocator would behave as if the recording went on: memory that a stream has used would never be free
    again, and `empty_cache` would fail. In older versions of torch the random generator would refuse to draw numbers.
    The end of any recording corrects that, so this function makes a small one.

    Args:
        graph: the CUDA graph whose recording failed.
        device: the index of the device.
        pool: the memory pool of the recording.
    """
    if not end_allocation_to_pool(device, pool.handle):  # torch left nothing open
        return
    broken.append(graph)  # it has to stay alive: allocators of pinned memory may still ask it about its stream
    small = torch.cuda.CUDAGraph()
    with torch.cuda.graph(small, stream=stream_named(ORIGIN, device), capture_error_mode="thread_local"):
        torch.zeros(1, device=torch.device("cuda", device))


broken: list[Any] = []  # CUDA graphs whose recording failed
