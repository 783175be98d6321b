"""The streams of a rank program: real ones on CUDA, elsewhere the order of the program itself.

Nothing here lets the host wait. The caller's stream is the one that is current when a program begins: gradients and
parameters come from it, and it waits for all others at the end.

Memory. Buffers are made once, so that events alone decide who may use them. Values that one stream computes and
another reads are lent (`Tensor.record_stream`), which is what torch's allocator asks for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from canzona_compile.ir.program import StreamSet
from canzona_compile.lowering.stream_sync import CALLER, PACK

FIRST = -1  # CUDA's higher priority


class InOrder:
    """One stream, or none: every call is done after those before it, so that events say nothing."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def switch(self, name: str) -> None:
        pass

    def record(self, event: int) -> None:
        pass

    def wait(self, event: int) -> None:
        pass

    def lend(self, tensors: Sequence[Tensor]) -> None:
        pass


class CudaStreams:
    """CUDA streams and events. Events are made once and recorded anew on each run."""

    def __init__(self, wanted: StreamSet, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, Any] = {name: stream_named(name, index_of(device)) for name in wanted.names}
        self._events = [torch.cuda.Event() for _ in range(wanted.events)]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """While open a program runs; afterwards the caller's stream is current again, also if it raised."""
        caller = self._streams[CALLER] = torch.cuda.current_stream(self.device)
        try:
            yield
        except BaseException:
            torch.cuda.set_stream(caller)
            if not torch.cuda.is_current_stream_capturing():  # what was begun still reads the caller's tensors
                for name in self._streams.keys() - {CALLER}:
                    caller.wait_stream(self._streams[name])
            raise
        finally:
            torch.cuda.set_stream(caller)
            del self._streams[CALLER]

    def switch(self, name: str) -> None:
        torch.cuda.set_stream(self._streams[name])

    def record(self, event: int) -> None:
        self._events[event].record()

    def wait(self, event: int) -> None:
        self._events[event].wait()

    def lend(self, tensors: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(current)


def streams_for(wanted: StreamSet | None, device: torch.device) -> InOrder | CudaStreams:
    """What `wanted` is on a device."""
    return InOrder() if wanted is None or device.type != "cuda" else CudaStreams(wanted, device)


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def stream_named(name: str, device: int) -> Any:
    """The stream of this name, one per process and device, so that all programs share its memory.

    Copies feed collectives, and are short beside products: they go first.
    """
    return torch.cuda.Stream(device, priority=FIRST if name == PACK else 0)
