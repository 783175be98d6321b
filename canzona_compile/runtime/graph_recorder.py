"""Record what a stretch of a program launches as a CUDA graph.

A recording is begun on a stream of its own, but the work in it is put on a *work stream*, which forks from that stream
and joins it again. Libraries keep scratch memory per stream, and recorded products hold its address. Some
versions of torch free it while recordings need it: for the stream that a recording was begun on when that recording is
dropped (pytorch#193402), and for all streams when somebody asks, as Inductor does around CUDA graphs of its own. So
recordings begin on a stream that never has any, and work streams, which live as long as the process, get theirs from
memory that is never given back (`keep_scratch`).

The recordings of all programs of a thread share one pool of memory as long as there are any, so a program waits for
the one that ran before it (`GraphRecorder.take_turn`). Torch cannot use the handle of a pool again once its last
recording was dropped.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from canzona_compile.compat.garbage import not_collecting
from canzona_compile.compat.matmul_precision import put_back_on_error
from canzona_compile.compat.torch_private import end_allocation_to_pool
from canzona_compile.lowering.stream_sync import CALLER, COMPUTE, computes
from canzona_compile.runtime.streams import index_of, stream_named

Run = Callable[[], None]
ORIGIN = "record"  # the stream that recordings are begun on


@dataclass(eq=False, slots=True, weakref_slot=True)
class GraphPool:
    """The handle of the memory that all recordings of a thread on a device share."""

    handle: Any


DeviceThread = tuple[int, int]  # the index of a device, and a thread; nobody can record into one pool twice at a time
_pools: weakref.WeakValueDictionary[DeviceThread, GraphPool] = weakref.WeakValueDictionary()
_last: dict[DeviceThread, Any] = {}  # the stream on which a recorded program was launched last


def pool_of(device: int) -> GraphPool:
    """Return the pool of this thread on a device: that of the recordings that exist, or a new one."""
    place = device, threading.get_ident()
    pool = _pools.get(place)
    if pool is None:
        pool = _pools[place] = GraphPool(torch.cuda.graph_pool_handle())
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
    """Records stretches of programs.

    Args:
        device: the device of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make_room(self) -> None:
        """Give back memory that nobody uses: while a recording is made, torch gives back none, and takes new memory."""
        gc.collect()
        torch.cuda.empty_cache()

    def take_turn(self) -> None:
        """Let the current stream wait for the one on which a recorded program ran last: they use the same memory."""
        place, here = (index_of(self.device), threading.get_ident()), torch.cuda.current_stream(self.device)
        if (last := _last.get(place, here)) != here:
            here.wait_stream(last)
        _last[place] = here

    def record(self, run: Run, stream: str) -> Run:
        """Record a stretch, which ran before, and return what replays it on the current stream. If memory runs out, try
        it once more.

        Other threads, such as NCCL's watchdog, may use the device meanwhile. Only this thread may not do what cannot
        be recorded.
        """
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._record(run, stream)
        self.make_room()  # now that no error holds what the run computed
        return self._record(run, stream)

    def _record(self, run: Run, stream: str) -> RecordedStretch:
        index = index_of(self.device)
        pool, graph = pool_of(index), torch.cuda.CUDAGraph()
        caller = torch.cuda.current_stream(self.device)
        origin, work = stream_named(ORIGIN, index), stream_named(work_stream(stream), index)
        try:
            if computes(work_stream(stream)):  # other streams have no products
                work.wait_stream(caller)  # on which earlier stretches may use that memory now
                torch.cuda.set_stream(work)
                keep_scratch(self.device)
                caller.wait_stream(work)
            torch.cuda.set_stream(origin)
            origin.wait_stream(caller)  # the beginning writes to random generators, which CUDA graphs of the model read
            with not_collecting(), put_back_on_error():
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
        finally:
            torch.cuda.set_stream(caller)
            caller.wait_stream(origin)
        return RecordedStretch(graph, pool)


def work_stream(stream: str) -> str:
    """The name of the stream on which work of a stream is recorded. The caller's own may not be able to record."""
    return COMPUTE if stream == CALLER else stream


_scratch: dict[DeviceThread, Any] = {}  # no other memory comes from these pools


def keep_scratch(device: torch.device) -> None:
    """Let the current stream have scratch memory for products from a pool of ours, unless it has such memory.

    Torch may forget it, but the pool never gives its memory to anybody else: some megabytes, see docs/gpu.md.
    """
    place = index, _ = index_of(device), threading.get_ident()
    if place not in _scratch:
        _scratch[place] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(_scratch[place], index):
        square = torch.zeros(16, 16, dtype=torch.float32, device=device)
        torch.mm(square, square)  # takes that of cuBLAS
        torch.addmm(square[0], square, square)  # takes that of cuBLASLt


def clean_up(graph: Any, device: int, pool: GraphPool) -> None:
    """End what torch leaves open after a failed recording, because `CUDAGraph::capture_end` raises too early.

    Otherwise the allocator would behave as if the recording went on: memory that a stream has used would never be free
    again, and `empty_cache` would fail. In older versions of torch the random generator would refuse to draw numbers.
    The end of any recording corrects that, so this function makes a small one.
    """
    if not end_allocation_to_pool(device, pool.handle):  # torch left nothing open
        return
    broken.append(graph)  # it has to stay alive: allocators of pinned memory may still ask it about its stream
    small = torch.cuda.CUDAGraph()
    with torch.cuda.graph(small, stream=stream_named(ORIGIN, device), capture_error_mode="thread_local"):
        torch.zeros(1, device=torch.device("cuda", device))


broken: list[Any] = []  # CUDA graphs whose recording failed
