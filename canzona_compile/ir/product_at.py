"""Products of matrices in a float32 matmul precision of their own, for steps that compute in several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from canzona_compile.compat.matmul_precision import matmul_precision
from canzona_compile.compat.torch_private import OpOverload


@dataclass(frozen=True)
class ProductAt:
    """Target of a graph node: an operator that runs in a given float32 matmul precision.

    Analyses see through it. Passes that rewrite products leave it alone.
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
