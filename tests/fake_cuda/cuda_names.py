"""The names of `torch.cuda` that the runtime may call, for the stand-in; a steady step calls no other one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from canzona_compile.codegen import launch
from canzona_compile.kernels import tensor_args
from canzona_compile.runtime import graph_recorder, streams
from tests.fake_cuda.device import FakeDevice, FakeEvent, FakeMemPool, FakeStream, current_device, has_device
from tests.fake_cuda.graphs import HANDLES, FakeGraph
from tests.fake_cuda.tensors import DeviceTensor, plainly

NAMES = itertools.count()
_index = threading.local()


def index_of(device: Any) -> int:
    """The index of a device; the current one's if it has none."""
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return current_index() if found is None else found


def current_index() -> int:
    """The index of the current CUDA device of this thread, 0 unless somebody has set another one."""
    found: int = getattr(_index, "value", 0)
    return found


def own(device: Any = None) -> FakeDevice:
    """This rank's device; every other one is another rank's."""
    found = current_device()
    assert index_of(device) == found.index, f"rank {found.index} uses the device of rank {index_of(device)}"
    return found


class OnIndex:
    """Stands in for `torch.cuda.device`. A context can be entered many times, as torch's can."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)
        self.before: list[int] = []

    def __enter__(self) -> None:
        self.before.append(current_index())
        _index.value = self.index

    def __exit__(self, *_: object) -> None:
        _index.value = self.before.pop()


def stream_made(device: Any = None, priority: int = 0) -> FakeStream:
    """Stands in for `torch.cuda.Stream`."""
    where = own(device)
    return FakeStream(where, f"stream {next(NAMES)} of {where.index}")


def set_stream(stream: FakeStream) -> None:
    stream.device.current = stream


@contextlib.contextmanager
def on_stream(stream: FakeStream) -> Iterator[None]:
    """Stands in for `torch.cuda.stream`."""
    before, stream.device.current = stream.device.current, stream
    try:
        yield
    finally:
        stream.device.current = before


@contextlib.contextmanager
def recording(graph: FakeGraph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    """Stands in for `torch.cuda.graph`."""
    with on_stream(stream):
        graph.capture_begin(pool)
        try:
            yield
        finally:
            graph.capture_end()


@contextlib.contextmanager
def from_pool(pool: FakeMemPool, device: Any = None) -> Iterator[None]:
    """Stands in for `torch.cuda.use_mem_pool`."""
    where = own(device)
    where.scratch = pool
    try:
        yield
    finally:
        where.scratch = None


def is_capturing() -> bool:
    device = current_device()
    return device.capture is not None and device.current.queue in device.capture.lanes


NAMED: dict[str, Callable[..., Any]] = {
    "Stream": stream_made,
    "Event": FakeEvent,
    "CUDAGraph": FakeGraph,
    "MemPool": FakeMemPool,
    "use_mem_pool": from_pool,
    "empty_cache": lambda: current_device().cached.clear(),
    "current_stream": lambda device=None: own(device).current,
    "default_stream": lambda device=None: own(device).default,
    "set_stream": set_stream,
    "stream": on_stream,
    "device": OnIndex,
    "current_device": current_index,
    "graph": recording,
    "graph_pool_handle": lambda: (0, next(HANDLES)),
    "is_current_stream_capturing": is_capturing,
    "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=2, major=9, minor=0),
    "memory_allocated": lambda device=None: own(device).held,
    "set_sync_debug_mode": lambda mode: setattr(own(), "sync_mode", mode),
    "_sleep": lambda cycles: None,  # the seed decides how long work takes
    "mem_get_info": lambda device=None: (current_device().room, 1 << 40),
    "memory_reserved": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "synchronize": lambda device=None: own(device).finish_all(),
}


def patched_once() -> Any:
    """Inside this context, a launch, the interpreter patches the language once, and not for each function that a kernel
    calls, which would take half of a test's time."""
    from triton.runtime import interpreter

    real = iter([interpreter._patch_lang])
    return mock.patch.object(interpreter, "_patch_lang", lambda function: next(real, lambda _: None)(function))


class LaterKernel:
    """A generated kernel of the stand-in: it reads its tables when its turn comes, as a launch does."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*tables: DeviceTensor, **options: Any) -> None:
            inner = [t.inner if isinstance(t, DeviceTensor) else t for t in tables]

            def work() -> None:
                import numpy as np

                with plainly(), np.errstate(all="ignore"), patched_once():
                    self.kernel[grid](*inner, **options)

            if isinstance(tables[0], DeviceTensor):
                current_device().put("a generated kernel", work)
            else:
                work()

        return start


@contextlib.contextmanager
def cuda_replaced() -> Iterator[None]:
    """Inside this context `torch.cuda` is the stand-in, and every device counts its rank's calls by name.

    Functions that the stand-in lacks are torch's own, and are counted as well.
    """
    real_loaded = launch.loaded
    lacking = {k: v for k, v in vars(torch.cuda).items() if inspect.isfunction(v) and k[0] != "_" and k not in NAMED}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            if has_device():
                current_device().calls[name] += 1
            return function(*args, **kwargs)

        return called

    with contextlib.ExitStack() as stack:
        for name, value in (NAMED | lacking).items():
            made = value if name == "MemPool" else counted(name, value)  # Dynamo of 2.15 asks for its instances
            stack.enter_context(mock.patch.object(torch.cuda, name, made))
        stack.enter_context(mock.patch.object(launch, "loaded", lambda text: LaterKernel(real_loaded(text))))
        stack.enter_context(mock.patch.object(tensor_args, "machine", return_value=None))
        for cached in (streams.stream_of_thread, tensor_args.decide):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        for known in (graph_recorder._pools, graph_recorder._scratch, graph_recorder._last):
            known.clear()  # type: ignore[attr-defined]  # of devices that are gone, as other processes would be
            stack.callback(known.clear)  # type: ignore[attr-defined]
        yield
