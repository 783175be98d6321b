"""Refuse optimizers that communicate by themselves, before they do."""

from __future__ import annotations

from typing import Any

from canzona_compile.compat.torch_private import TorchDispatchMode
from canzona_compile.errors import UnsupportedOptimizer


class NoCollectives(TorchDispatchMode):
    """Inside this mode no operator communicates. Code may catch the error; then it is raised where the mode ends.

    Raises:
        UnsupportedOptimizer: an operator does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refused: UnsupportedOptimizer | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.check(func)
        return func(*args, **(kwargs or {}))

    def check(self, func: Any) -> None:
        """Raise UnsupportedOptimizer if an operator communicates."""
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._refused = UnsupportedOptimizer(
                f"the optimizer communicates by itself ({func})",
                hint="wrap the single-device version of the optimizer; canzona_compile adds the communication",
            )
            raise self._refused

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self._refused is not None and error is not self._refused:
            raise self._refused
