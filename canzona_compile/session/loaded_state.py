"""State that users load into an optimizer, and whether an optimizer can go on by itself from the state that it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.sharding_rules import state_after_a_step
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.eager.own_object import is_portable
from canzona_compile.errors import CanzonaError
from canzona_compile.replica.construction import atoms_of
from canzona_compile.replica.homes import own_attributes
from canzona_compile.replica.leaves import keys_of, leaf_name, read
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample


def keep_as_saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give loaded state the dtypes that it was saved with, unless the optimizer's own state has that of its parameter.

    Torch casts loaded state to the dtype of the parameter, but preconditioners may be wider. Torch also turns strings
    in the state into generators.

    Args:
        optimizer: the optimizer that has just loaded `state_dict`.
        state_dict: the state dict that it loaded.
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
    """Return the dtypes of the state that the optimizer makes for a parameter, by leaf, from a step of a small one.

    Returns:
        Nothing if such a step might write what the optimizer keeps on itself.
    """
    if own_attributes(optimizer).keys() - {"defaults"} - atoms_of(optimizer).keys():
        return {}
    shape = tuple(min(size, 4) for size in param.shape)
    spec = replace(ParameterSpec.of(param, shape, param.dtype), device=torch.device("cpu"))
    return {name: value.dtype for name, value in state_after_a_step(optimizer, ParamExample(group, spec)).items()}


def keep_tuples(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """Turn lists in parameter groups back into tuples if they were tuples before the load.

    Full state dicts of torch.distributed.checkpoint turn tuples into lists, and the optimizer's code would be captured
    anew for lists.

    Args:
        optimizer: the optimizer that has just loaded a state dict.
        before: its parameter groups before the load.
    """
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group.update({k: tuple(v) for k, v in group.items() if isinstance(v, list) and isinstance(old.get(k), tuple)})


def check_taken_back(optimizer: Optimizer) -> None:
    """Raise if the optimizer cannot go on from its portable state by itself.

    Raises:
        CanzonaError: the state is that of one optimizer object per matrix.
    """
    if any(isinstance(state, dict) and is_portable(state) for state in optimizer.state.values()):
        raise CanzonaError(
            f"{plain_class(optimizer).__name__} stepped by one optimizer object per matrix; it keeps on itself what it "
            "would need to go on, and that cannot be given back",
            at="unwrap",
            hint="go on with the wrapped optimizer, or begin again with the plain one",
        )
