"""The streams of a rank program: CUDA streams on a GPU, and the order of the program itself on other devices.

Nothing here makes the host wait. The caller's stream is the stream that is current when a program begins. It
produces the gradients and parameters, and it waits for all other streams at the end of the program. It also runs what
the program has on `compute`: so the memory of intermediate values is that which the model's passes use, too. A stream
of its own would keep memory of its own, and on a full GPU torch would free and allocate all of it again in every step.

Buffers are allocated once, so events alone decide which stream may use a buffer. A tensor that one stream computes
and another stream reads is kept by the program until its own stream has waited for the reader (`stream_sync`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.program import StreamSet
from canzona_compile.lowering.stream_sync import CALLER, COMPUTE, PACK

FIRST = -1  # a higher priority than 0, which is the default of CUDA


class InOrder:
    """Streams of a program that runs on one stream, or on a device without streams.

    Every call takes effect after the calls before it, so events have nothing to do.
    """

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def switch(self, name: str) -> None:
        pass

    def record(self, event: int) -> None:
        pass

    def wait(self, event: int) -> None:
        pass


class CudaStreams:
    """CUDA streams and events of one program. Each event is created once and recorded again on every run.

    Args:
        device: the CUDA device.
    """

    def __init__(self, wanted: StreamSet, device: torch.device) -> None:
        self.device, self._index = device, index_of(device)
        self._apart = [name for name in wanted.names if name != COMPUTE]
        self._streams: dict[str, Any] = {}
        self._events = [torch.cuda.Event() for _ in range(wanted.events)]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run a program inside this context. On exit, also after an error, the caller's stream is current again."""
        caller = torch.cuda.current_stream(self.device)
        apart = [stream_named(name, self._index) for name in self._apart]
        self._streams = {**dict(zip(self._apart, apart, strict=True)), CALLER: caller, COMPUTE: caller}
        try:
            yield
        except BaseException:
            torch.cuda.set_stream(caller)
            for stream in apart:  # work that was launched still reads the caller's tensors
                caller.wait_stream(stream)
            raise
        finally:
            torch.cuda.set_stream(caller)
            self._streams = {}

    def switch(self, name: str) -> None:
        """Make the stream with this name the current one."""
        torch.cuda.set_stream(self._streams[name])

    def record(self, event: int) -> None:
        """Record the event with this index on the current stream."""
        self._events[event].record()

    def wait(self, event: int) -> None:
        """Make the current stream wait for the event with this index."""
        self._events[event].wait()


def streams_for(wanted: StreamSet | None, device: torch.device) -> InOrder | CudaStreams:
    """Create the streams of a program on a device.

    Args:
        wanted: the streams and events of the program; None if it uses one stream.
        device: the device of the program.

    Returns:
        `CudaStreams` if the program asks for streams and the device is a CUDA device, else `InOrder`.
    """
    return InOrder() if wanted is None or device.type != "cuda" else CudaStreams(wanted, device)


def index_of(device: torch.device) -> int:
    """Return the index of a CUDA device; the current device stands for a device without an index."""
    return torch.cuda.current_device() if device.index is None else device.index


def check_not_capturing(device: torch.device) -> None:
    """Raise if the user records a CUDA graph: a replay of it would repeat one step's numbers and decisions."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CanzonaError(
            "step() was called inside of a CUDA graph capture, but it decides on the host what it launches",
            hint="call it outside of the capture; canzona_compile records CUDA graphs of its own",
        )


def stream_named(name: str, device: int) -> Any:
    """Return the CUDA stream with this name.

    There is one such stream per thread and device, so all programs of a thread share the memory that is cached for it.
    What another thread launches must not land in a recording of this one. The stream of copies has the higher
    priority: copies feed collectives, and they are short compared with matrix products.

    Args:
        device: the index of the CUDA device.
    """
    return stream_of_thread(name, device, threading.get_ident())


stream_of_thread = functools.cache(
    lambda name, device, _thread: torch.cuda.Stream(device, priority=FIRST if name == PACK else 0)
)
