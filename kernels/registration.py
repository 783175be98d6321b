"""Registers the operators `canzona::...` with torch's dispatcher, which calls their kernels without a detour.

`torch.library.custom_op` does more for every call, in Python: it looks whether gradients are wanted and whether a
result shares memory with an operand. On a CPU a call of `canzona::sym_gemm` then costs 27 us beyond its own work, and
7 us this way; with a summand it is 47 and 13 us (torch 2.13, medians of 25 rounds in turn on one core). A step on a GPU
calls dozens, and the host has to be ahead of the device. Nobody asks these operators for gradients, they write to
nothing they are given, and their results are new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from canzona_compile.compat.torch_private import OpOverload

NAMESPACE = "canzona"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

Kernel = Callable[..., Any]


def register(schema: str, fake: Kernel, kernel: Kernel, cuda: Kernel | None = None) -> OpOverload:
    """Define an operator.

    Args:
        schema: `name(arguments) -> results`, without the namespace. It has to say that nothing is mutated.
        fake: makes empty results from fake tensors or tensors on the meta device, and raises ValueError where operands
            do not fit.
        kernel: computes it: on CPU if there is one for CUDA, else everywhere.
        cuda: computes it on CUDA.

    Returns:
        What graphs call.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd" if cuda is None else "CPU")
    if cuda is not None:
        LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    made = getattr(getattr(torch.ops, NAMESPACE), name).default
    assert isinstance(made, OpOverload)
    return made
