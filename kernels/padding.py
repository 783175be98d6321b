"""Pads matrices with zeros to multiples of 16, once, at the cast to the dtype of the computation.

Rows and columns of zeros stay zero through products, sums and scalings of X, X X^T and their polynomials without a
constant term, and add exact zeros to the sums of other elements. Results of Newton-Schulz and Gram iterations
of a padded matrix hold those of the matrix in their corner. A kernel whose rows are not aligned loses its
asynchronous copies."""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLE = 16


def padded_size(size: int) -> int:
    """Return the next multiple of 16: 16 for 1..16, 0 for 0."""
    return -(-size // MULTIPLE) * MULTIPLE


def pad_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a new contiguous [..., Mp, Np] of `dtype`: zeros with x, [..., M, N], in the upper left corner.

    One pass over the data: the cast is the copy. Nothing but the border is written twice.
    """
    rows, columns = x.shape[-2:]
    out = x.new_empty(*x.shape[:-2], padded_size(rows), padded_size(columns), dtype=dtype)
    corner(out, rows, columns).copy_(x)
    out[..., rows:, :].zero_()
    out[..., :rows, columns:].zero_()
    return out


def corner(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the view [..., rows, columns] of a padded tensor that holds the values."""
    return x[..., :rows, :columns]
