"""What an optimizer object keeps for its one parameter: tensors, numbers and texts by path, to save and to put back.

No code is saved, only values. They are put back into an object that was made by the same code, so that the containers
and the helper objects which hold them are there already.
"""

from __future__ import annotations

import contextlib
import enum
import json
import random
import re
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.replica.leaves import leaf_name
from canzona_compile.replica.memory import memory_of
from canzona_compile.replica.snapshot import (
    ATOMS,
    OPAQUE,
    SEQUENCES,
    Held,
    attributes_of,
    entries_of,
    inner_tensors,
)

NUMBERS = (bool, int, float, np.generic)
LEAVES = (Tensor, random.Random, np.ndarray, *NUMBERS)
TEXTS = (str, type(None))
SPELLED_KEYS = ("parameter", "address")  # in paths, keys that tell the parameter apart
NOTES = "notes"  # the leaf that holds texts, the number of other leaves, and their shapes
NOTES_BYTES = 4096  # it is padded to multiples of this, because checkpoints load tensors into ones of equal size
Put = Callable[[Any], None]


@dataclass(frozen=True, eq=False, slots=True)
class KeptPlace:
    """Where an object keeps a value.

    Attributes:
        value: what is there.
        put: puts another value there.
    """

    value: Any
    put: Put


class NoPlace(Exception):
    """A value cannot be put back; the message says which and why."""


def places(
    optimizer: Optimizer, param: Tensor, attributes: Container[str], hyperparameters: Container[str]
) -> dict[str, KeptPlace]:
    """Find every tensor, number and text that an optimizer with one parameter keeps.

    Tensors that share memory with the parameter are left out, and what a second path leads to as well.

    Args:
        optimizer: the optimizer.
        param: its parameter.
        attributes: the attributes in which it keeps something.
        hyperparameters: those of its group in which it does.

    Returns:
        The places by path. A path has slashes, as some keys of states with dots mean pieces of fused parameters.

    Raises:
        NoPlace: two paths have the same spelling.
    """
    finder = Finder(param)
    finder.look_at_attributes(optimizer, attributes)
    own = optimizer.param_groups[0]
    for name, value in own.items():
        if name in hyperparameters:
            finder.look(("group", name), value, partial(own.__setitem__, name))
    for key, value in optimizer.state.items():
        path = ("state",) if key is param else ("state", spelled(key, param))
        finder.look(path, value, partial(optimizer.state.__setitem__, key))
    return finder.found


class Finder:
    """Follows containers and objects down to their leaves.

    Attributes:
        found: the leaves, by path.
        holders: the containers and objects that hold something, by path.
    """

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.found: dict[str, KeptPlace] = {}
        self.holders: dict[str, Any] = {}
        self._names: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._memory = memory_of(param)

    def look_at_attributes(self, optimizer: Optimizer, names: Container[str]) -> None:
        """Look at some attributes of an optimizer."""
        self.holders["self"] = optimizer
        for name, value in vars(optimizer).items():
            if name in names:
                self.look(("self", name), value, partial(setattr, optimizer, name))

    def look(self, path: Sequence[str], value: Any, put: Put) -> None:
        """Look at a value, and into it."""
        if isinstance(value, (*NUMBERS, *TEXTS)) and not isinstance(value, enum.Enum):
            self._add(path, value, put)
            return
        if isinstance(value, (*ATOMS, *OPAQUE)):
            return
        if id(value) in self._seen or self._is_param(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor) and (inner := inner_tensors(value)):
            for name in inner:
                self.look((*path, name), getattr(value, name), partial(setattr, value, name))
            return
        if isinstance(value, LEAVES):
            self._add(path, value, put)
            if isinstance(value, Tensor) and value.is_leaf and value.grad is not None:
                self.look((*path, "grad"), value.grad, partial(setattr, value, "grad"))
            return
        self.holders["/".join(path)] = value
        for held in held_in_data(value):
            replace = partial(put_item if held.is_item else put_attribute, value, held.key)
            self.look((*path, spelled(held.key, self.param)), held.value, replace)

    def take_over(self, path: str, other: Finder) -> None:
        """Put the value that another object has at a path at the same path here, also if nothing is there yet.

        Args:
            path: leads to a value there. What holds the value is here, too.
            other: has looked into the other object.
        """
        value = plain(other.found[path].value)
        if path in self.found:
            put(self.found[path], value)
            return
        parent, _, last = path.rpartition("/")
        here = self.holders.get(parent)
        if isinstance(here, MutableMapping):
            here[next(key for key in other.holders[parent] if spelled(key, other.param) == last)] = value
        elif here is not None:
            put_attribute(here, last, value)

    def _is_param(self, value: Any) -> bool:
        return bool(memory_of(value) & self._memory)

    def _add(self, path: Sequence[str], value: Any, put: Put) -> None:
        name = "/".join(path)
        if leaf_name((name,)) in self._names:
            raise NoPlace(f"two values are kept at {name}")
        self._names.add(leaf_name((name,)))
        self.found[name] = KeptPlace(value, put)


def held_in_data(value: Any) -> Iterator[Held]:
    """What a container or an object holds; nothing of code that has no attributes."""
    if isinstance(value, (Mapping, *SEQUENCES)):
        return entries_of(value)
    is_data = not callable(value) or isinstance(value, torch.nn.Module) or getattr(value, "__dict__", None)
    return attributes_of(value) if is_data else iter(())


def put_item(holder: Any, key: Any, value: Any) -> None:
    """Put a value into a container; raises TypeError if it cannot change."""
    holder[key] = value


def put_attribute(holder: Any, name: str, value: Any) -> None:
    """Put a value into an object, also if that is a frozen dataclass."""
    object.__setattr__(holder, name, value)


def spelled(key: Any, param: Tensor) -> str:
    """Spell a key of a path. What tells the parameter apart is "parameter", as it is another number elsewhere."""
    if key is param:
        return SPELLED_KEYS[0]
    if isinstance(key, int) and key in (id(param), param.data_ptr()):
        return SPELLED_KEYS[1]
    if isinstance(key, int) and 0 < key - param.data_ptr() < param.numel() * param.itemsize:
        return f"{SPELLED_KEYS[1]}+{key - param.data_ptr()}"  # of a view of the parameter
    if isinstance(key, tuple):
        return f"({', '.join(spelled(one, param) for one in key)})"
    return str(key).replace(".", "_").replace("/", "_")


def pattern_of(path: str) -> str:
    """A path without numbers, which is the same for parameters of other shapes and for the other entries of a list."""

    def pattern(part: str) -> str:
        if part.isdigit() or part in SPELLED_KEYS:
            return "*"
        return re.sub(r"\d+", "*", part) if part.startswith("(") else part

    return "/".join(map(pattern, path.split("/")))


def numbers_in(found: Mapping[str, KeptPlace]) -> dict[str, Any]:
    """The numbers among places."""
    return {path: place.value for path, place in found.items() if isinstance(place.value, NUMBERS)}


# -- values ----------------------------------------------------------------------------------------


def saved(found: Mapping[str, KeptPlace], texts_before: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what an object keeps, as plain tensors and numbers by path.

    Args:
        found: its places.
        texts_before: the texts that the code makes again by itself; only others are saved.
    """
    leaves = {path: plain(p.value) for path, p in found.items() if not isinstance(p.value, TEXTS)}
    texts = {path: text for path, text in texts_of(found).items() if texts_before.get(path, 0) != text}
    return {**leaves, NOTES: noted({"leaves": len(leaves), "shapes": shapes_in(leaves), "texts": texts})}


def shapes_in(leaves: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shapes of tensors by the names of their leaves, see `leaves`."""
    return {leaf_name((path,)): list(v.shape) for path, v in leaves.items() if isinstance(v, Tensor) and path != NOTES}


def saved_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The whole shapes that the tensors of a state had when it was saved; a state may hold fragments of them."""
    found: dict[str, list[int]] = read_notes(state[NOTES])["shapes"]
    return {name: tuple(shape) for name, shape in found.items()}


def texts_of(found: Mapping[str, KeptPlace]) -> dict[str, Any]:
    """The texts among places, and None."""
    return {path: place.value for path, place in found.items() if isinstance(place.value, TEXTS)}


def plain(value: Any) -> Any:
    """Copy a leaf as a tensor or a number."""
    if isinstance(value, random.Random):
        version, words, _ = value.getstate()
        return torch.tensor(
            [version, *words], dtype=torch.int64, device="cpu"
        )  # a second Gaussian that waits is drawn again
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def noted(notes: Mapping[str, Any]) -> Tensor:
    """Write plain values into a tensor of bytes."""
    text = json.dumps(notes).encode()
    text = text.ljust(-(-len(text) // NOTES_BYTES) * NOTES_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_notes(tensor: Tensor) -> dict[str, Any]:
    """Read what `noted` wrote."""
    found: dict[str, Any] = json.loads(bytes(tensor.cpu().to(torch.uint8).tolist()))
    return found


def lacking(found: Mapping[str, KeptPlace], leaves: Mapping[str, Any]) -> list[str]:
    """The paths of saved leaves for which an object has no place yet."""
    wanted = {**leaves, **read_notes(leaves[NOTES])["texts"]}
    return sorted(wanted.keys() - found.keys() - {NOTES})


def put_back(found: Mapping[str, KeptPlace], leaves: Mapping[str, Any]) -> None:
    """Give an object the values that another one kept.

    Args:
        found: its places.
        leaves: what `saved` returned.

    Raises:
        NoPlace: a leaf has no place, or the object has one for a leaf that is not there.
    """
    notes = read_notes(leaves[NOTES])
    texts: dict[str, Any] = notes["texts"]
    if missing := lacking(found, leaves):
        raise NoPlace(f"{missing[0]} is saved but does not exist in the optimizer")
    if len(leaves) - 1 != notes["leaves"]:
        raise NoPlace(f"the checkpoint has {len(leaves) - 1} of {notes['leaves']} saved values")
    for name, shape in shapes_in(leaves).items():
        if notes["shapes"].get(name) != shape:
            raise NoPlace(f"{name} has shape {shape}, but was saved with shape {notes['shapes'].get(name)}")
    wanted = {**{k: v for k, v in leaves.items() if k != NOTES}, **texts}
    known = {path for path, place in found.items() if not isinstance(place.value, TEXTS)}
    if extra := sorted(known - wanted.keys()):
        raise NoPlace(f"nothing was saved for {extra[0]}")
    for path, value in wanted.items():
        try:
            put(found[path], value)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise NoPlace(f"{path} cannot be changed: {error}") from error


def put(place: KeptPlace, value: Any) -> None:
    """Put a value back: in place where that is possible, so that whoever else knows the tensor sees it."""
    there = place.value
    if isinstance(there, random.Random):
        version, *words = value.tolist()
        there.setstate((version, tuple(words), None))
    elif isinstance(there, Tensor) and isinstance(value, Tensor):
        with torch.no_grad():
            if there.shape == value.shape and there.dtype == value.dtype:
                with torch.inference_mode() if there.is_inference() else contextlib.nullcontext():
                    there.copy_(value)
            elif isinstance(there, torch.nn.Parameter):
                place.put(torch.nn.Parameter(value.to(there.device).clone(), requires_grad=there.requires_grad))
            else:
                place.put(value.to(there.device).clone())
    elif isinstance(there, np.ndarray):
        np.copyto(there, value.cpu().numpy(), casting="no")
    elif isinstance(there, np.generic):
        place.put(type(there)(value))
    elif type(there) is not type(value) or there != value:
        place.put(value.clone() if isinstance(value, Tensor) else value)
