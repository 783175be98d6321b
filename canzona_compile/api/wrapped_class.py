"""The class that a wrapped optimizer gets: its steps go through canzona_compile, all else stays as it was."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from canzona_compile.api.handle import Canzona
from canzona_compile.compat.torch_private import outside_dynamo
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.ir.options import Options
from canzona_compile.replica.raised import freed_on_error
from canzona_compile.replica.twin import check_step_signature
from canzona_compile.session.checkpoints import fitted
from canzona_compile.session.params import check_differentiable
from canzona_compile.session.session import Session

Opt = TypeVar("Opt", bound=Optimizer)


def is_wrapped(optimizer: object) -> bool:
    """Return whether an object is a wrapped optimizer."""
    return hasattr(type(optimizer), "_canzona_plain_class")


def check_wrappable(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step cannot be replaced."""
    kind = type(optimizer)
    check_step_signature(kind)
    if "_optimizer_step_pre_hooks" not in vars(optimizer):  # a proxy forwards `hasattr` to its inner optimizer
        raise UnsupportedOptimizer(
            f"{kind.__name__} has not called torch.optim.Optimizer.__init__",
            hint="if it is a wrapper around another optimizer, wrap that one",
        )
    own = optimizer.__dict__.get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        raise CanzonaError(
            "something replaced optimizer.step on the object, so the step that wrap installs would never be called",
            hint="call wrap before whatever replaces optimizer.step, such as a framework's prepare() or torch.compile",
        )
    if kind.__module__ == "torch.distributed.optim.zero_redundancy_optimizer":
        raise UnsupportedOptimizer(
            "ZeroRedundancyOptimizer communicates by itself",
            hint="use the plain optimizer class inside it, and pass replicate= to wrap",
        )
    check_differentiable(optimizer)


def attach(optimizer: Opt, handle: Canzona) -> Opt:
    """Give an optimizer the class whose steps go through `handle.session`, and the attribute `canzona`."""
    plain: Any = type(optimizer)
    optimizer.__class__ = wrapped_class(plain)
    optimizer.canzona = handle  # type: ignore[attr-defined]
    rebind_scheduled_step(optimizer)
    return optimizer


def rebind_scheduled_step(optimizer: Optimizer) -> None:
    """Make the counting `step` that a scheduler put on the instance before `wrap` call the new class."""
    patched = optimizer.__dict__.get("step")
    if patched is None or not getattr(patched, "_wrapped_by_lr_sched", False):
        return
    own = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = own()
        assert alive is not None
        alive._opt_called = True  # type: ignore[attr-defined]
        return type(alive).step(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = step


def saved_by(optimizer: Any, plain: type[Optimizer]) -> type[Optimizer]:
    """The class whose state dicts a wrapped optimizer has. What its own adds, objects of matrices have in theirs."""
    return plain if optimizer.canzona.session.options.one_per_matrix is None else Optimizer


@functools.cache
def wrapped_class(plain: type[Optimizer]) -> type[Any]:
    """Make the subclass of an optimizer class whose `step` goes through canzona_compile, one per class."""

    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = None
        check_call(plain, closure, args, kwargs)
        if closure is not None:
            self.canzona.session.capture.check_closure()
            with torch.enable_grad():
                loss = closure()
        with freed_on_error(), self.canzona.shown():
            new = self.canzona.session.step()
        if new:
            self.canzona.log_headline()
        return loss

    def state_dict(self: Any) -> dict[str, Any]:
        with self.canzona.session.portable_state():
            return saved_by(self, plain).state_dict(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        with self.canzona.session.turns.take("load_state_dict()"):
            with fitted(self, state_dict):
                saved_by(self, plain).load_state_dict(self, state_dict)
            self.canzona.session.forget_plan()

    def reduce(self: Any, protocol: Any) -> Any:
        options: Options = self.canzona.session.options
        lost = lost_in_pickle(options) or self.canzona.session.lost or self.canzona.session.lost_in_copies
        with self.canzona.session.portable_state("a copy or a pickle"):
            state = {k: v for k, v in self.__getstate__().items() if k != "canzona"}
            state["state"] = defaultdict(dict, {} if self.canzona.session.has_dummy_state else state["state"])
        return _restore, (plain, replace(options, replicate=None, layout=None), lost), state

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        restore, (kind, options, _), state = reduce(self, 4)
        same = self.canzona.session
        lost = same.lost or same.lost_in_copies
        made = restore(kind, same.options if not lost else options, lost)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(state, memo))
        return made

    step.__doc__ = plain.step.__doc__
    members = {
        "step": step,
        "state_dict": outside_dynamo(state_dict),
        "load_state_dict": outside_dynamo(load_state_dict),
        "__reduce_ex__": outside_dynamo(reduce),
        "__deepcopy__": outside_dynamo(deepcopy),
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "_canzona_plain_class": plain,
    }
    made: Any = type(f"Canzona{plain.__name__}", (plain,), members)
    # Optimizer.__init__ does this to a class on first use. A train step that is compiled as a whole breaks here.
    hooked = outside_dynamo(Optimizer.profile_hook_step(step))
    hooked.hooked = True  # type: ignore[attr-defined]
    made.step = hooked
    wrapped: type[Any] = made
    return wrapped


def check_call(plain: type[Optimizer], closure: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise unless a step is called with a closure at most."""
    problem = ""
    if args or kwargs:
        given = ", ".join(["a further argument", *kwargs][not args :])
        problem = f"{given}, which cannot be passed on to the update of each parameter"
    elif closure is not None and not callable(closure):
        problem = f"{closure!r}, which is not callable"
    if problem:
        raise UnsupportedOptimizer(
            f"{plain.__name__}.step is called with {problem}",
            hint="store the value in the parameter group or in an attribute of the optimizer",
        )


def lost_in_pickle(options: Options) -> str:
    """Say which options a pickle does not keep; empty if it keeps all."""
    lost = [f"{name}=" for name in ("replicate", "layout") if getattr(options, name) is not None]
    if not lost:
        return ""
    return f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost: process groups cannot be pickled"


def _restore(plain: type[Optimizer], options: Options, lost: str) -> Any:
    """Make an empty wrapped optimizer, which pickle and deepcopy fill."""
    made = object.__new__(plain)
    return attach(made, Canzona([Session(made, options, lost)]))
