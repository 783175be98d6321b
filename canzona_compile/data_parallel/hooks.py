"""What ZeRO-1 hangs on the user's model: hooks and marks that leave themselves out of copies of it.

A copy of a model has no buckets. Its hooks would gather the parameters of the original, and they refer to process
groups, which cannot be saved. So a copy, in memory or in a file, gets hooks that do nothing and marks that are false.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from canzona_compile.compat.torch_private import outside_dynamo

MARK = "_canzona_zero1"  # on parameters whose gradients are already reduced


class Hook:
    """A hook of a module that ignores its arguments. `at_copy` may refuse that the model is copied or saved."""

    def __init__(self, call: Callable[[], None] | None = None, at_copy: Callable[[], None] | None = None) -> None:
        self._call, self._at_copy = call, at_copy

    @outside_dynamo
    def __call__(self, *_: Any) -> None:
        """Do it. In a compiled model the graph breaks here, and Dynamo does not trace what ranks do."""
        if self._call is not None:
            self._call()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        if self._at_copy is not None:
            self._at_copy()
        return Hook, ()


class ReadHook:
    """Calls a function with each parameter that code reads of a module, as `module.weight`, until `remove`."""

    def __init__(self, module: nn.Module, call: Callable[[Any], None]) -> None:
        self._module = weakref.ref(module)
        vars(module)["_parameters"] = WatchedParameters(module._parameters, call)

    def remove(self) -> None:
        """Give the module a plain dict again."""
        if (module := self._module()) is not None:
            vars(module)["_parameters"] = dict(module._parameters)


class WatchedParameters(dict[str, Any]):
    """The parameters of a module, by name; its copies are plain dicts.

    Iteration calls nothing: `zero_grad` and the like go through all parameters without reading their values.
    """

    def __init__(self, own: dict[str, Any], call: Callable[[Any], None]) -> None:
        super().__init__(own)
        self._call = call

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        self._read(param)
        return param

    @outside_dynamo
    def _read(self, param: Any) -> None:
        self._call(param)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()], None, None, Iterable[tuple[str, Any]]]:
        return dict, (), None, None, iter(self.items())


class Mark:
    """The value of `MARK`. Its copies are `False`, also where this package is not installed."""

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()
