"""The memory of a device, as torch's caching allocator gives it away.

A block whose last tensor dies may be given to the next tensor of the *stream that it was made on*, so whatever that
stream does next may overwrite it. A collective holds its tensors until it is done or a stream waits for it, as torch's
process groups do. If another stream than the maker waits, nothing keeps the maker from the memory any longer. This
allocator overwrites it, with NaN, at a moment that the scheduler chooses: a read that should have been waited for, or
of a value that should have been kept, is a read of NaN. New blocks hold NaN, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fake_cuda.scheduler import Item, Queue


class Block:
    """A piece of memory on a device.

    Args:
        memory: all bytes of it, a tensor on the CPU.
        maker: the stream that it was made on; None if it outlives all streams.
        pool: the memory of recordings that it belongs to; None for ordinary memory.
    """

    def __init__(self, memory: Tensor, maker: Queue | None, pool: Any = None) -> None:
        self.memory, self.maker, self.pool = memory, maker, pool


def poison(memory: Tensor) -> None:
    """Fill memory with what is NaN in every float format, and a number that no index is in others."""
    memory.view(torch.uint8).fill_(255)


def empty_like_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """New memory on the CPU that holds NaN: all of it as bytes, and as a tensor."""
    reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    count = 0 if 0 in tuple(size) else reach
    memory = torch.full((count * dtype.itemsize,), 255, dtype=torch.uint8)
    return memory, memory.view(dtype).as_strided(tuple(size), tuple(stride))


def when_freed(block: Block, then: Callable[[Tensor, Queue, Any], None]) -> None:
    """Call `then` with what is left of a block once no tensor holds it."""
    maker = block.maker
    if maker is not None:
        weakref.finalize(block, then, block.memory, maker, block.pool).atexit = False


def overwritten(memory: Tensor, maker: Queue) -> Item:
    """The item that overwrites memory once its maker comes to the present."""
    return Item(f"the memory of {maker.name} is used anew", None, lambda: poison(memory), maker.tail)
