"""Products of matrices in a float32 matmul precision of their own, for steps that compute in several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.ir.program_ops import set_matmul_precision


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Inside this context, torch's float32 matmul precision is this one; empty changes nothing."""
    before = set_matmul_precision(precision or torch.get_float32_matmul_precision())
    try:
        yield
    finally:
        set_matmul_precision(before)


@dataclass(frozen=True)
class ProductAt:
    """Target of a graph node: an operator that runs in a given float32 matmul precision.

    Analyses see through it. Passes that rewrite products leave it alone.

    Args:
        operator: the operator.
        precision: "highest", "high" or "medium", as `torch.set_float32_matmul_precision` takes it.
    """

    operator: OpOverload
    precision: str

    def __post_init__(self) -> None:
        name = f"{self.operator._schema.name.partition('::')[2]}_at_{self.precision}"
        object.__setattr__(self, "__name__", name)  # FX writes and prints it
        object.__setattr__(self, "__qualname__", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator, and put torch's precision back."""
        with matmul_precision(self.precision):
            return self.operator(*args, **kwargs)


def operator_of(node: fx.Node) -> Any:
    """Return the operator that a node calls, in whichever precision."""
    return node.target.operator if isinstance(node.target, ProductAt) else node.target
