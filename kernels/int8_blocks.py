"""Round blocks of rows to int8 and back: one kernel each way, which reads and writes each element once.

`canzona_compile.ir.storage` has the plain torch reference, `encode` and `decode`, whose bits these have. Its operators
move some 40 bytes per element of float32, both ways together; the kernels move 10.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from canzona_compile.kernels.tensor_args import guard, machine


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these tensors: in the memory of a GPU for which there is Triton, contiguous."""
    return all(
        t.untyped_storage().device.type == "cuda" and t.is_contiguous() and t.numel() and machine(t.device) is not None
        for t in tensors
    )


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """The values [..., n] of codes int8 [..., n] and scales float32 [..., n / block], rounded up."""
    from canzona_compile.kernels.int8_blocks_triton import launch_decode  # here, as there may be no Triton

    out = torch.empty_like(codes, dtype=dtype)
    with guard(codes):
        launch_decode(codes, scales, out, block)
    return out


def encode(value: Tensor, into: Sequence[Tensor], block: int, least: float, low: int) -> None:
    """Write codes and scales of a value [..., n].

    Args:
        least: the least scale.
        low: the bits of a scale that are rounded up.
    """
    from canzona_compile.kernels.int8_blocks_triton import launch_encode  # here, as there may be no Triton

    codes, scales = into
    with guard(value):
        launch_encode(value, codes, scales, block, least, low)
