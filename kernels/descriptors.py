"""Describes stacks of matrices as tensor descriptors (TMA), with the contiguous dim last."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def turned(x: Tensor) -> bool:
    """Tell whether the rows of [batch, rows, columns], not its columns, are the contiguous dim."""
    return x.stride(2) != 1


def step(x: Tensor) -> int:
    """Return by how many matrices a descriptor goes on: 0 if all matrices are the same one, which it describes once."""
    return int(x.stride(0) != 0 and x.shape[0] > 1)


def descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Describe blocks of a matrix of [batch, rows, columns]; if x is `turned`, all is transposed, `block` too.

    Elements outside of the matrix read as zeros and are not written. Rows have to begin at multiples of 16 bytes.
    """
    if turned(x):
        x, block = x.mT, (block[1], block[0])
    _, rows, columns = x.shape
    batch = x.shape[0] if step(x) else 1
    between = x.stride(0) if batch > 1 else rows * x.stride(1)
    return TensorDescriptor(x, [batch, rows, columns], [between, x.stride(1), 1], [1, *block])
