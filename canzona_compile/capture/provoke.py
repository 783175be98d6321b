"""Provoke the errors of operators, to see whether a step catches them."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from canzona_compile.compat.torch_private import OpOverload, TorchDispatchMode

# Operators that fail for some values of their operands.
FALLIBLE = {
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_eigvals",
    "linalg_eig",
    "_linalg_svd",
    "linalg_lstsq",
    "cholesky",
}


def fallible(node: fx.Node) -> bool:
    """Tell whether the operator that a node calls fails for some values of its operands."""
    return isinstance(node.target, OpOverload) and name_of(node.target) in FALLIBLE


def name_of(operator: Any) -> str:
    """Return the name of an operator without namespace and overload."""
    return str(operator._schema.name.partition("::")[2])


class Provoked(LinAlgError):  # type: ignore[misc]
    """An error that no operator had. It is of the type that those of linear algebra raise."""


class Provoker(TorchDispatchMode):
    """Inside this mode one call fails of those that may.

    Args:
        place: how many such calls succeed before.

    Attributes:
        failed: the operator that failed; empty before that.
    """

    def __init__(self, place: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed = ""
        self._left = place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.failed and name_of(func) in FALLIBLE:
            if not self._left:
                self.failed = str(func)
                raise Provoked("provoked, to see whether the step catches it")
            self._left -= 1
        return func(*args, **(kwargs or {}))
