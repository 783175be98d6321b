"""`wrap`: make an optimizer step through canzona_compile without replacing the object.

An object that delegates to the optimizer would break schedulers, hooks, pickling and checkpoints. So `wrap` swaps the
class of the optimizer, as `fully_shard` swaps the class of modules, and all of these keep working
(docs/architecture.md has the contract). canzona_compile adds one attribute, `optimizer.canzona`, and adds nothing to
`state` or `param_groups`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from torch import nn
from torch.optim import Optimizer

from canzona_compile.api.chain import Chain, is_chain
from canzona_compile.api.chained import CanzonaChain, attach_chain, detach_chain, handle_of
from canzona_compile.api.handle import Canzona
from canzona_compile.api.holders import chain_of, inside, members_of
from canzona_compile.api.wrapped_class import attach, check_wrappable, is_wrapped, rebind_scheduled_step
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.ir.options import Options, WrapOptions, made_options
from canzona_compile.ir.split import check_patterns, fitting
from canzona_compile.replica.homes import advice
from canzona_compile.replica.twin import check_step_signature
from canzona_compile.report.explain import Explanation, explain_all
from canzona_compile.session.params import named_params
from canzona_compile.session.planning import plan_together
from canzona_compile.session.session import SKIPPED, Session
from canzona_compile.views.given_layout import check_layout_patterns

Opt = TypeVar("Opt", bound=Optimizer)


def wrap(optimizer: Opt, *, model: nn.Module | None = None, **options: Unpack[WrapOptions]) -> Opt:
    """Distribute the steps of an optimizer: each matrix is updated whole, once, by one owner rank.

    Args:
        optimizer: any `torch.optim.Optimizer` that updates its parameters independently of one
            another, or a chain of such optimizers. Parameters may be plain tensors or DTensors. Of torchtitan's
            container, and of Accelerate's and Fabric's proxies, what is inside is wrapped.
        model: gives the parameters their names, for `split`, `layout` and reports, if a parameter group has no
            `param_names`.
        options: what `canzona_compile.Options` describes.

    Returns:
        The same object. Its class is now a subclass of the old one, and it has `.canzona`.

    Raises:
        CanzonaError: `optimizer` is not an optimizer, evaluates its closure several times per step, or is wrapped with
            other options; `model` lacks some of its parameters; `split` or `layout` is impossible; a file is not a
            plan. The first `step` checks what depends on parameters and gradients.
        TypeError: there is no such option.
    """
    held = inside(optimizer)
    members, chain = members_of(held), chain_of(held)
    if not isinstance(members[0], Optimizer):
        raise no_optimizer(optimizer)
    names = () if model is None or len(members) > 1 else names_in(model, members[0])
    wanted = made_options("wrap", WrapOptions.__optional_keys__, options, names=names)
    if type(chain) not in (type(None), Chain, CanzonaChain):
        raise CanzonaError(
            f"{type(chain).__name__} is a subclass of Chain, and a wrapped chain would not call its step",
            at="wrap(chain)",
            hint="wrap canzona_compile.chain(*optimizers), and move what the subclass adds to step hooks or a "
            "scheduler",
        )
    several = chain is not None or len(members) > 1
    each = options_of(members, wanted, model) if several else [wanted]
    for own, its in zip(members, each, strict=True):
        if not (is_wrapped(own) and check_same(own, its)):
            check_wrappable(own)
    for own, its in zip(members, each, strict=True):
        wrap_one(own, its)
    show(optimizer, members, chain)
    return optimizer


def wrap_named(optimizer: Optimizer, names: Sequence[Sequence[str]], options: Mapping[str, Any]) -> None:
    """Wrap an optimizer whose parameters have these names, for each parameter group, unless the groups name them."""
    own = tuple(tuple(group) for group in names)
    wanted = made_options("wrap", WrapOptions.__optional_keys__, options, names=own)
    if not (is_wrapped(optimizer) and check_same(optimizer, wanted)):
        check_wrappable(optimizer)
    wrap_one(optimizer, wanted)


def show(given: Any, members: Sequence[Any], chain: Chain | None) -> None:
    """Give a chain, and an object around it or around optimizers, the handle of what is wrapped.

    Args:
        chain: the chain that `given` is or holds; None if it is none and holds none.
    """
    if chain is not None:
        attach_chain(chain)
    if given is chain or given is members[0]:
        return
    known = getattr(given, "canzona", None)  # a proxy may forward the attribute of its only optimizer
    one: Any = chain if chain is not None else members[0] if len(members) == 1 else None
    handle = handle_of(members, known) if one is None else one.canzona
    if known is not handle:
        given.canzona = handle


def check_same(optimizer: Optimizer, options: Options) -> bool:
    """Tell whether a wrapped optimizer can go on stepping; it has to have these options then."""
    session = optimizer.canzona.session  # type: ignore[attr-defined]
    if session.lost:
        return False
    if options.prefix != session.options.prefix:
        raise CanzonaError(
            f"{plain_class(optimizer).__name__} was wrapped before it was put into the chain",
            at="wrap(chain)",
            hint="unwrap(optimizer), then wrap the chain",
        )
    if session.options != options:
        raise CanzonaError(
            "the optimizer is already wrapped, with different options",
            hint="call unwrap(optimizer) first, or call wrap only once",
        )
    return True


def wrap_one(optimizer: Optimizer, options: Options) -> None:
    """Wrap an optimizer that is not a chain. One that is wrapped stays as it is, if it can step."""
    if is_wrapped(optimizer):
        if not optimizer.canzona.session.lost:  # type: ignore[attr-defined]
            return
        optimizer.canzona.release()  # type: ignore[attr-defined]
        detach(optimizer)
    session = Session(optimizer, options)
    session.keep_launch_order()
    attach(optimizer, Canzona([session]))


def options_of(members: Sequence[Optimizer], options: Options, model: nn.Module | None) -> list[Options]:
    """The options of each of several optimizers: the patterns that fit its parameters, and names of its own."""
    if options.one_per_matrix is not None and len(members) > 1:
        raise CanzonaError(
            "one_per_matrix= makes objects of one class, but there are several optimizers",
            at="the option one_per_matrix",
            hint="wrap the optimizer that needs it by itself, then chain(wrap(optimizer, one_per_matrix=...), other)",
        )
    names_of = [() if model is None else names_in(model, own) for own in members]
    prefixes = [f"{plain_class(own).__name__}{i}." for i, own in enumerate(members)]
    known = [
        [name for name, _, _ in named_params(own, names, prefix)]
        for own, names, prefix in zip(members, names_of, prefixes, strict=True)
    ]
    every_name = [name for names in known for name in names]
    if twice := next((name for name, times in Counter(every_name).items() if times > 1), None):
        raise CanzonaError(
            "two optimizers of the chain each have a parameter with this name",
            at=twice,
            hint='rename those of one optimizer: [("critic." + name, p) for name, p in critic.named_parameters()]',
        )
    check_patterns(options.split, every_name)
    check_layout_patterns(options.layout, every_name)
    return [
        replace(
            options,
            names=own_names,
            prefix=prefix,
            split=fitting(options.split, names),
            layout=None if options.layout is None else options.layout.for_names(names),
        )
        for own_names, prefix, names in zip(names_of, prefixes, known, strict=True)
    ]


def names_in(model: nn.Module, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
    """Find the names that a model gives to the optimizer's parameters.

    Returns:
        For each parameter group, the canonical names of its parameters in order. They are kept by position and not
        by parameter, because frameworks replace parameters later.
    """
    if not isinstance(model, nn.Module):
        raise CanzonaError(f"model= takes the model, a torch.nn.Module, not a {type(model).__name__}", at="wrap")
    known = {id(param): name for name, param in canonical_params(model).items()}
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if id(param) not in known:
                raise CanzonaError(
                    f"parameter {i} of group {g}, of shape {list(param.shape)}, is not in the model",
                    at="wrap(..., model=)",
                    hint="pass the model that the optimizer was built from",
                )
    return tuple(tuple(known[id(p)] for p in group["params"]) for group in optimizer.param_groups)


def no_optimizer(given: object, call: str = "wrap") -> CanzonaError:
    """The error for what a call cannot take, with the call that takes it."""
    problem = f"{call} takes a torch.optim.Optimizer, not a {type(given).__name__}"
    hint = "pass the optimizer before a framework wraps it"
    if isinstance(given, type) and issubclass(given, Optimizer):
        problem = f"{call} takes a torch.optim.Optimizer, but {given.__name__} is an optimizer class"
        hint = f"call wrap({given.__name__}(parameters, ...)); if a framework needs a class, wrap_cls({given.__name__})"
    elif isinstance(given, list | tuple) and given and all(isinstance(one, Optimizer) for one in given):
        problem = f"{call} takes one optimizer, not a {type(given).__name__} of {len(given)}"
        hint = "call wrap(chain(*optimizers)), or zero1(model, optimizers)"
    elif isinstance(given, nn.Module):
        hint = f"call {call}(optimizer); canzona_compile.muon_adamw(model) makes a wrapped optimizer for a whole model"
    elif inner := advice(given):
        hint = inner
    return CanzonaError(problem, at=call, hint=hint)


def unwrap(optimizer: Opt) -> Opt:
    """Undo `wrap`, and return the plain optimizer. This is a collective if owner ranks hold state.

    Args:
        optimizer: wrapped or not; a plain one stays as it is.

    Returns:
        The same object, of its old class, with its state in the form of the plain optimizer.

    Raises:
        CanzonaError: this is no optimizer, or a wrapper around the wrapped one, or it has stepped by objects of its
            own. All optimizers of a chain are still wrapped then.
    """
    if is_wrapped(optimizer) and "canzona" not in vars(optimizer):
        raise CanzonaError(
            f"{type(optimizer).__name__} is a wrapper around the wrapped optimizer",
            at="unwrap",
            hint="call unwrap on the optimizer inside it",
        )
    held = (optimizer,) if is_wrapped(optimizer) else inside(optimizer)
    if held[0] is optimizer and not isinstance(optimizer, Optimizer):
        raise no_optimizer(optimizer, "unwrap")
    wrapped = [own for own in members_of(held) if is_wrapped(own)]
    if held[0] is optimizer and not wrapped:
        return optimizer
    for own in wrapped:
        if (chain := own.canzona.chain()) is not None and not any(chain is one for one in held):
            raise CanzonaError(
                f"{plain_class(own).__name__} is part of a wrapped chain, which cannot step with a plain optimizer",
                at="unwrap",
                hint="call unwrap on the chain",
            )
        own.canzona.session.check_taken_back()
    if wrapped:
        known = getattr(optimizer, "canzona", None)
        (wrapped[0].canzona if len(wrapped) == 1 else handle_of(wrapped, known)).release()
    for own in wrapped:
        detach(own)
    for own in filter(is_chain, filter(is_wrapped, held)):
        detach_chain(own)
    vars(optimizer).pop("canzona", None)
    return optimizer


def detach(optimizer: Optimizer) -> None:
    """Give a wrapped optimizer with portable state its old class."""
    optimizer.__class__ = plain_class(optimizer)
    optimizer.param_groups[0].pop(SKIPPED, None)
    del optimizer.canzona  # type: ignore[attr-defined]
    rebind_scheduled_step(optimizer)


def explain(optimizer: Optimizer) -> Explanation:
    """Show how `wrap` updates every parameter, and why, without taking a step.

    Before the first step this captures the optimizer's code.

    Args:
        optimizer: wrapped or not.

    Returns:
        One entry per parameter; print it.

    Raises:
        CanzonaError: this is no optimizer, or as a whole it cannot be planned.
    """
    members = members_of(inside(optimizer))
    if not isinstance(members[0], Optimizer):
        raise no_optimizer(optimizer, "explain")
    each = [Options()] if len(members) == 1 else options_of(members, Options(), None)
    sessions = [
        own.canzona.session if is_wrapped(own) else Session(own, options)
        for own, options in zip(members, each, strict=True)
    ]
    if len(sessions) > 1 and not any(map(is_wrapped, members)):
        plan_together(sessions)
    return explain_all(sessions)


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
            f"wrap_cls takes a subclass of torch.optim.Optimizer, not {described(optimizer_class)}",
            hint="to wrap an optimizer that already exists, call wrap(optimizer)",
        )
    if hasattr(optimizer_class, "_canzona_plain_class"):
        raise CanzonaError(f"{optimizer_class.__name__} is already wrapped", hint="pass the plain optimizer class")
    check_step_signature(optimizer_class)
    made_options("wrap_cls", WrapOptions.__optional_keys__, options)

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


def described(thing: object) -> str:
    """Name what was given instead of a class, for an error message."""
    return thing.__name__ if isinstance(thing, type) else f"a {type(thing).__name__}"
