"""Computes products in all bits of float32, whatever the caller allows elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager

from canzona_compile.compat.matmul_precision import matmul_precision


def full_precision() -> AbstractContextManager[None]:
    """Keep float32 products in the block from being rounded to TF32 or bfloat16, on CUDA and on CPU.

    TF32 keeps 10 bits of each factor. An eigenvalue a million times smaller than the largest one then comes out as
    noise, even as a negative number, and an inverse root lives on the small ones.
    """
    return matmul_precision("highest")
