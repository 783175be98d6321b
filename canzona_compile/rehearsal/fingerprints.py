"""Steps on tensors of real sizes that cost no memory: each has a fingerprint of the computation that made it.

Equal fingerprints mean equal values. A number that code reads on the host follows from the fingerprint of its tensor,
so what it decides or scales is the same in two runs if that tensor is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from canzona_compile.compat.torch_private import FakeTensor, no_dispatch
from canzona_compile.rehearsal.declared_writes import DeclaredWrites
from canzona_compile.replica.memory import given_to, storage_of, written_by
from canzona_compile.replica.raised import NoCollectives, Note, name_of
from canzona_compile.replica.snapshot import bits_of

MOST_CALLS = 10_000  # of one run, with reads on the host; code that waits for numbers to converge might not end
KEEP_VALUES = {"clone", "contiguous", "detach", "alias", "lift_fresh", "lift", "positive"}
LIKELY = {"all": True, "isfinite": True, "any": False, "isnan": False, "isinf": False}  # what finite numbers give
SCALES = (1.0, 1e3)  # of numbers that are read on the host, by step

PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

ViewPath = tuple[str, ...]  # the views between a tensor and its memory
MemoryPlace = tuple[Any, ...]  # the memory, and how a tensor lies in it


class TooLong(Exception):
    """The step calls more operators than a trial takes."""


class Fingerprints(NoCollectives):
    """Inside this mode, and a mode of fake tensors around it, operators make fingerprints.

    Args:
        note: gets the errors that the mode raises.
        seed: makes other numbers on the host.
        structural: whether fingerprints leave out all numbers, sizes among them, and numbers on the host follow from
            how many were read before, and not from the tensor.
        declared: gets the calls that are declared to write tensors with values, and knows which of them do not.

    Attributes:
        step: the number of the step.
        called: of each operator that was called, the fingerprint of what it made, and the numbers that it was given.
        mixes: whether an operator was given tensors of several parameters, such as `stack`.
    """

    def __init__(
        self, note: Note, seed: int = 0, structural: bool = False, declared: DeclaredWrites | None = None
    ) -> None:
        super().__init__()
        self.note, self.seed, self.structural = note, seed, structural
        self.declared = declared or DeclaredWrites()
        self.step = self._read = self._drawn = 0
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self.mixes = False
        self._from: dict[int, frozenset[int]] = {}  # the parameters that memory depends on
        self._memory: dict[int, str] = {}  # the fingerprint of what it holds
        self._paths: dict[MemoryPlace, ViewPath] = {}
        self._alive: list[Tensor] = []  # so that no other memory gets the address of a known one
        self._real: dict[int, str] = {}  # the fingerprints of real tensors that were written
        self._producers: dict[str, str] = {}

    @property
    def too_long(self) -> bool:
        """Whether the step called more operators than a trial takes, so that nothing is known of it."""
        return isinstance(self.note.error, TooLong)

    # -- what is known of tensors --------------------------------------------------------------------

    def of(self, tensor: Tensor) -> str:
        """Return the fingerprint of the values of a tensor."""
        if not isinstance(tensor, FakeTensor):
            if self.structural:
                return "constant"
            with no_dispatch():
                return self._real.get(id(tensor)) or digest(*bits_of(tensor))
        memory, path = self._place(tensor)
        return digest(self._memory[memory], *path) if path else self._memory[memory]

    def mark(self, tensor: Tensor, index: int, *what: Any) -> None:
        """Give a tensor that fills its memory a fingerprint: that of some texts, for a parameter."""
        self._begin(tensor, digest(index, *what))
        self._from[storage_of(tensor)] = frozenset({index})

    def _has_values(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is real, such as a learning rate, and was given nothing without values."""
        return not isinstance(tensor, FakeTensor) and id(tensor) not in self._real

    def _place(self, tensor: Tensor) -> tuple[int, ViewPath]:
        place = place_of(tensor)
        if place not in self._paths:
            if place[0] in self._memory:  # a view that no operator made
                self._paths[place] = tuple(map(self._text, place[1:]))
            else:
                self._begin(tensor, digest("unknown", self._text(place[1:])))
        return place[0], self._paths[place]

    def _begin(self, tensor: Tensor, fingerprint: str) -> None:
        place = place_of(tensor)
        self._memory[place[0]], self._paths[place] = fingerprint, ()
        self._alive.append(tensor)

    def _write(self, tensor: Tensor, fingerprint: str) -> None:
        if not isinstance(tensor, FakeTensor):
            self._real[id(tensor)] = fingerprint
            self._alive.append(tensor)
            return
        memory, path = self._place(tensor)
        self._memory[memory] = digest("written", self._memory[memory], *path, fingerprint) if path else fingerprint

    # -- operators -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except BaseException as error:
            self.note.add(error)
            raise

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check(func)
        if func.namespace in ("prim", "profiler"):  # asks for the device of a tensor and the like, or names a range
            return func(*args, **kwargs)
        name = name_of(func)
        if len(self.called) + self._read >= MOST_CALLS:
            raise TooLong(f"it calls more than {MOST_CALLS} operators")
        if name == "_local_scalar_dense":
            return self._number(args[0])
        if name == "equal":
            return self.of(args[0]) == self.of(args[1])
        given = given_to(func, args, kwargs)
        lists = [v for v in given.values() if isinstance(v, list | tuple) and v and isinstance(v[0], Tensor)]
        count = len(lists[0]) if name.startswith(("_foreach_", "_fused_")) and lists else 0
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._drawn += kwargs.get("generator") is not None  # of a default generator all draws of a step are equal
            given["generator"] = self._drawn, self.step
        tensors = list(tensors_in(given.values()))
        made = [self._entry(name, given, i, count) for i in range(max(count, 1))]
        self.called.append((digest(*made), tuple(numbers_in(given.values()))))
        path = digest(name, *(self._text(v) for v in list(given.values())[1:]))
        if tensors and all(map(self._has_values, tensors)):
            with no_dispatch():
                return func(*args, **kwargs)
        base = next((v for v in given.values() if isinstance(v, Tensor)), None)
        origins = [self._origin(given.values(), i, count) for i in range(max(count, 1))]
        found = func(*args, **kwargs)
        written = list(written_by(func, given))
        results = list(found) if isinstance(found, list | tuple) else [found]
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        for i, result in enumerate(results):
            if not isinstance(result, FakeTensor) or any(result is tensor for _, _, tensor in written):
                continue
            if views[min(i, len(views) - 1)] and isinstance(base, FakeTensor):
                self._view(result, base, name, path if len(results) == 1 else digest(path, i))
            else:
                own = made[i] if count and i < count else digest(made[0], i) if i else made[0]
                self._begin(result, own)
                self._from[storage_of(result)] = origins[i] if count and i < count else origins[0]
                self._producers[own] = name
        for argument, i, tensor in written:
            own = made[i] if count else made[0]
            if not isinstance(tensor, FakeTensor) and self.declared.keeps(func, argument, args, kwargs):
                continue
            self._write(tensor, own if argument == "self" else digest(own, argument))
            if isinstance(tensor, FakeTensor):
                before = self._from.get(storage_of(tensor), frozenset())
                self._from[storage_of(tensor)] = before | (origins[i] if count else origins[0])
        return found

    def _view(self, result: Tensor, base: Tensor, name: str, path: str) -> None:
        """Note a view, and how it comes from the tensor that it shows."""
        _, before = self._place(base)
        same = name in KEEP_VALUES or (result.shape == base.shape and name in ("view", "expand"))
        self._paths.setdefault(place_of(result), before if same else (*before, path))

    def _origin(self, values: Iterable[Any], i: int, count: int) -> frozenset[int]:
        """Return the parameters behind what an operator is given, and note whether it puts several together."""
        own = [v[i] if count and isinstance(v, list | tuple) and len(v) == count else v for v in values]
        each = [self._from.get(storage_of(t), frozenset()) for t in tensors_in(own) if isinstance(t, FakeTensor)]
        found: frozenset[int] = frozenset().union(*each)
        self.mixes |= len(found) > 1 and found not in each
        return found

    def _entry(self, name: str, given: Mapping[str, Any], i: int, count: int) -> str:
        """Return the fingerprint of what an operator computes, of entry i if it does the same to `count` entries."""
        tensors = [v for v in given.values() if isinstance(v, Tensor)]
        if name in KEEP_VALUES:
            return self.of(tensors[0])
        if name == "_to_copy" and given.get("dtype") in (None, tensors[0].dtype):
            return self.of(tensors[0])
        if name in ("copy_", "copy") and tensors[0].shape == tensors[1].shape and tensors[0].dtype == tensors[1].dtype:
            return self.of(tensors[1])
        values = [v[i] if count and isinstance(v, list | tuple) and len(v) == count else v for v in given.values()]
        return digest(name, *map(self._text, values))

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, list | tuple):
            return digest(*map(self._text, value))
        if self.structural and type(value) in (int, float):
            return "number"
        return repr(value) if isinstance(value, PLAIN) else type(value).__name__

    # -- numbers -------------------------------------------------------------------------------------

    def _number(self, tensor: Tensor) -> Any:
        """Make up the number that code reads of a tensor. Real tensors, such as learning rates, have theirs."""
        if self._has_values(tensor):
            with no_dispatch():
                return tensor.item()
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            with no_dispatch():
                return tensor.constant.item()
        self._read += 1
        fingerprint = self.of(tensor)
        source = digest(self._read, self.step) if self.structural else fingerprint
        part = int(digest(self.seed, source), 16) / 2**64
        if tensor.dtype is torch.bool:
            return LIKELY.get(self._producers.get(fingerprint, ""), part < 0.5)
        if not tensor.is_floating_point():
            return int(part * 3)
        return (0.5 + part) * SCALES[self.step % len(SCALES)]


def digest(*values: Any) -> str:
    """Hash texts and numbers, equally in every process."""
    parts: Iterator[bytes] = (v if isinstance(v, bytes) else repr(v).encode() for v in values)
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def place_of(tensor: Tensor) -> MemoryPlace:
    """Tell the memory of a tensor, and how it lies in it."""
    return storage_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operator."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, Tensor):
            yield value


def numbers_in(values: Iterable[Any]) -> Iterator[Any]:
    """The numbers among the arguments of an operator."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from numbers_in(value)
        elif type(value) in (int, float):
            yield value
