"""Runs a rank program that was written for CUDA, here, and finds accesses that its events leave in no order.

The program runs on the CPU, call by call. A dispatch mode sees which bytes every ATen operator reads and writes, so
that nothing is taken from what the emitter believes: views, casts and results that alias their operands are what
they are. Each access is dated with a vector clock; events carry clocks from stream to stream, and a collective is a
stream of its own from its start to its `finish`. Two accesses of the same bytes, one of them a write, have to be in
order. Memory that no value holds any more may be given to the next tensor that the same stream makes, so by then that
stream must have waited for every access to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.ir import program_ops
from canzona_compile.ir.program import Input, Program, StreamSet
from canzona_compile.ir.step import Step
from canzona_compile.ir.storage import Stored
from tests.lowering.emitted_steps import ProgramTensors

Clock = dict[str, int]


class Race(AssertionError):
    """Two accesses without an order, or memory that may be used anew while it is read."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes [start, end) of a storage, by the call number `at` of a stream."""

    stream: str
    at: int
    start: int
    end: int
    writes: bool
    node: str


@dataclass(slots=True)
class History:
    """What happened to a storage. `maker`: the stream on which it was allocated; None: it outlives the program."""

    maker: str | None
    accesses: list[Access] = field(default_factory=list)
    holders: int = 0  # how many values that are alive hold it


class Ledger:
    """Streams, their clocks, and every access so far. Implements `program_ops.Streams`."""

    def __init__(self) -> None:
        self.current = "caller"
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.events: dict[int, Clock] = {}
        self.histories: dict[int, History] = {}
        self.free: dict[str, list[History]] = defaultdict(list)  # by maker
        self.kept: list[Any] = []  # so that no address is given away twice
        self.node = ""

    def switch(self, name: str) -> None:
        self.current = name

    def record(self, event: int) -> None:
        assert event not in self.events, f"event {event} is recorded twice"
        self.events[event] = dict(self.clocks[self.current])

    def wait(self, event: int) -> None:
        assert event in self.events, f"event {event} is waited for before it is recorded"
        self.join(self.current, self.events[event])

    def join(self, stream: str, other: Mapping[str, int]) -> None:
        clock = self.clocks[stream]
        for name, at in other.items():
            clock[name] = max(clock.get(name, 0), at)

    def tick(self, stream: str) -> None:
        self.clocks[stream][stream] = self.clocks[stream].get(stream, 0) + 1

    def history(self, tensor: Tensor, maker: str | None) -> History:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.histories:
            self.kept.append(storage)
            self.histories[storage.data_ptr()] = History(maker)
            self.reuse(maker)
        return self.histories[storage.data_ptr()]

    def access(self, tensor: Tensor, writes: bool, stream: str) -> None:
        """Note an access, and raise Race if one before it is in no order with it."""
        if not tensor.numel():
            return
        history = self.history(tensor, stream)
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.itemsize
        clock = self.clocks[stream]
        new = Access(stream, clock.get(stream, 0), start, start + (reach + 1) * tensor.itemsize, writes, self.node)
        for old in history.accesses:
            if old.start >= new.end or new.start >= old.end or not (old.writes or writes):
                continue
            if old.stream != stream and clock.get(old.stream, 0) < old.at:
                raise Race(f"{self.node} on {stream} does not wait for {old.node} on {old.stream}")
        history.accesses.append(new)

    def hold(self, value: Any, change: int) -> None:
        """Note that a value begins or ends to hold memory."""
        for history in {id(h): h for h in map(self.known, tensors_in(value)) if h is not None}.values():
            history.holders += change
            if history.holders == 0 and history.maker is not None:
                self.free[history.maker].append(history)

    def reuse(self, stream: str | None) -> None:
        """Note that a stream makes a tensor. Raise Race if the memory that is free for it may still be in use."""
        for history in self.free.pop(stream, ()) if stream is not None else ():
            for old in history.accesses:
                if old.stream != stream and self.clocks[stream].get(old.stream, 0) < old.at:
                    raise Race(f"{self.node} may get memory of {stream} that is free while {old.node} uses it")

    def known(self, tensor: Tensor) -> History | None:
        return self.histories.get(tensor.untyped_storage().data_ptr())


def tensors_in(value: Any) -> list[Tensor]:
    return [own for own in pytree.tree_leaves(value) if isinstance(own, Tensor)]


class Seen(TorchDispatchMode):
    """Notes what every ATen operator reads and writes."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        ledger, stream = self.ledger, self.ledger.current
        ledger.tick(stream)
        given = list(zip(schema.arguments, args, strict=False))
        given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        looks = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        for argument, value in given if not looks else ():
            info = argument.alias_info
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, Tensor):
                    ledger.access(tensor, info is not None and info.is_write, stream)
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result) if not looks else ():
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in ledger.histories:
                ledger.access(tensor, True, stream)
        return result


class Checked(fx.Interpreter):
    """Runs a program's calls; collectives move nothing, but read and write what they are given."""

    def __init__(self, module: fx.GraphModule, ledger: Ledger) -> None:
        super().__init__(module)
        self.ledger, self.collectives = ledger, 0

    def run_node(self, n: fx.Node) -> Any:
        self.ledger.node = n.name
        dying = [self.env[own] for own in self.user_to_last_uses.get(n, ()) if own in self.env]
        result = super().run_node(n)
        self.ledger.hold(result, 1)
        if not n.users and n.op != "output":
            self.ledger.hold(result, -1)
        for value in dying:
            self.ledger.hold(value, -1)
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Generated kernels work on addresses, which no dispatch mode sees."""
        kernel = self.fetch_attr(target)
        if not isinstance(kernel, GroupedKernel):
            return super().call_module(target, args, kwargs)
        self.ledger.tick(self.ledger.current)
        for (lists, _), number in zip(args, kernel.parts, strict=True):
            for place, tensors in enumerate(lists):
                for tensor in tensors:
                    self.ledger.access(tensor, place >= kernel.programs[number].reads, self.ledger.current)
        return None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        ledger = self.ledger
        if target is program_ops.start_all_to_all:
            self.collectives += 1
            stream = f"collective {self.collectives}"
            ledger.join(stream, ledger.clocks[ledger.current])
            ledger.tick(stream)
            ledger.access(args[0], True, stream)
            ledger.access(args[1], False, stream)
            return stream
        if target is program_ops.start_meeting:
            return "meeting"
        if target is program_ops.finish:
            ledger.join(ledger.current, ledger.clocks[args[0]])
            return None
        return super().call_function(target, args, kwargs)


def check(step: Step, rank: int) -> Checked:
    """Run the program of an emitted step on tensors of this rank's sizes.

    Raises:
        Race: with the calls that are in no order.
    """
    program: Program = step.program
    ledger = Ledger()
    bound = Bound(step, rank, ledger)
    arguments = [bound.of(value) for value in program.inputs.values()]
    values = pytree.tree_leaves(arguments)
    parts = [t for value in values for t in (value.tensors if isinstance(value, Stored) else (value,))]
    leaves = [t for t in parts if isinstance(t, Tensor)]
    ledger.node = "the caller, before"
    ledger.tick("caller")
    for tensor in leaves:  # gradients were just written, parameters read by the model
        ledger.history(tensor, None)
        ledger.access(tensor, True, "caller")
    checked = Checked(program.module, ledger)
    with torch.no_grad(), Seen(ledger):
        checked.run(*arguments)
    assert ledger.current == "caller"
    ledger.node = "the caller, afterwards"
    ledger.tick("caller")
    for tensor in leaves:
        ledger.access(tensor, True, "caller")
    return checked


class Bound(ProgramTensors):
    """Arguments of a program whose streams are the ledger's."""

    def __init__(self, step: Step, rank: int, ledger: Ledger) -> None:
        super().__init__(step, rank)
        self.ledger = ledger

    def of(self, value: Input) -> Any:
        return self.ledger if isinstance(value, StreamSet) else super().of(value)


def orders(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The instructions that order streams: taking one away must not go unseen."""
    for node in module.graph.nodes:
        if node.target in (program_ops.wait, program_ops.keep):
            yield node
