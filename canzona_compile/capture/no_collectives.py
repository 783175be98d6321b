"""Refuse optimizers that communicate by themselves, before they do."""

from __future__ import annotations

from typing import Any

from canzona_compile.compat.torch_private import TorchDispatchMode
from canzona_compile.errors import UnsupportedOptimizer


class NoCollectives(TorchDispatchMode):
    """Inside this mode no operator communicates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_local(func)
        return func(*args, **(kwargs or {}))


def check_local(func: Any) -> None:
    """Raise UnsupportedOptimizer if an operator communicates."""
    if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
        raise UnsupportedOptimizer(
            f"the optimizer communicates by itself ({func})",
            hint="wrap the single-device version of the optimizer; canzona_compile adds the communication",
        )
