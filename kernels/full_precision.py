"""Computes products in all bits of float32, whatever the caller allows elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Keep float32 products in the block from being rounded to TF32 or bfloat16, on CUDA and on CPU.

    TF32 keeps 10 bits of each factor. An eigenvalue a million times smaller than the largest one then comes out as
    noise, even as a negative number, and an inverse root lives on the small ones.

    torch has an old switch for all backends and a new one for each, and complains if both were used. This uses the old
    switch if torch lets it be read, and changes nothing if that switch is at full precision already.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set the new switches alone
        matmul = torch.backends.cuda.matmul
        kept = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = kept
        return
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)
