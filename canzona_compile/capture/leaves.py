"""The leaves of one parameter's state, by names that are identifiers.

`state["sides"]["left"]` is sides_left, `state["factors"][0]` is factors_0: graphs have inputs of these names.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

CONTAINERS = (dict, list, tuple)
LeafPath = tuple[Any, ...]  # the keys and indices that lead to a leaf
LeafPaths = Mapping[str, LeafPath]


def state_leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, in a stable order."""
    if not any(isinstance(value, CONTAINERS) for value in state.values()):
        yield from ((leaf_name((key,)), value) for key, value in state.items())
        return
    for path, leaf in pytree.tree_flatten_with_path(dict(state))[0]:
        yield leaf_name(keys_of(path)), leaf


def python_leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that are no tensors: counters."""
    return {name: v for name, v in state_leaves(state) if not isinstance(v, Tensor)}


def paths_of(state: Mapping[str, Any]) -> dict[str, LeafPath]:
    """Where the leaves are."""
    paths = [keys_of(path) for path, _ in pytree.tree_flatten_with_path(dict(state))[0]]
    return {leaf_name(path): path for path in paths}


def structure_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same containers with None for every leaf."""
    return {key: pytree.tree_map(lambda _: None, value) for key, value in state.items()}


def empty_containers(structure: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that hold no leaves, such as the empty list of a vector's preconditioners."""
    return {key: copy.deepcopy(value) for key, value in structure.items() if not pytree.tree_leaves(value)}


def keys_of(path: Sequence[Any]) -> LeafPath:
    return tuple(getattr(k, "key", getattr(k, "idx", k)) for k in path)


def leaf_name(path: LeafPath) -> str:
    name = re.sub(r"\W", "_", "_".join(map(str, path)))
    return name if name.isidentifier() else f"_{name}"


def read(state: Mapping[str, Any], path: LeafPath) -> Any:
    """The leaf, None where there is none."""
    found: Any = state
    for key in path:
        if found is None or (isinstance(found, Mapping) and key not in found):
            return None
        found = found[key]
    return found


def write(state: dict[str, Any], path: LeafPath, value: Any, structure: Mapping[str, Any]) -> None:
    """Put a leaf in its place; containers that are missing there are made as in `structure`.

    Raises:
        TypeError: it lies in a tuple.
    """
    if path[0] not in state:
        state[path[0]] = copy.deepcopy(structure[path[0]])
    holder: Any = state
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
