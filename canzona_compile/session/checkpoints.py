"""What checkpoints ask of an optimizer: the dummy step that torch.distributed.checkpoint takes, and loaded state.

To learn the form of the state of a new optimizer, torch's `_init_optim_state` sets all gradients and every lr to zero
and calls `step`. After that a plain optimizer has counted one step, and SOAP has used up the step that only finds its
basis. A wrapped optimizer has state after the dummy step and is otherwise unchanged. Its next step drops that state
unless a checkpoint was loaded into it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.sharding_rules import state_after_a_step
from canzona_compile.compat.torch_private import pytree
from canzona_compile.replica.homes import atoms_of, own_attributes
from canzona_compile.replica.leaves import keys_of, leaf_name, read
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.randomness import undisturbed
from canzona_compile.tensors import local_part

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


# -- loaded state ----------------------------------------------------------------------------------


def keep_as_saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give loaded state the dtypes that it was saved with, unless the optimizer's own state has that of its parameter.

    Torch casts loaded state to the dtype of the parameter, but preconditioners may be wider. Torch also turns strings
    in the state into generators.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for i, (param, group) in zip(ids, params, strict=True):
        state: dict[str, Any] = optimizer.state.get(param) or {}
        own: dict[str, torch.dtype] | None = None

        def kept(path: Any, saved: Any, param: Tensor = param, group: Any = group, state: Any = state) -> Any:
            nonlocal own
            if not isinstance(saved, Tensor):
                return saved
            loaded = read(state, keys_of(path))
            if loaded.dtype == saved.dtype:
                return loaded
            own = dtypes_of_state(optimizer, group, param) if own is None else own
            if own.get(leaf_name(keys_of(path))) == loaded.dtype:  # saved with parameters of another dtype
                return loaded
            return saved.detach().clone().to(loaded.device)

        state.update(pytree.tree_map_with_path(kept, dict(state_dict["state"].get(i) or {})))


def dtypes_of_state(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> dict[str, torch.dtype]:
    """Return the dtypes of the state that the optimizer makes for a parameter, by leaf, from a step of a small one."""
    if own_attributes(optimizer).keys() - {"defaults"} - atoms_of(optimizer).keys():
        return {}
    shape = tuple(min(size, 4) for size in param.shape)
    spec = replace(ParameterSpec.of(param, shape, param.dtype), device=torch.device("cpu"))
    return {name: value.dtype for name, value in state_after_a_step(optimizer, group, spec).items()}


def keep_tuples(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """Turn lists in parameter groups back into tuples if they were tuples before the load.

    Full state dicts of torch.distributed.checkpoint turn tuples into lists, and the optimizer's code would be captured
    again for lists.
    """
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group.update({k: tuple(v) for k, v in group.items() if isinstance(v, list) and isinstance(old.get(k), tuple)})
