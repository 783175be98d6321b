"""Stacks of matrices as tensor descriptors (TMA): as they lie in memory, the contiguous dim last."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def turned(x: Tensor) -> bool:
    """Whether the rows of [batch, rows, columns], not its columns, lie together."""
    return x.stride(2) != 1


def step(x: Tensor) -> int:
    """How far a descriptor goes on per matrix: 0 for one that is the same everywhere, which is described once."""
    return int(x.stride(0) != 0 and x.shape[0] > 1)


def descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Blocks of one matrix of [batch, rows, columns]; of its transpose, with `block` turned too, if x is `turned`.

    What is outside reads as zeros and is not written. Rows have to begin at multiples of 16 bytes.
    """
    if turned(x):
        x, block = x.mT, (block[1], block[0])
    _, rows, columns = x.shape
    batch = x.shape[0] if step(x) else 1
    between = x.stride(0) if batch > 1 else rows * x.stride(1)
    return TensorDescriptor(x, [batch, rows, columns], [between, x.stride(1), 1], [1, *block])
