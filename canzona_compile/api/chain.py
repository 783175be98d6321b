"""`chain`: several optimizers as one `torch.optim.Optimizer`.

A matrix optimizer never trains a model alone: embeddings, heads, norms and biases go to an optimizer such as AdamW.
Trainers, schedulers, checkpoints and gradient scalers take one optimizer. A `Chain` is that one object. It owns
nothing: its parameter groups are the very dicts of its optimizers, and its state is a view of theirs.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class, required_arguments
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.session.checkpoints import by_name, check_shapes


class FixedGroups(list[dict[str, Any]]):
    """The parameter groups of a chain. A group that is put into this list would reach no optimizer, so none can be."""

    def __init__(self, own: Chain) -> None:
        super().__init__(group for optimizer in own.optimizers for group in optimizer.param_groups)
        self._chain = own

    def _fixed(self, *_: Any, **__: Any) -> NoReturn:
        raise CanzonaError(
            "param_groups of a chain are the groups of its optimizers, in their order; only empty ones may be left out",
            at="chain.param_groups",
            hint="add a group with chain.add_param_group(group, to=...), or change chain.optimizers[i].param_groups",
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _fixed
    __delitem__ = __iadd__ = __imul__ = _fixed

    def __setitem__(self, place: Any, groups: Any) -> None:
        changed = list(self)
        changed[place] = groups
        self._chain.param_groups = changed
        super().__init__(self._chain.param_groups)

    def __reduce__(self) -> Any:  # a copy is a list like any other
        return list, (list(self),)


class ChainState(MutableMapping[Any, Any]):
    """The state of all optimizers of a chain, by parameter: a view, which writes to where the parameter belongs."""

    def __init__(self, own: Chain) -> None:
        self._chain = own

    @property
    def _states(self) -> list[MutableMapping[Any, Any]]:
        return [optimizer.state for optimizer in self._chain.optimizers]

    def _home(self, key: Any) -> MutableMapping[Any, Any]:
        for state in self._states:
            if key in state:
                return state
        holder = self._chain.holder(key)
        if holder is None:
            raise KeyError(key)
        return holder.state

    def __getitem__(self, key: Any) -> Any:
        return self._home(key)[key]  # where there is none yet, an optimizer makes an empty one

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._home(key)[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter, or the default; it makes no empty one."""
        return self[key] if key in self else default  # noqa: SIM401 - this is get

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter; the default becomes it if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Drop the state of a parameter, and return it."""
        return self._home(key).pop(key, *default) if key in self or not default else default[0]

    def __contains__(self, key: object) -> bool:
        return any(key in state for state in self._states)

    def __iter__(self) -> Iterator[Any]:
        for state in self._states:
            yield from state

    def __len__(self) -> int:
        return sum(map(len, self._states))

    def clear(self) -> None:
        """Drop the state of all optimizers."""
        for state in self._states:
            state.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        return defaultdict(dict, copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return f"ChainState({dict(self)!r})"


def chain(*optimizers: Optimizer) -> Chain:
    """Combine several optimizers into one, which steps them one after the other.

    Args:
        optimizers: at least one. No two of them may have a parameter in common. Some may be wrapped already; `wrap`
            does not take the chain then.

    Returns:
        The optimizer. `wrap` and `zero1` take it as they take any other.

    Raises:
        CanzonaError: one of them is not a `torch.optim.Optimizer`, is a chain, or shares a parameter with another one.
        UnsupportedOptimizer: one needs a closure, as LBFGS does.
    """
    return Chain(optimizers)


class Chain(Optimizer):
    """Several optimizers that behave as one, as `chain` returns them.

    Its `state_dict` has the form of a plain optimizer that holds the groups of all. Hooks, schedulers, `GradScaler`,
    pickles, copies and the helpers of `torch.distributed.checkpoint` work as they do with any optimizer.

    Args:
        optimizers: as in `chain`.

    Attributes:
        optimizers: the optimizers in the order in which they step.
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        check_members(optimizers)
        self.optimizers = tuple(optimizers)
        self._made = False
        super().__init__(self.param_groups, common_defaults(self.optimizers))
        self._made = True

    # -- groups and state --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> FixedGroups:
        """The groups of all optimizers in order. They are those dicts themselves, in a list that cannot grow.

        What is assigned must have the same parameters in the same order; groups that are empty may be left out.
        """
        return FixedGroups(self)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if not self._made:  # the constructor of Optimizer begins with none
            return
        given = list(groups)
        parts: list[list[dict[str, Any]]] = []
        for optimizer in self.optimizers:
            parts.append([])
            for own in optimizer.param_groups:
                if given and [*map(id, given[0]["params"])] == [*map(id, own["params"])]:
                    parts[-1].append(given.pop(0))
                elif own["params"]:
                    self.param_groups._fixed()
        if given:
            self.param_groups._fixed()
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            optimizer.param_groups = part

    @property  # type: ignore[override]
    def state(self) -> ChainState:
        """The state of all optimizers, by parameter. What is set here is set in the optimizer of that parameter."""
        return ChainState(self)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        if not self._made:  # the constructor of Optimizer begins with none; the optimizers may have some
            return
        found = dict(state)
        own = self.state
        own.clear()
        own.update(found)

    def holder(self, param: Any) -> Optimizer | None:
        """The optimizer that has a parameter; None if none has."""
        for optimizer in self.optimizers:
            if any(param is own for group in optimizer.param_groups for own in group["params"]):
                return optimizer
        return None

    def add_param_group(self, param_group: dict[str, Any], to: Optimizer | int | None = None) -> None:
        """Give one of the optimizers another group of parameters.

        Args:
            param_group: the group, as any optimizer takes it.
            to: the optimizer, or its position in the chain.

        Raises:
            CanzonaError: `to` does not say which optimizer, or another one has one of the parameters.
        """
        if any(param_group is own for own in self.param_groups):  # as the constructor of Optimizer adds them
            return
        target = next((own for i, own in enumerate(self.optimizers) if own is to or i == to), None)
        if target is None:
            raise CanzonaError(
                "add_param_group of a chain needs to= to know which optimizer takes the group"
                if to is None
                else f"to={to if isinstance(to, int) else type(to).__name__} is not an optimizer of the chain",
                at="chain.add_param_group",
                hint=f"call add_param_group(group, to=0), or to=chain.optimizers[0]; {positions(self.optimizers)}",
            )
        given = param_group["params"]
        if not isinstance(given, set):  # optimizers refuse a set, because its order is undefined
            param_group["params"] = given = [given] if isinstance(given, Tensor) else list(given)
        for entry in given:
            param = entry[1] if isinstance(entry, tuple) else entry
            holder = self.holder(param)
            if holder is not None and holder is not target:
                raise CanzonaError(
                    f"this parameter of shape {list(param.shape)} is already in {plain_class(holder).__name__}",
                    at="chain.add_param_group",
                    hint="give each parameter to one optimizer",
                )
        target.add_param_group(param_group)

    # -- steps -----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers in order.

        Args:
            closure: computes the loss and the gradients. It is called once, before the first optimizer steps.

        Returns:
            What the closure returned; None without one.
        """
        loss = loss_of(closure)
        self.step_all()
        return loss

    def step_all(self) -> None:
        """Step all optimizers in order; hooks of the chain and a closure are the business of `step`."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters.

        Args:
            set_to_none: to None; if not, to zeros.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def train(self) -> None:
        """Tell the optimizers that have this method, such as those of schedulefree, that training goes on."""
        self._tell("train")

    def eval(self) -> None:
        """Tell the optimizers that have this method, such as those of schedulefree, that the model is evaluated."""
        self._tell("eval")

    def _tell(self, method: str) -> None:
        for optimizer in self.optimizers:
            call = getattr(optimizer, method, None)
            if callable(call):
                call()

    # -- checkpoints, copies -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of one plain optimizer with all groups; parameters are numbered through all of them.

        Raises:
            UnsupportedOptimizer: one of the optimizers saves more than groups and the state of parameters.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        found: dict[str, Any] = {"state": {}, "param_groups": []}
        for optimizer in self.optimizers:
            own = optimizer.state_dict()
            numbers = {id_: i for i, id_ in enumerate(ids_of(own["param_groups"]), len(ids_of(found["param_groups"])))}
            check_form(optimizer, own, numbers)
            found["state"] |= {numbers[id_]: entry for id_, entry in own["state"].items()}
            found["param_groups"] += [renumbered(group, numbers) for group in own["param_groups"]]
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, by the names of parameters if both sides have names, else by position.

        Args:
            state_dict: of a chain, or of a plain optimizer with the groups of the chain.

        Raises:
            CanzonaError: the groups do not fit, or there is state of no parameter; nothing was loaded then.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = by_name(state_dict, self.optimizers)
        groups = state_dict["param_groups"]
        check_sizes([len(g["params"]) for g in groups], [len(g["params"]) for g in self.param_groups])
        check_saved(state_dict, self.optimizers)
        begin = 0
        parts = []
        for optimizer in self.optimizers:
            own = groups[begin : begin + len(optimizer.param_groups)]
            begin += len(own)
            numbers = {id_: i for i, id_ in enumerate(ids_of(own))}
            state = {numbers[id_]: entry for id_, entry in state_dict["state"].items() if id_ in numbers}
            parts.append({"state": state, "param_groups": [renumbered(group, numbers) for group in own]})
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            check_shapes(optimizer, part)
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            optimizer.load_state_dict(part)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers, "_made": True}

    def __repr__(self) -> str:
        return "\n".join(["Chain (", *map(repr, self.optimizers), ")"])


def is_chain(optimizer: object) -> TypeGuard[Chain]:
    """Whether an object is a chain itself: proxies of frameworks are of the class of what they are around."""
    return isinstance(optimizer, Chain) and "optimizers" in vars(optimizer)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call a closure as optimizers do; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_members(optimizers: Sequence[Any]) -> None:
    """Raise unless these can step one after the other, see `chain`."""
    if not optimizers:
        raise CanzonaError("a chain needs at least one optimizer", at="chain()", hint="chain(muon, adamw)")
    holders: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        check_member(optimizer)
        for name, param in named_in(optimizer):
            holder = holders.setdefault(id(param), optimizer)
            if holder is not optimizer:
                raise CanzonaError(
                    f"both {plain_class(holder).__name__} and {plain_class(optimizer).__name__} have this parameter",
                    at=name,
                    hint="give each parameter to one optimizer, as canzona_compile.hidden_matrices(model) does",
                )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise CanzonaError(
            "the same optimizer was passed to chain twice", at="chain()", hint="pass each optimizer once"
        )


def named_in(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an optimizer, each with its name, or with its shape if the optimizer has no names."""
    for group in optimizer.param_groups:
        shapes = [f"a parameter of shape {list(param.shape)}" for param in group["params"]]
        yield from zip(group.get("param_names", shapes), group["params"], strict=True)


def check_member(optimizer: Any) -> None:
    """Raise unless an object can be part of a chain."""
    if isinstance(optimizer, Chain):
        raise CanzonaError(
            "a chain cannot be part of another one", at="chain()", hint="chain(*first.optimizers, another)"
        )
    if isinstance(optimizer, list | tuple):
        raise CanzonaError(
            "chain takes optimizers as separate arguments, not as a list", at="chain()", hint="chain(*optimizers)"
        )
    if not isinstance(optimizer, Optimizer):
        raise CanzonaError(
            f"chain takes torch.optim.Optimizer objects, not a {type(optimizer).__name__}",
            at="chain()",
            hint="pass the optimizers before a framework wraps them",
        )
    if required := required_arguments(plain_class(optimizer)):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step requires {', '.join(required)}, because it evaluates the model "
            "several times per step, but a chain calls the closure once for all its optimizers",
            at="chain()",
            hint="leave it out of the chain and call its step() separately",
        )


def common_defaults(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The defaults that all optimizers have with equal values."""
    first, *others = (optimizer.defaults for optimizer in optimizers)
    return {
        name: value
        for name, value in first.items()
        if not isinstance(value, Tensor) and all(name in other and other[name] == value for other in others)
    }


def positions(optimizers: Sequence[Optimizer]) -> str:
    """Say which optimizer is at which position."""
    return ", ".join(f"{i} is {plain_class(own).__name__}" for i, own in enumerate(optimizers))


def ids_of(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The numbers of parameters in the groups of a state dict, in order."""
    return [id_ for group in groups for id_ in group["params"]]


def renumbered(group: Mapping[str, Any], numbers: Mapping[Any, int]) -> dict[str, Any]:
    """A group of a state dict, with other numbers for its parameters."""
    return {**group, "params": [numbers[id_] for id_ in group["params"]]}


def check_form(optimizer: Optimizer, saved: Mapping[str, Any], ids: Mapping[Any, int]) -> None:
    """Raise unless a state dict holds groups and the state of parameters, and nothing else."""
    others = [*(saved.keys() - {"state", "param_groups"}), *(saved["state"].keys() - ids.keys())]
    if others:
        raise UnsupportedOptimizer(
            f"the state dict of {plain_class(optimizer).__name__} contains {', '.join(map(str, others))}, which the "
            "state dict of a chain cannot store",
            at="chain.state_dict()",
            hint="save the state dict of each optimizer in chain.optimizers separately",
        )


def check_sizes(saved: Sequence[int], own: Sequence[int]) -> None:
    """Raise unless the groups of a state dict have as many parameters as those of the chain."""
    if saved != own:
        raise CanzonaError(
            f"the parameter groups in the state dict have {saved} parameters, those of the chain {own}",
            at="chain.load_state_dict",
            hint="build the chain from the same model and optimizers, in the same order, as when it was saved",
        )


def check_saved(saved: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
    """Raise unless each group of a state dict can be one of the optimizer that gets it, and all state has a parameter.

    A group of another optimizer shows by its hyperparameters. One that only lacks some may be of an older torch.
    """
    groups = iter(saved["param_groups"])
    every = {name for optimizer in optimizers for name in optimizer.defaults}
    for optimizer in optimizers:
        own = optimizer.defaults.keys()
        for group in (next(groups) for _ in optimizer.param_groups):
            foreign, missing = group.keys() & every - own, own - group.keys()
            if foreign and missing:
                raise CanzonaError(
                    f"a saved group for {plain_class(optimizer).__name__} has {min(foreign)!r} but lacks "
                    f"{min(missing)!r}",
                    at="chain.load_state_dict",
                    hint="build the chain from the same optimizers, in the same order, as when it was saved",
                )
    known = set(ids_of(saved["param_groups"]))
    if stray := [id_ for id_ in saved["state"] if id_ not in known]:
        raise CanzonaError(
            f"the state dict has state for {stray[0]!r}, which is not in any of its parameter groups",
            at="chain.load_state_dict",
            hint="load a state dict that came from chain.state_dict(), or from a plain optimizer with the same groups",
        )
