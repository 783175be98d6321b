"""What is copied of what users own: values are, and nothing that holds a handle; no finalizer runs once too often."""

from __future__ import annotations

import collections
import copy
import ctypes
import dataclasses
import enum
import functools
import gc
import io
import itertools
import os
import random
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.replica.copies import Copies, deep_copy
from canzona_compile.replica.miniature import Miniature
from tests.harness.marks import crossed
from tests.harness.pairs import Pair, feed, parameters, params_of, same_bits
from tests.harness.toy_optimizers import cube
from tests.harness.traps.grammar import toy

SHAPES = ((6, 4), (4, 6), (6, 4))


class FreedHandles:
    """Counts how often finalizers free the handles of weak references of storages.

    Attributes:
        count: how many were freed.
        too_often: how many frees there were without a handle that was given out.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held: collections.Counter[int] = collections.Counter()
        self.count = self.too_often = 0
        give, take = torch.UntypedStorage._weak_ref, torch.UntypedStorage._free_weak_ref

        def given(storage: Any) -> int:
            handle: int = give(storage)
            self.held[handle] += 1
            return handle

        def freed(handle: int) -> None:
            if handle not in self.held:  # given out before
                take(handle)
            elif self.held[handle] > 0:
                self.held[handle] -= 1
                self.count += 1
                take(handle)
            else:
                self.too_often += 1  # and the handle is left alone, so that this process lives

        patch.setattr(torch.UntypedStorage, "_weak_ref", given)
        patch.setattr(torch.UntypedStorage, "_free_weak_ref", staticmethod(freed))


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FreedHandles]:
    """Collections of garbage look only at what the test makes, and not at all that was imported."""
    gc.freeze()
    yield FreedHandles(monkeypatch)
    gc.unfreeze()


# Deep copies of parameter and gradient in the step.
CopiesInStep = toy("copies-in-step")("""
    half = torch.tensor(0.5)
    state.setdefault("last", torch.zeros_like(param)).copy_(copy.deepcopy(grad) * half)
    param.add_(cube(state["last"]) + copy.deepcopy(param.detach()), alpha=-group["lr"])
""")


def test_code_that_copies_fake_tensors_frees_no_handle_twice(freed: FreedHandles) -> None:
    pair = Pair(CopiesInStep, SHAPES)
    for step in range(3):
        for optimizer in pair.both:
            feed(optimizer, step)
            optimizer.step()
    same = [same_bits(a, b) for a, b in zip(*map(params_of, pair.both), strict=True)]
    del pair, optimizer
    gc.collect()
    assert all(same)
    assert freed.too_often == 0
    assert freed.count > 0


# -- what is shared --------------------------------------------------------------------------------


class Handle:
    """A handle that a finalizer frees."""

    freed = 0

    def __init__(self) -> None:
        self.notes: dict[str, int] = {}

    def __del__(self) -> None:
        Handle.freed += 1


class Locked:
    """A plain object that holds what cannot be copied, and numbers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts = [1, 2]


class CopiesItself:
    """Copies what it holds by the rules of Python."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself(copy.deepcopy(self.held, memo))


class Watching(TorchDispatchMode):
    """A mode that a user wrote."""


class Listed(list[Any]):
    """A list with an attribute."""


def fake_tensor() -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.tensor(1.0) + torch.zeros(2)


def mode_with_memory() -> FakeTensorMode:
    mode: FakeTensorMode = fake_tensor().fake_mode  # type: ignore[attr-defined]
    mode.fake_tensor_converter.meta_converter.storage_memo  # noqa: B018
    return mode


SHARED: dict[str, Callable[[], Any]] = {
    "weak reference of a storage": lambda: StorageWeakRef(torch.zeros(3).untyped_storage()),
    "object with a finalizer": Handle,
    "mode of fake tensors": mode_with_memory,
    "mode of a user": Watching,
    "file": lambda: open(os.devnull),  # noqa: SIM115
    "temporary file": tempfile.TemporaryFile,
    "lock": threading.Lock,
    "thread": threading.Thread,
    "event of a thread": threading.Event,
    "pointer": lambda: ctypes.pointer(ctypes.c_int(3)),
    "library": lambda: ctypes.CDLL(None),
    "memory view": lambda: memoryview(bytearray(4)),
    "weak reference": lambda: weakref.ref(torch.nn.Linear(1, 1)),
    "finalizer": lambda: weakref.finalize(torch.nn.Linear(1, 1), print),
    "module": lambda: os,
    "function": lambda: fake_tensor,
    "compiled function": lambda: torch.compile(cube),
    "class": lambda: Handle,
    "sentinel": object,
    "event of a stream": lambda: torch.Event("cpu"),
}
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda one: one, lambda held: held),
    "in a list": (lambda one: [0, one], lambda held: held[1]),
    "in a tuple": (lambda one: (one, []), lambda held: held[0]),
    "in a dict": (lambda one: {"a": {"b": one}}, lambda held: held["a"]["b"]),
    "in an object": (lambda one: types.SimpleNamespace(one=one), lambda held: held.one),
    "in a partial": (lambda one: functools.partial(print, one), lambda held: held.args[0]),
    "in one that copies itself": (lambda one: CopiesItself([one]), lambda held: held.held[0]),
    "on a tensor": (lambda one: with_attribute(torch.ones(2), one), lambda held: held.one),
}


def with_attribute(holder: Any, one: Any) -> Any:
    holder.one = one
    return holder


@pytest.mark.parametrize("name", list(SHARED))
def test_handles_are_shared(name: str, freed: FreedHandles) -> None:
    one, before = SHARED[name](), Handle.freed
    for way, (put, get) in WAYS.items():
        held = put(one)
        made = deep_copy(held)
        assert get(made) is one, way
        assert (made is held) == (way == "itself"), way
        del made
    if name in ("weak reference of a storage", "object with a finalizer", "mode of fake tensors"):
        gc.collect()  # what lies in cycles
    assert (freed.too_often, Handle.freed) == (0, before)
    if isinstance(one, io.IOBase):
        one.close()


HOMES: dict[str, Callable[[Any, Any], None]] = {
    "attribute": lambda optimizer, one: setattr(optimizer, "held", [one]),
    "group": lambda optimizer, one: optimizer.param_groups[0].update(held={"one": one}),
    "state": lambda optimizer, one: optimizer.state[params_of(optimizer)[0]].update(held=one),
    "state of none": lambda optimizer, one: optimizer.state.update(held=(one, [])),
    "parameter": lambda optimizer, one: setattr(params_of(optimizer)[0], "held", [one]),
}


@pytest.mark.parametrize(
    ("home", "kind"),
    crossed(list(HOMES), ["weak reference of a storage", "object with a finalizer", "mode of fake tensors"]),
)
def test_finalizers_run_once_wherever_an_optimizer_holds_a_handle(home: str, kind: str, freed: FreedHandles) -> None:
    one, optimizer, before = SHARED[kind](), SGD(parameters(SHAPES), lr=0.1), Handle.freed
    HOMES[home](optimizer, one)
    for _ in range(3):
        Miniature(optimizer, [[0, 1, 2]], stateful=True)
    gc.collect()
    assert (freed.too_often, Handle.freed) == (0, before)
    del one, optimizer
    gc.collect()
    assert (freed.too_often, Handle.freed) == (0, before + (kind == "object with a finalizer"))


# -- what is copied --------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    values: list[int]


@dataclasses.dataclass
class Open:
    values: list[int]
    own: Any = None


class Slotted:
    __slots__ = ("values",)

    def __init__(self, values: list[int]) -> None:
        self.values = values


class Named(tuple[Any, ...]):
    __slots__ = ()


Pair2 = collections.namedtuple("Pair2", "a b")
COPIED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, [2]], lambda v: v[1]),
    "list with an attribute": (lambda: with_attribute(Listed([[1]]), [2]), lambda v: v.one),
    "tuple": (lambda: (1, [2]), lambda v: v[1]),
    "named tuple": (lambda: Pair2(1, [2]), lambda v: v.b),
    "dict": (lambda: {1: [2]}, lambda v: v[1]),
    "ordered dict": (lambda: collections.OrderedDict(a=[2]), lambda v: v["a"]),
    "default dict": (lambda: collections.defaultdict(list, a=[2]), lambda v: v["a"]),
    "counter": (lambda: collections.Counter("aab"), lambda v: v),
    "deque": (lambda: collections.deque([[1], 2], maxlen=3), lambda v: v[0]),
    "set": (lambda: {1, 2}, lambda v: v),
    "bytes": (lambda: bytearray(b"ab"), lambda v: v),
    "text file in memory": (lambda: io.StringIO("ab"), lambda v: v),
    "partial": (lambda: functools.partial(print, [1]), lambda v: v.args[0]),
    "view of a dict": (lambda: types.MappingProxyType({"a": [1]}), lambda v: v["a"]),
    "namespace": (lambda: types.SimpleNamespace(a=[1]), lambda v: v.a),
    "frozen dataclass": (lambda: Frozen([1]), lambda v: v.values),
    "dataclass": (lambda: Open([1]), lambda v: v.values),
    "slots": (lambda: Slotted([1]), lambda v: v.values),
    "object with a lock": (Locked, lambda v: v.counts),
    "array": (lambda: np.arange(3.0), lambda v: v),
    "array of objects": (lambda: np.array([[1], None], dtype=object), lambda v: v[0]),
    "random": (lambda: random.Random(3), lambda v: v),
    "numpy's random": (lambda: np.random.default_rng(3), lambda v: v.bit_generator),
    "torch's random": (lambda: torch.Generator().manual_seed(3), lambda v: v),
    "count": (lambda: itertools.count(3), lambda v: v),
    "tensor": (lambda: torch.arange(3.0), lambda v: v),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(2)), lambda v: v),
    "storage": (lambda: torch.arange(3.0).untyped_storage(), lambda v: v),
    "module": (lambda: torch.nn.Linear(2, 2), lambda v: v.weight),
    "optimizer": (lambda: SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), lambda v: v.param_groups),
    "method": (lambda: Open([1]).__eq__, lambda v: v.__self__),
}


def as_text(value: Any) -> str:
    """What tells whether two values are equal."""
    if isinstance(value, torch.Generator):
        return str(value.get_state().tolist())
    if isinstance(value, random.Random):
        return str(value.getstate())
    if isinstance(value, np.random.BitGenerator):
        return str(value.state)
    if isinstance(value, io.StringIO):
        return value.getvalue()
    return str(list(value)) if isinstance(value, torch.UntypedStorage) else repr(value)


@pytest.mark.parametrize("name", list(COPIED))
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support will be removed from itertools")
def test_values_are_copied(name: str) -> None:
    make, inside = COPIED[name]
    value = make()
    held = {"first": value, "second": [value]}
    copies = Copies()
    made = copies.of(held)
    assert made["first"] is made["second"][0]
    assert type(made["first"]) is type(value)
    assert inside(made["first"]) is not inside(value)
    if name not in ("method", "optimizer"):
        assert as_text(inside(made["first"])) == as_text(inside(value))


def test_numbers_and_symbols_are_what_they_are() -> None:
    for value in (1, 2.5, "a", None, b"a", Colour.RED, torch.float32, torch.device("cpu"), np.float64(2), range(3)):
        assert deep_copy([value])[0] == value


def test_a_cycle_is_copied_as_one() -> None:
    value = Open([1])
    value.own = [(value, {})]
    made = deep_copy(value)
    assert made is not value
    assert made.own[0][0] is made


def test_what_leads_to_an_original_leads_to_what_stands_for_it() -> None:
    """By identity and weak reference, also inside of objects; by closure, also of one that closes over itself."""
    one, other = Open([1]), Open([2])

    def own(again: bool) -> Any:
        return own(False) if again else one

    held = types.SimpleNamespace(table={id(one): weakref.ref(one)}, own=own, shared=as_text)
    made = Copies([(one, other)], {id(one): id(other)}).of(held)
    assert made.table[id(other)]() is other
    assert made.own(True) is other
    assert own(True) is one
    assert made.shared is as_text


def test_views_of_one_tensor_stay_views() -> None:
    whole = torch.zeros(4)
    made = deep_copy([whole, whole[1:]])
    made[0][1] = 7.0
    assert made[1][0] == 7.0
    assert whole[1] == 0.0


def test_a_copy_that_fails_leaves_no_halves() -> None:
    """What an object has copied before it fails is copied anew where others hold it."""

    class Failing:
        def __init__(self, held: Any) -> None:
            self.held = held

        def __deepcopy__(self, memo: dict[int, Any]) -> Failing:
            memo[id(self)] = Failing(copy.deepcopy(self.held, memo))
            raise RuntimeError("no")

    inner = [1]
    failing = Failing(inner)
    copies = Copies()
    made = copies.of([failing, inner])
    assert made[0] is failing
    assert made[1] == [1]
    assert made[1] is not inner
    assert copies.kept == [failing]


def test_generators_are_refused_wherever_they_are() -> None:
    with pytest.raises(UnsupportedOptimizer, match="holds a Python generator"):
        deep_copy([types.SimpleNamespace(one=(i for i in range(3)))])


# -- what trials may not change --------------------------------------------------------------------


def test_what_makes_copies_keeps_no_original_alive() -> None:
    """Rehearsals copy optimizers, which would live on until Python looks for garbage."""
    gc.disable()
    try:
        optimizer = SGD(parameters(), lr=0.1)
        copies = Copies([(optimizer, object())])
        copies.of([{"a": [1]}, (optimizer,)])
        alive = weakref.ref(optimizer)
        del optimizer, copies
        assert alive() is None
    finally:
        gc.enable()
