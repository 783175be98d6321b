"""The leaves of one parameter's state, under names that are identifiers, because inputs of graphs have these names.

The name of `state["sides"]["left"]` is sides_left, and the name of `state["factors"][0]` is factors_0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from canzona_compile.compat.torch_private import FakeTensor, pytree
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.storage import storable
from canzona_compile.replica.copies import deep_copy
from canzona_compile.tensors import expanded, local_part, overlap

CONTAINERS = (dict, list, tuple)
LeafForm = tuple[str, Shape | None, torch.dtype | None, tuple[int, ...] | None]
LeafPath = tuple[Any, ...]  # the keys and indices that lead to a leaf
LeafPaths = Mapping[str, LeafPath]


def state_leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every leaf of a state, in a stable order."""
    if not any(isinstance(value, CONTAINERS) for value in state.values()):
        yield from ((leaf_name((key,)), value) for key, value in state.items())
        return
    for path, leaf in pytree.tree_flatten_with_path(dict(state))[0]:
        yield leaf_name(keys_of(path)), leaf


def leaf_forms(state: Mapping[str, Any]) -> frozenset[LeafForm]:
    """Return the names, shapes, dtypes and strides of the leaves of a state, as far as they are not contiguous."""
    return frozenset(
        (name, tuple(v.shape), v.dtype, None if v.is_contiguous() else tuple(v.stride()))
        if isinstance(v, Tensor)
        else (name, None, None, None)
        for name, v in state_leaves(state)
    )


def leaves_with_paths(state: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The leaves of a state, each after its path, of which `keys_of` makes keys."""
    return list(pytree.tree_flatten_with_path(dict(state))[0])


def storable_leaves(state: Mapping[str, Any]) -> dict[LeafPath, tuple[str, Tensor]]:
    """The leaves of a state that can be stored in another way: their names and this rank's parts, by path.

    Left out are numbers and counters, tensors of classes of their own, and those that show memory of others.
    """
    leaves = {keys_of(path): leaf for path, leaf in leaves_with_paths(state)}
    parts = {path: local_part(leaf) for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    return {
        path: (leaf_name(path), own)
        for path, own in parts.items()
        if type(own) in (Tensor, Parameter)
        and storable(own.shape, own.dtype)
        and not expanded(own)
        and not any(overlap(own, other) for at, other in parts.items() if at != path)
    }


def python_leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a state that are not tensors, such as counters, by name."""
    return {name: v for name, v in state_leaves(state) if not isinstance(v, Tensor)}


def paths_of(state: Mapping[str, Any]) -> dict[str, LeafPath]:
    """Return the path of every leaf of a state, by the name of the leaf."""
    paths = [keys_of(path) for path, _ in pytree.tree_flatten_with_path(dict(state))[0]]
    return {leaf_name(path): path for path in paths}


def structure_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the containers of a state, with None for every leaf."""
    return {key: pytree.tree_map(lambda _: None, value) for key, value in state.items()}


def empty_containers(structure: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the entries that hold no leaves, such as the empty list of a vector's preconditioners."""
    return {key: deep_copy(value) for key, value in structure.items() if not pytree.tree_leaves(value)}


def keys_of(path: Sequence[Any]) -> LeafPath:
    return tuple(getattr(k, "key", getattr(k, "idx", k)) for k in path)


def leaf_name(path: LeafPath) -> str:
    name = re.sub(r"\W", "_", "_".join(map(str, path)))
    return name if name.isidentifier() else f"_{name}"


def read(state: Mapping[str, Any], path: LeafPath) -> Any:
    """Return the leaf at a path; None if the state has none there."""
    found: Any = state
    for key in path:
        if found is None or (isinstance(found, Mapping) and key not in found):
            return None
        found = found[key]
    return found


def write(state: dict[str, Any], path: LeafPath, value: Any, structure: Mapping[str, Any]) -> None:
    """Put a leaf in its place in a state."""
    if path[0] not in state:
        state[path[0]] = deep_copy(structure[path[0]])
    holder: Any = state
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value


def leaf_problem(state: dict[str, Any], paths: LeafPaths) -> str:
    """Say why leaves of a state cannot be inputs and outputs of a graph; empty if they can."""
    leaves = list(state_leaves(state))
    names = [name for name, _ in leaves]
    if clash := {name for name in names if names.count(name) > 1 or name in ("param", "grad")}:
        return f"its state has leaves whose names are taken: {min(clash)!r}"
    for name, value in leaves:
        if isinstance(value, Tensor) and type(value) not in (Tensor, Parameter, FakeTensor):
            return f"its state holds a {type(value).__name__}: {name!r}"
        if isinstance(value, Tensor) and expanded(value):
            return f"its state holds an expanded tensor: {name!r}"
        if shared := [other for other, tensor in leaves if other > name and overlap(value, tensor)]:
            return f"its state holds one tensor under two names: {name!r} and {shared[0]!r}"
        if not isinstance(value, Tensor | float | int | str | None):
            return f"its state holds a Python object: {name!r}"
        try:
            write(state, paths[name], value, {})
        except TypeError:
            return f"its state holds a tuple: {name!r}"
    return ""
