"""After a step under ZeRO-1: owners send the parameters that they updated to all ranks."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from canzona_compile.compat.torch_private import is_optimized
from canzona_compile.data_parallel.collectives import (
    BROKEN,
    IN_FLIGHT,
    BucketMemory,
    DataParallelGroup,
    Pending,
    copy_all,
    gather,
    shards_of,
)
from canzona_compile.data_parallel.fragment import Filling
from canzona_compile.data_parallel.hooks import Hook, ReadHook
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.bucket import Bucket
from canzona_compile.runtime.agreement import Agreement
from canzona_compile.runtime.channel import Channel
from canzona_compile.runtime.step_clock import StepClock, during
from canzona_compile.runtime.waiter import Waiter

RETURN = "gather params"  # the act of a measured step


class WaitingRanks:
    """The gather of one model that a rank waits for, in the store: of the rank that is furthest behind."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._key, self.asking = channel, f"waits/{name}", ""

    def tell(self, number: int) -> None:
        """Tell the others how many gathers this rank needs in all; 0 if it no longer waits."""
        channel, own = self._channel, json.dumps([self._channel.announced, number]) if number else ""
        with contextlib.suppress(RuntimeError):  # the store may have died with its host
            held = channel.kept(self._key)
            # All ranks share one key, and come back every second: the one that is furthest behind is to be seen.
            if held in ("", self.asking) or (number and json.loads(held)[0] > channel.announced):
                channel.store.compare_set(self._key, held, own)
        self.asking = own

    def asked(self) -> int:
        """How many gathers a rank needs that has not announced what this one has; 0 if none waits.

        It cannot announce it before. On ranks that make the same calls this does not happen, and no collective may
        start because time has passed: others may be on their way to another one.
        """
        announced, number = json.loads(self._channel.kept(self._key) or "[0, 0]")
        return int(number) if announced < self._channel.announced else 0


class Gathering:
    """Gathers buckets in the order in which a forward pass needs them: the reverse of backward's.

    Attributes:
        clock: notes how long gathers take; None while nothing is measured.
    """

    def __init__(self, filling: Filling, group: DataParallelGroup, agreement: Agreement, memory: BucketMemory) -> None:
        self.filling, self.group, self.memory = filling, group, memory
        device = self.filling.holder(self.filling.buckets[0].slices[0]).param.device
        self._watch = Waiter(agreement.boards, device, BROKEN)
        self._waits: WaitingRanks | None = None
        if agreement.channel is not None:
            self._waits = WaitingRanks(agreement.channel, agreement.name)
            agreement.channel.promised[self] = None
        self.taken = 0
        self.clock: StepClock | None = None
        self.unsettled = False  # whether buckets were queued that not all ranks are known to wait for
        self._waiting: deque[Bucket] = deque()  # updated by owners, not started
        self._pending: deque[Pending] = deque()

    @property
    def outstanding(self) -> frozenset[int]:
        """The indices of the buckets that are not here yet."""
        return frozenset([b.index for b in self._waiting] + [p.bucket.index for p in self._pending])

    def queue(self, buckets: Iterable[Bucket]) -> None:
        """Note that buckets, or parts of them, have to be gathered. Every rank must give the same ones."""
        self.unsettled = True
        self._waiting.extend(sorted(buckets, key=lambda bucket: -bucket.index))

    def start(self) -> None:
        """Start the first buckets in the queue; each further one starts when an earlier one has arrived."""
        while self._waiting and len(self._pending) < IN_FLIGHT:
            bucket = self._waiting.popleft()
            device = self.filling.holder(bucket.slices[0]).param.device
            whole = self.memory.take(bucket.starts[-1], bucket.dtype, device)
            shard = shards_of(bucket, whole)[self.group.rank].zero_()
            targets, sources = [], []
            for part in bucket.by_owner[self.group.rank]:
                fragment = self.filling.holder(part)
                targets.append(shard[part.offset : part.offset + part.length])
                sources.append(fragment.parts[part.key].of(fragment.values()).view(-1))
            copy_all(targets, sources)
            self._pending.append(gather(self.group, bucket, whole))

    def _take(self) -> None:
        """Wait for the bucket that was started first, and copy what other ranks own to its place."""
        pending = self._pending[0]
        with during(self.clock, f"wait {RETURN}"):
            for work in pending.works:
                self._watch.wait(work, self._tell)
        if self._waits is not None and self._waits.asking:
            self._waits.tell(0)
        self.taken += 1
        self._pending.popleft()
        bucket = pending.bucket
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for part in bucket.slices if pending.works else ():
            if part.owner != self.group.rank:
                start = bucket.starts[part.owner] + part.offset
                fragment = self.filling.holder(part)
                values, own = fragment.values(), pending.result[start : start + part.length]
                place = fragment.parts[part.key].place(values)
                if place is None:
                    fragment.parts[part.key].put(values, own)
                else:
                    targets.append(place)
                    sources.append(own.view(place.shape))
        copy_all(targets, sources)
        self.memory.give_back(pending.result)
        self.start()

    def wait(self) -> None:
        """Wait until all parameters are whole."""
        with torch.no_grad(), during(self.clock, RETURN):
            self.start()
            while self._pending:
                self._take()
        self.unsettled = False

    def catch_up(self) -> None:
        """Gather what another rank needs before it can announce what this one has, see `WaitingRanks.asked`."""
        number = 0 if self._waits is None else self._waits.asked()
        if not number:
            return
        with torch.no_grad(), during(self.clock, RETURN):
            self.start()
            while self._pending and self.taken < number:
                self._take()

    def _tell(self) -> None:
        if self._waits is not None:
            self._waits.tell(self.taken + 1)

    def wait_for(self, names: Iterable[str]) -> None:
        """Wait until these parameters are whole."""
        if not self._pending and not self._waiting:
            return
        needed = {index for name in names for index in self.filling.buckets_of[name]}
        with torch.no_grad(), during(self.clock, RETURN):
            self.start()
            while self._pending and needed & self.outstanding:
                self._take()


class ForwardHooks:
    """Lets every module wait for its own parameters just before it runs, and code outside of it before it reads one.

    Args:
        settle: waits for all parameters once all ranks have come. It raises if one does not come.
    """

    def __init__(self, model: nn.Module, gathering: Gathering, settle: Callable[[], None]) -> None:
        self.gathering, self._settle = gathering, settle
        self._early: set[str] = set()  # parameters that were updated and are not whole yet
        self._called: set[str] = set()  # parameters whose modules have been called or read since
        self._begun = False  # whether a forward pass of the model has begun since
        self._at_begin: tuple[str, ...] = ()  # parameters that the whole forward pass waits for
        self.hooks: list[RemovableHandle | ReadHook] = [
            model.register_forward_pre_hook(Hook(self._begin), prepend=True),
        ]
        self._known = {id(f.param): name for name, f in gathering.filling.fragments.items()}
        self._thread = 0  # that of the forward pass, once one has begun: others may read parameters for logs
        self._hook(model)
        readable = [m for m in model.modules() if any(id(p) in self._known for p in m._parameters.values())]
        self.hooks += [ReadHook(module, self._read) for module in readable]

    def _hook(self, module: nn.Module) -> None:
        """Let a module and those in it wait. Compiled code calls no hooks inside, so it waits for all it reads."""
        compiled = is_optimized(module)
        inside = compiled or module._compiled_call_impl is not None
        names = tuple(
            dict.fromkeys(self._known[id(p)] for p in module.parameters(recurse=inside) if id(p) in self._known)
        )
        if module._compiled_call_impl is not None and not compiled:
            self._at_begin += names  # `module.compile()` compiles the call with its hooks
        elif names:
            self.hooks.append(module.register_forward_pre_hook(Hook(partial(self._before, names))))
        for child in () if inside else module.children():
            self._hook(child)

    def _begin(self) -> None:
        gathering = self.gathering
        self._begun, self._thread = True, threading.get_ident()
        if torch.is_grad_enabled():
            with during(gathering.clock, RETURN):
                gathering.start()
        else:
            self._settle()  # no backward pass will show whether a parameter was read too early
        self._called |= set(self._at_begin)
        gathering.wait_for(self._at_begin)

    def _before(self, names: tuple[str, ...]) -> None:
        if not self._begun and not torch.is_grad_enabled():
            self._settle()  # a part of the model is evaluated, possibly on one rank alone
        self._thread = threading.get_ident()
        self._called.update(names)
        self.gathering.wait_for(names)

    def _read(self, param: Tensor) -> None:
        """Code reads a parameter, maybe outside of its module: a head's weight that embeds tokens, for one."""
        if threading.get_ident() == self._thread and (name := self._known.get(id(param))) is not None:
            self._called.add(name)
            self.gathering.wait_for((name,))

    def updated(self, indices: Iterable[int]) -> None:
        """Note that the parameters of these buckets are whole only once their modules have waited for them."""
        self._early |= {name for i in indices for name in self.gathering.filling.names[i]}
        self._called, self._begun, self._thread = set(), False, 0

    def forget(self) -> None:
        """Begin again: all parameters are whole, or the gradients of all forward passes so far have arrived."""
        self._early, self._called = set(), set()

    def check(self, name: str) -> None:
        """Raise if the forward pass read this parameter before it was gathered, without a call of its module."""
        if name in self._early and name not in self._called:
            raise CanzonaError(
                "the forward pass read the parameter before it was gathered, because its module was not called",
                at=name,
                hint='pass gather="step", or call optimizer.canzona.synchronize() before code that reads parameters '
                "without calling their module, such as model.encode(x) or model.forward(x)",
            )
