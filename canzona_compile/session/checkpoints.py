"""What checkpoints ask of an optimizer: the dummy step that torch.distributed.checkpoint takes, and loaded state.

To learn the form of the state of a new optimizer, torch's `_init_optim_state` sets all gradients and every lr to zero
and calls `step`. After that a plain optimizer has counted one step, and SOAP has used up the step that only finds its
basis. A wrapped optimizer has state after the dummy step and is otherwise unchanged. Its next step drops that state
unless a checkpoint was loaded into it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.sharding_rules import state_after_a_step
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import CanzonaError, some
from canzona_compile.ir.canonical_names import canonical_groups
from canzona_compile.replica.homes import atoms_of, own_attributes
from canzona_compile.replica.leaves import keys_of, leaf_name, read, state_leaves
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.randomness import undisturbed
from canzona_compile.session.params import named_params
from canzona_compile.tensors import local_part

GroupNames = list[list[str]]  # a group without names has none

# -- the dummy step --------------------------------------------------------------------------------


def is_dummy_step(optimizer: Optimizer) -> bool:
    """Tell whether the step that is about to be taken is a dummy step.

    Zero gradients and a zero lr do not decide this. A warm-up from lr 0, of a model whose last layer is initialised
    with zeros, also begins with such a step, and that step counts. The call `step(closure=None)` does not decide it
    either, because any user may write it. So this looks for a caller with the name of torch's function. Copies of
    that function in training frameworks have kept the name.

    Torch could make this unnecessary with a method of `Optimizer` that creates state without a step, or with a mark
    on the step that `_init_optim_state` takes.
    """
    if optimizer.state:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.endswith("init_optim_state"):
        frame = frame.f_back
    # Compare learning rates last, because the host waits for one that is a tensor on a device.
    return frame is not None and all(group.get("lr", 0.0) == 0.0 for group in optimizer.param_groups)


@contextlib.contextmanager
def undone(optimizer: Optimizer) -> Iterator[None]:
    """Allow a step inside this context, and undo it on exit except for the state of parameters.

    Inside the context each lr has its default value. Otherwise code that depends on hyperparameters would be captured
    for an lr of zero, and no later step would use that capture.
    """
    params = [local_part(p) for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in params]
    homes = [vars(optimizer), *optimizer.param_groups]
    before = [dict(home) for home in homes]
    rate = optimizer.defaults.get("lr")
    for group in optimizer.param_groups if isinstance(rate, float | Tensor) else ():
        group["lr"] = rate
    try:
        with undisturbed(optimizer):
            yield
    finally:
        for home, old in zip(homes, before, strict=True):
            for name in home.keys() - old.keys():
                del home[name]
            home.update(old)
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            del optimizer.state[key]
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)


# -- which state is whose --------------------------------------------------------------------------


@contextlib.contextmanager
def fitted(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[None]:
    """Inside this context, `load_state_dict` goes by names, checks shapes, and keeps dtypes and tuples as they were."""
    before, loaded = optimizer.param_groups, [state_dict]

    def fit(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        loaded[0] = by_name(given, [optimizer])
        check_shapes(optimizer, loaded[0])
        return loaded[0]

    hook = optimizer.register_load_state_dict_pre_hook(fit)
    try:
        yield
    finally:
        hook.remove()
    keep_tuples(optimizer, before)
    keep_as_saved(optimizer, loaded[0])


def by_name(saved: dict[str, Any], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return a state dict with its groups, and the parameters in them, in the order of these optimizers.

    Parameters go by their names if both sides have names, else by their positions, as in torch. Keys that are names
    come from torch.distributed.checkpoint, which has put them in the order of the optimizers. The `param_names` beside
    them are those of a saved group with one of these parameters.

    Raises:
        CanzonaError: a group was saved with other parameters.
    """
    groups: list[dict[str, Any]] = list(saved["param_groups"])
    own = [group for optimizer in optimizers for group in optimizer.param_groups]
    mine = canonical_groups(texts(group, "param_names") for group in own)
    theirs, keys = (
        aligned(canonical_groups(texts(group, key) for group in groups), mine) for key in ("param_names", "params")
    )
    if any(keys):
        known = {*chain.from_iterable(keys)}
        same_groups(theirs, mine if known.isdisjoint(chain.from_iterable(theirs)) else keys, all(mine))
        theirs = [] if known.isdisjoint(chain.from_iterable(mine)) else keys
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    place = same_groups(theirs, mine, all(mine))
    unnamed = [h for h in range(len(groups)) if h not in place.values()]
    for g, h in place.items():
        key_of = dict(zip(theirs[h], groups[h]["params"], strict=True))
        groups[h] = {**groups[h], "params": [key_of[n] for n in mine[g]], "param_names": own[g]["param_names"]}
    if len(groups) == len(own):  # else torch says so
        groups = [groups[place[g] if g in place else unnamed.pop(0)] for g in range(len(own))]
    return {**saved, "param_groups": groups}


def texts(group: Mapping[str, Any], key: str) -> list[str]:
    """What a group has under a key, if that is a text for each of its parameters; else nothing."""
    found = list(group.get(key) or ())
    return found if len(found) == len(group["params"]) and all(isinstance(name, str) for name in found) else []


def aligned(theirs: GroupNames, mine: GroupNames) -> GroupNames:
    """Names with the prefix that ours have, or without one that ours lack, if that is how the first ones differ."""
    first, own = (min(chain.from_iterable(side), default="") for side in (theirs, mine))
    if first.endswith(f".{own}"):
        if not all(name.startswith(first.removesuffix(own)) for name in chain.from_iterable(theirs)):
            return theirs
        return [[name.removeprefix(first.removesuffix(own)) for name in names] for names in theirs]
    more = own.removesuffix(first) if own.endswith(f".{first}") else ""
    return [[more + name for name in names] for names in theirs]


def same_groups(theirs: GroupNames, mine: GroupNames, strict: bool) -> dict[int, int]:
    """Find the positions of our named groups among the saved ones; none if a side lacks names or has one twice.

    Unless strict, groups of one side that have no names go by their positions among those of the other that are left.
    """
    flat = [[*chain.from_iterable(side)] for side in (theirs, mine)]
    if not all(flat) or any(len({*names}) < len(names) for names in flat):
        return {}
    ours, saved = ({frozenset(names): g for g, names in enumerate(side) if names} for side in (mine, theirs))
    new, old = ([g for names, g in one.items() if names not in other] for one, other in ((ours, saved), (saved, ours)))
    nameless = [sum(not names for names in side) for side in (theirs, mine)]
    if (new or old) and (strict or len(new) > nameless[0] or len(old) > nameless[1]):
        now, then = mine[new[0]] if new else [], theirs[old[0]] if old else []
        raise CanzonaError(
            f"parameter group {(new or old)[0]} was saved with other parameters: the state dict has "
            f"{some(n for n in then if n not in now) or 'none'} where the optimizer has "
            f"{some(n for n in now if n not in then) or 'none'}",
            at="load_state_dict",
            hint="build the optimizer with the names, and the parameters in each group, that it was saved with",
        )
    return {g: saved[names] for names, g in ours.items() if names in saved}


def check_shapes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise if state to which the optimizer gives the shape of its parameter was saved with another shape.

    The step of a small parameter shows which state that may be, and one of the real size whether it is.
    """

    @functools.cache
    def like_parameter(g: int, spec: ParameterSpec) -> set[str]:
        made = state_of(optimizer, optimizer.param_groups[g], spec)
        return {name for name, value in made.items() if value.shape == spec.shape}

    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for (at, g, param), key in zip(named_params(optimizer), keys, strict=False):
        for name, leaf in state_leaves(saved["state"].get(key) or {}):
            if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape in (param.shape, local_part(param).shape):
                continue
            if all(name in like_parameter(g, spec) for spec in (small_spec(param), ParameterSpec.of(param))):
                raise CanzonaError(
                    f"the parameter is {list(param.shape)}, but its state {name!r} was saved as {list(leaf.shape)}",
                    at=at,
                    hint='load a checkpoint of the same shapes, or remove its entry from state_dict["state"] first',
                )


def keep_as_saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give loaded state the dtypes that it was saved with, unless the optimizer's own state has that of its parameter.

    Torch casts loaded state to the dtype of the parameter, but preconditioners may be wider. Torch also turns strings
    in the state into generators.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for i, (param, group) in zip(ids, params, strict=True):
        state: dict[str, Any] = optimizer.state.get(param) or {}
        own: dict[str, Tensor] | None = None

        def kept(path: Any, saved: Any, param: Tensor = param, group: Any = group, state: Any = state) -> Any:
            nonlocal own
            if not isinstance(saved, Tensor):
                return saved
            loaded = read(state, keys_of(path))
            if loaded.dtype == saved.dtype:
                return loaded
            own = state_of(optimizer, group, small_spec(param)) if own is None else own
            made = own.get(leaf_name(keys_of(path)))
            if made is not None and made.dtype == loaded.dtype:  # saved with parameters of another dtype
                return loaded
            return saved.detach().clone().to(loaded.device)

        state.update(pytree.tree_map_with_path(kept, dict(state_dict["state"].get(i) or {})))


def state_of(optimizer: Optimizer, group: dict[str, Any], spec: ParameterSpec) -> dict[str, Tensor]:
    """Return the state that the optimizer makes for such a parameter, by leaf; none if a step of it changes others."""
    if own_attributes(optimizer).keys() - {"defaults"} - atoms_of(optimizer).keys():
        return {}
    return state_after_a_step(optimizer, group, spec)


def small_spec(param: Tensor) -> ParameterSpec:
    """Describe a small parameter like this one, whose dims differ and have divisors."""
    shape = tuple(4 << dim for dim in range(param.ndim))
    return replace(ParameterSpec.of(param, shape, param.dtype), device=torch.device("cpu"))


def keep_tuples(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """Turn lists in parameter groups back into tuples if they were tuples before the load.

    Full state dicts of torch.distributed.checkpoint turn tuples into lists, and the optimizer's code would be captured
    again for lists.
    """
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group.update({k: tuple(v) for k, v in group.items() if isinstance(v, list) and isinstance(old.get(k), tuple)})
