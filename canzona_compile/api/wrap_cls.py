"""`wrap_cls`: for frameworks that take the class of an optimizer and build the optimizer themselves."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar, Unpack

from torch import nn
from torch.optim import Optimizer

from canzona_compile.api.wrap import wrap
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.options import WrapOptions, made_options
from canzona_compile.replica.twin import check_step_signature

Opt = TypeVar("Opt", bound=Optimizer)


def wrap_cls(
    optimizer_class: type[Opt], *, model: nn.Module | None = None, **options: Unpack[WrapOptions]
) -> type[Opt]:
    """Wrap an optimizer class, for frameworks that construct the optimizer themselves.

    Calling the new class returns `wrap(optimizer_class(...), **options)`.

    Args:
        optimizer_class: any class of optimizers that `wrap` takes.
        model: as in `wrap`.
        options: as in `wrap`.

    Returns:
        A subclass of `optimizer_class`, because frameworks ask for a subclass and treat other callables differently.
        It is only for calling: it takes the arguments of `optimizer_class` and returns what `wrap` returns.

    Raises:
        CanzonaError: `optimizer_class` is not an optimizer class, is already wrapped, or evaluates its closure several
            times per step; or an option is impossible. Errors that depend on parameters are raised when the class is
            called.
        TypeError: `wrap` has no such option.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise CanzonaError(
            f"wrap_cls takes a subclass of torch.optim.Optimizer, not {told(optimizer_class)}",
            hint="to wrap an optimizer that already exists, call wrap(optimizer)",
        )
    if hasattr(optimizer_class, "_canzona_plain_class"):
        raise CanzonaError(f"{optimizer_class.__name__} is already wrapped", hint="pass the plain optimizer class")
    check_step_signature(optimizer_class)
    made_options("wrap", WrapOptions.__optional_keys__, options)

    def build(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        """Its result is not an instance of `cls`, so Python calls no `__init__` on it a second time."""
        return wrap(optimizer_class(*args, **kwargs), model=model, **options)

    def refuse(cls: type[Any], **kwargs: Any) -> None:
        raise CanzonaError(
            f"the class from wrap_cls({optimizer_class.__name__}) cannot be subclassed",
            hint=f"subclass {optimizer_class.__name__}, then call wrap_cls on the subclass",
        )

    members = {
        "__new__": build,
        "__init_subclass__": refuse,
        "__module__": optimizer_class.__module__,
        "__doc__": optimizer_class.__doc__,
        "__signature__": inspect.signature(optimizer_class),
        "_canzona_plain_class": optimizer_class,
    }
    made: type[Opt] = type(f"Canzona{optimizer_class.__name__}", (optimizer_class,), members)
    return made


def told(thing: object) -> str:
    """Name what was given instead of a class, for an error message."""
    return thing.__name__ if isinstance(thing, type) else f"a {type(thing).__name__}"
