"""What objects hold, as one flat dict by place, to see whether code changed something or did the same twice."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import inspect
import io
import itertools
import logging
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.tensors import bytes_of, inner_tensors, local_part

ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, enum.Enum)
CACHED = type(functools.lru_cache(len))  # functools has no public name for it
COUNTERS = (itertools.count, range)  # what they stand at is in their text
SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
CODE = (functools.partial, types.MethodType, types.FunctionType, types.GeneratorType, contextvars.ContextVar, CACHED)
UNOPENED = (np.ndarray, np.generic, io.IOBase, *COUNTERS, *SETS)  # that hold nothing which is looked into
# Not looked into. Loggers and handlers lead to all others of the process, and they remember which levels are on.
OPAQUE = (types.ModuleType, types.BuiltinFunctionType, type, torch.Generator, logging.Filterer, logging.LoggerAdapter)
# Objects of these modules' classes are kernels and operators, which note their first call and what they compiled. Of
# them only the functions are looked into that users gave them.
COMPILERS = (
    *("torch._dynamo", "torch._functorch", "torch._inductor", "torch._library", "torch._ops", "torch.library"),
    "triton",
)

Contents = dict[str, Any]
Label = Callable[[Any], str | None]


def nothing_labelled(_value: Any) -> str | None:
    """Label no value."""
    return None


class Snapshot:
    """Finds everything that objects hold, down to numbers, texts and tensors.

    Args:
        label: names values that are not looked into, such as parameters; None for all others.
        bits: whether tensors count by their bits, to compare two runs; if not, by identity and version, to see whether
            the same objects changed.

    Attributes:
        undo: puts back what the dicts, lists and sets held that were looked at.
    """

    def __init__(self, label: Label = nothing_labelled, bits: bool = True, most: int = 20_000) -> None:
        self.label, self.bits, self.most = label, bits, most
        self.found: Contents = {}
        self.undo: list[Callable[[], None]] = []
        self._seen: dict[int, tuple[str, Any]] = {}  # with the value, so that its id is not given to another

    def add(self, place: str, value: Any) -> None:
        """Look at a value and all that it holds."""
        if len(self.found) >= self.most:
            return
        label = "a proxy" if type(value) in weakref.ProxyTypes else self.label(value)
        if label is not None:  # a proxy says of itself that it is what it stands for
            self.found[place] = label
        elif isinstance(value, ATOMS):
            self.found[place] = type(value).__name__, value if value == value else "nan"
        elif isinstance(value, OPAQUE) or (callable(value) and not hasattr(value, "__dict__")):
            self.found[place] = self._name_of(value)
        elif id(value) in self._seen:
            self.found[place] = "the same as", self._seen[id(value)][0]
        else:
            self._seen[id(value)] = place, value
            self._look_into(place, value)

    def add_home(self, home: str, entries: Mapping[Any, Any]) -> None:
        """Look at the entries of one of the homes of an optimizer, see `homes_of`."""
        for key, value in entries.items():
            self.add(f"self.{key}" if home == "self" else f"{home}[{key!r}]", value)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that were looked at, by the place where each was first."""
        return ((place, value) for place, value in self._seen.values() if isinstance(value, Tensor))

    def _look_into(self, place: str, value: Any) -> None:
        self.found[place] = self._described(value)
        if (undo := restorer(value)) is not None:
            self.undo.append(undo)
        for held in held_by(value):
            self.add(f"{place}[{self._key(held.key)!r}]" if held.is_item else f"{place}.{held.key}", held.value)

    def _described(self, value: Any) -> Any:
        """What is compared of a value itself, beside what it holds."""
        if isinstance(value, Tensor):
            return bits_of(value) if self.bits else (id(value), value._version)
        if isinstance(value, np.ndarray | np.generic):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, COUNTERS):
            return repr(value)
        if isinstance(value, io.IOBase):
            return written_to(value) or self._name_of(value)
        if isinstance(value, SETS):
            return type(value).__name__, frozenset(map(self._key, value))
        if isinstance(value, (Mapping, *SEQUENCES)):
            return type(value).__name__, len(value)
        if isinstance(value, types.GeneratorType):
            return "generator", value.gi_frame and value.gi_frame.f_lasti
        return self._name_of(value)

    def _key(self, key: Any) -> Any:
        label = self.label(key)
        if label is not None:
            return label
        return key if isinstance(key, ATOMS) else self._name_of(key)

    def _name_of(self, value: Any) -> Any:
        name = getattr(value, "__qualname__", None) or type(value).__qualname__
        name = re.sub(r" at 0x[0-9a-f]+", "", str(name))  # names that users made of the text of objects
        return name if self.bits else (name, id(value))


class Held(NamedTuple):
    """One of the things that an object holds.

    Attributes:
        key: its key, its index, or the name of the attribute or the variable.
    """

    key: Any
    value: Any
    is_item: bool = False


def held_by(value: Any) -> Iterator[Held]:
    """What an object holds: entries, attributes, a gradient, what a function closes over."""
    if isinstance(value, Tensor):
        if (grad := gradient_of(value)) is not None:
            yield Held("grad", grad)
    elif isinstance(value, (Mapping, *SEQUENCES)):
        yield from entries_of(value)
    elif isinstance(value, functools.partial):
        yield from (Held(name, getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield Held("__self__", value.__self__)
    elif isinstance(value, contextvars.ContextVar):
        yield Held("get()", value.get(None))
    elif isinstance(value, types.GeneratorType):
        yield from itertools.starmap(Held, list(value.gi_frame.f_locals.items()) if value.gi_frame else ())
    elif isinstance(value, CACHED):  # not what a trial has put around the function
        yield Held("__wrapped__", inspect.unwrap(value))
    elif isinstance(value, types.FunctionType):
        yield from itertools.starmap(Held, (*cells_of(value), *defaults_of(value)))
    elif is_compiled(type(value)):
        yield from (held for held in attributes_of(value) if functions_in(held.value))
    elif is_plain_object(value):
        yield from attributes_of(value)


def functions_in(value: Any) -> bool:
    """Whether a value is a function, or a dict of functions and nothing else."""
    entries = list(value.values()) if isinstance(value, dict) else [value]
    return bool(entries) and all(isinstance(entry, types.FunctionType) for entry in entries)


def entries_of(value: Any) -> Iterator[Held]:
    """The entries of a container."""
    pairs = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
    return (Held(key, entry, is_item=True) for key, entry in pairs)


def attributes_of(value: Any) -> Iterator[Held]:
    """The attributes of an object, also those in slots that users wrote."""
    own = getattr(value, "__dict__", None)
    yield from itertools.starmap(Held, list(own.items()) if isinstance(own, dict) else ())
    for name in slots_of(type(value)):
        if hasattr(value, name):
            yield Held(name, getattr(value, name))


def is_plain_object(value: Any) -> bool:
    """Whether what an object holds are its attributes, and nothing else."""
    return not isinstance(value, (Tensor, Mapping, *SEQUENCES, *CODE, *UNOPENED))


def is_compiled(kind: type) -> bool:
    """Whether objects of a class are kernels or operators; not those of a class that users derive from theirs."""
    own = str(getattr(kind, "__module__", ""))
    held = issubclass(kind, Tensor | nn.Module)
    return not held and any(own == name or own.startswith(f"{name}.") for name in COMPILERS)


def restorer(value: Any) -> Callable[[], Any] | None:
    """Return what makes an object hold again what it holds now; None if nothing has to be done for that."""
    if isinstance(value, dict | set):
        return functools.partial(refill, value, "update", dict(value) if isinstance(value, dict) else set(value))
    if isinstance(value, list | deque):
        return functools.partial(refill, value, "extend", list(value))
    if isinstance(value, contextvars.ContextVar):
        return functools.partial(value.set, value.get(None))
    if isinstance(value, io.IOBase):
        place = written_to(value)
        return functools.partial(cut_off, value, place[1]) if place and isinstance(place[1], int) else None
    own = getattr(value, "__dict__", None) if is_plain_object(value) and not is_compiled(type(value)) else None
    return functools.partial(refill, own, "update", dict(own)) if isinstance(own, dict) else None


def refill(holder: Any, method: str, saved: Any) -> None:
    """Make a container hold again what it held."""
    holder.clear()
    getattr(holder, method)(saved)


def written_to(file: Any) -> tuple[str, Any] | None:
    """What a file in memory holds, or how far another one is written; None if code cannot write it, or it is closed."""
    with contextlib.suppress(OSError, ValueError):  # it has no place, such as a terminal
        if isinstance(file, io.StringIO | io.BytesIO):
            return type(file).__name__, file.getvalue()
        if file.writable() and file.seekable():
            return type(file).__name__, file.tell()
    return None


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient of a tensor, if it is one that may have a gradient."""
    try:
        return tensor.grad if tensor.grad_fn is None and tensor.is_leaf else None
    except RuntimeError:  # a view from within no_grad whose base was written outside, which autograd does not follow
        return None


def slots_of(kind: type) -> Iterator[str]:
    """The names of the slots of a class that users wrote."""
    for own in kind.__mro__:
        slots = own.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield name


def cells_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that a function closes over, by name, as far as they have values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


def defaults_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The default arguments of a function, by name."""
    positional, defaults = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def bits_of(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, requires_grad and bits of a tensor; of a DTensor those of this rank, of sparse ones no bits."""
    tensor = local_part(tensor)
    if inner := inner_tensors(tensor):
        return type(tensor).__name__, *(bits_of(getattr(tensor, name)) for name in inner)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_complex():
        return type(tensor).__name__, tuple(tensor.shape), tensor.dtype
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, bytes_of(tensor.cpu()).numpy().tobytes()


def cut_off(file: Any, end: int) -> None:
    """Take away what was written to a file behind a place."""
    with contextlib.suppress(OSError, ValueError):
        if file.tell() != end:
            file.seek(end)
            file.truncate()


def parameter_label(optimizer: Optimizer) -> Label:
    """Label an optimizer, its parameters and their ids, for `known_parameters`."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    names = {id(optimizer): "the optimizer", **{id(param): f"parameter {i}" for i, param in enumerate(params)}}
    return lambda value: names.get(value if type(value) is int else id(value))


def known_parameters(found: Contents) -> list[str]:
    """The attributes of an optimizer by which it knows parameters: `self.memo[parameter]`, or `self.chosen`."""
    places = dict[str, None]()
    for place, value in found.items():
        named = [value, *(value[1] if isinstance(value, tuple) and isinstance(value[-1], frozenset) else ())]
        if key := re.match(r"(self\.(?!state\b)[\w.]+\[)'parameter \d+'\]", place):
            places[f"{key[1]}parameter]"] = None
        elif re.fullmatch(r"self\.\w+(\[\d+\])?", place) and any(str(one).startswith("parameter ") for one in named):
            places[place.partition("[")[0]] = None
    return list(places)


def changed(before: Contents, after: Contents) -> list[str]:
    """The places at which two findings differ, the shortest first: a holder comes before what it holds."""
    missing = object()
    places = {p for p in before.keys() | after.keys() if before.get(p, missing) != after.get(p, missing)}
    return sorted(places, key=lambda place: (len(place), place))
