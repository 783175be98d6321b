"""Backward under ZeRO-1: a bucket is reduced to its owners as soon as its last gradient is there."""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ReduceOp
from torch.utils.hooks import RemovableHandle

from canzona_compile.compat.torch_private import node_of_backward, outside_dynamo
from canzona_compile.data_parallel.collectives import (
    BROKEN,
    IN_FLIGHT,
    Pending,
    all_reduce,
    bytes_held,
    clear_all,
    copy_all,
    reduce,
    sum_replicas,
)
from canzona_compile.data_parallel.fragment import Fragment
from canzona_compile.data_parallel.gathering import ForwardHooks, Gathering
from canzona_compile.data_parallel.gradient import GradientEngine, ReducedGradient
from canzona_compile.data_parallel.hooks import MARK, Mark
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.bucket import Bucket
from canzona_compile.runtime.agreement import Agreement
from canzona_compile.runtime.channel import Announcement
from canzona_compile.runtime.step_clock import StepClock, during
from canzona_compile.runtime.waiter import Waiter

CALL = "backward()"  # the call that this announces
REDUCE = "reduce"  # the act of a measured step


class EndOfBackward:
    """Called by autograd when a backward pass ends. Dropped without a call if an exception ended it: `missed`."""

    def __init__(self, reached: Callable[[], None], missed: Callable[[], None]) -> None:
        self._reached, self._missed, self._open = reached, missed, True

    @outside_dynamo
    def __call__(self) -> None:
        self._open = False
        self._reached()

    def __del__(self) -> None:
        if self._open and not sys.is_finalizing():
            self._missed()


class Reduction:
    """Reduces the gradients of one model to their owners.

    Autograd calls it for each parameter whose gradient is complete. Buckets start in their order, because every rank
    has to start them in the same one. What is left at the end of backward, for parameters that took no part, starts
    then. A bucket's gradients are freed when it starts.

    Args:
        gathering: of the same buckets, on the same ranks; it ends before a backward pass begins.
        forward: what checks that parameters were here when the forward pass read them; None if all are.
        wire: the dtype in which gradients travel; None is that of the gradients.

    Attributes:
        under_way: whether a backward pass has begun whose gradients are not all reduced.
        reduced: whether gradients are with their owners now.
        hooks: the handles of the hooks through which autograd calls this.
        clock: notes how long reductions take; None while nothing is measured.
        present: the names of the parameters that had a gradient on some rank when they were last reduced.
    """

    def __init__(
        self,
        gathering: Gathering,
        forward: ForwardHooks | None,
        wire: torch.dtype | None,
        agreement: Agreement,
        engine: GradientEngine,
        zeros: bool,
    ) -> None:
        self.gathering, self.forward, self.wire = gathering, forward, wire
        self.filling, self.group, self.memory = gathering.filling, gathering.group, gathering.memory
        self.fragments, self.buckets = self.filling.fragments, self.filling.buckets
        self.agreement, self.engine, self.zeros = agreement, engine, zeros
        device = next(iter(self.fragments.values())).param.device
        self.waiter = Waiter(agreement.boards, device, BROKEN)
        self.number = 0
        self.reduced = False
        self.present: frozenset[str] = frozenset()
        self._paused = False
        self.under_way = False
        self.clock: StepClock | None = None
        for fragment in self.fragments.values():
            setattr(fragment.param, MARK, Mark())
        self._queued = False  # whether the end of this backward pass will call `finish`
        self._pass = 0  # how many backward passes have begun
        self._announced: Announcement | None = None  # this backward pass
        self._missing: list[set[str]] = []  # by bucket, the parameters whose gradients are not there yet
        self._next = 0  # the first bucket that is not started
        self._pending: deque[Pending] = deque()
        self._summing: list[Pending] = []  # taken, but for the sum over replicas, which follows on a stream beside
        self._side: torch.cuda.Stream | None = None
        self._shards: dict[int, Tensor] = {}
        self._seen: set[str] = set()
        self.hooks = [
            fragment.param.register_post_accumulate_grad_hook(self._hook_of(fragment))
            for fragment in self.fragments.values()
        ]

    # -- during backward -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this context, gradients accumulate on each rank and nothing is reduced."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _hook_of(self, fragment: Fragment) -> Callable[[Tensor], None]:
        # Python's garbage collector does not see hooks of tensors: a reference to the parameter would keep all alive.
        reference, name = weakref.ref(self), fragment.name

        @outside_dynamo  # a compiled train step calls it, where its graph breaks for the backward pass
        def arrived(_: Tensor) -> None:
            own = reference()
            if own is None:
                return
            with own.failing_together():
                if own.forward is not None:
                    own.forward.check(name)
                if not own._paused:
                    own._arrived(own.fragments[name])

        return arrived

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Inside this context, tell the other ranks of any error, so that none of them waits for this rank."""
        try:
            yield
        except BaseException as error:  # an interrupt leaves other ranks waiting as well
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Give up a backward pass because of an error.

        If it was not announced, it is now, with the error: all ranks raise, and nothing has begun. Else other ranks may
        be waiting for collectives of this one, so none of them can go on.
        """
        announced, self._announced = self._announced, None
        under_way, self.under_way = self.under_way, False
        self._queued = False
        self._leave()
        if announced is not None and announced.refused:
            return
        if announced is not None or under_way or not isinstance(error, Exception):
            self.agreement.interrupt(error)
            return
        known = error if isinstance(error, CanzonaError) else CanzonaError(f"{type(error).__name__}: {error}")
        if self.agreement.channel is not None:
            self.agreement.start(CALL, known).finish()

    def _missed(self, number: int) -> None:
        """An exception ended a backward pass: other ranks may wait for its collectives."""
        if self.under_way and number == self._pass:
            self.abandon(CanzonaError("an exception interrupted a backward pass"))

    def _leave(self) -> None:
        channel = self.agreement.channel
        if channel is not None and self in channel.under_way:
            channel.under_way.remove(self)

    def _arrived(self, fragment: Fragment) -> None:
        if not self.under_way:
            self._begin()
        if not self._queued:
            self._queue()
        indices = self.filling.buckets_of[fragment.name]
        if not any(fragment.name in self._missing[index] for index in indices):
            raise CanzonaError(
                "the gradient was accumulated twice in one backward pass",
                at=fragment.name,
                hint="pass use_reentrant=False to the activation checkpoints that share this parameter",
            )
        fragment.gradient()
        for index in indices:
            self._missing[index].discard(fragment.name)
        self._start_complete()

    def _begin(self) -> None:
        """Begin a new reduction of gradients: announce it and go on. The answer is read before the first collective."""
        self._announced = None
        self._pass += 1
        self.agreement.check()
        stale = [n for n, f in self.fragments.items() if isinstance(f.param.grad, ReducedGradient)]
        if stale:
            raise CanzonaError(
                "backward ran again after gradients were reduced",
                at=stale[0],
                hint="call zero_grad() first; to accumulate gradients, run all backward passes but the last inside "
                "no_sync()",
            )
        self.gathering.wait()
        channel = self.agreement.channel
        if channel is not None:
            self._announced = self.agreement.start(CALL)
            channel.under_way.append(self)
        self.under_way, self.reduced = True, False
        self._missing = [set(names) for names in self.filling.names]
        self._next = 0
        self._pending.clear()
        self._summing.clear()
        self._shards.clear()
        self._seen.clear()

    def _is_first(self) -> bool:
        """Whether collectives of this model may start: models that share ranks reduce one after the other.

        A layer that took no part on one rank would have another model's bucket start before this one's there.
        """
        channel = self.agreement.channel
        return channel is None or channel.under_way[0] is self

    def _start_complete(self) -> None:
        while self._next < len(self.buckets) and not self._missing[self._next] and self._is_first():
            with during(self.clock, REDUCE):
                self._start(self.buckets[self._next])

    def _start(self, bucket: Bucket) -> None:
        """Copy the gradients of a bucket together, free those that no later one needs, and start to reduce it."""
        if self._announced is not None:
            self._announced.result()
        while sum(pending.memory_in_buckets for pending in self._pending) >= IN_FLIGHT:
            self._take(self._pending.popleft())
        filled = self._filled(bucket)
        for name in self.filling.names[bucket.index]:
            if bucket.index == max(self.filling.buckets_of[name]):
                self.fragments[name].param.grad = None
        pending = reduce(self.group, bucket, filled)
        if self.group.replicate is not None and pending.parts is None and not self.waiter.on_host:
            self._side = self._side or torch.cuda.Stream(filled.device)
            self._side.wait_stream(torch.cuda.current_stream(filled.device))  # with one shard nothing was reduced
            with torch.cuda.stream(self._side):
                sum_replicas(self.group.replicate, pending)
        self._pending.append(pending)
        self._next += 1

    def _filled(self, bucket: Bucket) -> Tensor:
        names = self.filling.names[bucket.index]
        param = self.fragments[names[0]].param
        filled = self.memory.take(bucket.starts[-1], self.wire or bucket.dtype, param.device)
        grads = {name: self.fragments[name].gradient() for name in names}
        self._seen.update(name for name, grad in grads.items() if grad is not None)
        share = 1.0 / (self.group.size * self.group.replicas)
        empty = [filled[start:stop] for start, stop in bucket.gaps]
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for part in bucket.slices:
            start = bucket.starts[part.owner] + part.offset
            fragment = self.filling.holder(part)
            target, grad = filled[start : start + part.length], grads[fragment.name]
            if grad is None:
                empty.append(target)
                continue
            targets.append(target)
            sources.append(fragment.parts[part.key].of(grad).view(-1))
        clear_all(empty)
        copy_all(targets, sources)
        return filled.mul_(share)  # one launch for the whole bucket

    def _take(self, pending: Pending) -> None:
        """Wait for a bucket and keep this rank's shard of it; its sum over replicas may still be under way."""
        with during(self.clock, f"wait {REDUCE}"):
            for work in pending.works:
                self.waiter.wait(work)
            shard = pending.complete()
            if pending.summing is None:
                all_reduce(shard, ReduceOp.SUM, (self.group.replicate,), self.waiter)
        if pending.summing is not None:
            pending.sent = None
            self._summing.append(pending)
            return
        self._shards[pending.bucket.index] = shard.to(pending.bucket.dtype, copy=pending.result_is_in_sent)
        if pending.sent is not None:
            self.memory.give_back(pending.sent)

    def held_bytes(self) -> int:
        """Bytes of buckets under way and of shards that have arrived, during backward, and of memory for buckets."""
        pending = [tensor for one in (*self._pending, *self._summing) for tensor in one.tensors]
        return bytes_held([*pending, *self._shards.values()]) + self.memory.free_bytes

    # -- at the end of backward ----------------------------------------------------------------------

    def _queue(self) -> None:
        """Let the backward pass that runs now call `_at_end` when it ends."""
        self._queued = True
        Variable._execution_engine.queue_callback(EndOfBackward(self._at_end, partial(self._missed, self._pass)))

    def _at_end(self) -> None:
        self._queued = False
        # A reentrant checkpoint runs a backward pass inside another one, and the inner end is not the end of both.
        around = node_of_backward()
        if self.under_way and around is not None and self._next < len(self.buckets):
            self._queue_around(around)
        elif self.under_way:
            self.finish()

    def _queue_around(self, node: Any) -> None:
        """Queue the end of the pass that runs this node: the first node after it that runs does so.

        It may be that no gradient arrives any more outside of checkpoints: all else may be frozen.
        """
        handles: list[RemovableHandle] = []

        def queue_again() -> None:
            if self.under_way and not self._queued:
                self._queue()

        end = EndOfBackward(queue_again, partial(self._missed, self._pass))

        def queue(_: Any) -> None:
            for handle in handles:
                handle.remove()
            end()

        handles += [following.register_prehook(queue) for following, _ in node.next_functions if following is not None]

    def finish(self) -> None:
        """Reduce what is left, wait for all, and show every rank that its parameters have gradients.

        Every rank must call this. Autograd does at the end of backward.
        """
        with self.failing_together(), during(self.clock, REDUCE):
            if not self.under_way:
                self._begin()
            while not self._is_first():
                assert self.agreement.channel is not None
                self.agreement.channel.under_way[0].finish()
            while self._next < len(self.buckets):
                self._start(self.buckets[self._next])
            present = self._exchange()
            while self._pending:
                self._take(self._pending.popleft())
            for pending in self._summing:
                assert pending.summing is not None
                self.waiter.wait(pending.summing)
                self._shards[pending.bucket.index] = pending.result.to(pending.bucket.dtype)
            self._summing.clear()
        self._leave()
        self._announced = None
        self.under_way, self.reduced, self.present = False, True, present
        self.number += 1
        self._hand_out()
        if self.forward is not None:
            self.forward.forget()

    def _exchange(self) -> frozenset[str]:
        """Find the parameters with a gradient on some rank. Ranks announce that, so no host waits for its device."""
        names = tuple(self.fragments)
        missing = sum(1 << i for i, name in enumerate(names) if name not in self._seen and not self.zeros)
        if not self.zeros:
            with during(self.clock, f"wait {REDUCE}"):
                own = {"missing": f"{missing:x}"}
                answers = self.agreement.compare(f"the end of {CALL}", own, apart_from=self.gathering)
            missing = fold(operator.and_, (int(answer["missing"], 16) for answer in answers))
        return frozenset(name for i, name in enumerate(names) if not missing >> i & 1)

    def _hand_out(self) -> None:
        """Give owners the gradients of what they own, and every rank the sign that there are gradients."""
        for fragment in self.fragments.values():
            if fragment.name not in self.present:
                continue
            shards = [self._shards[self.filling.bucket_of(part).index] for part in fragment.owned]
            parts = [s[part.offset : part.offset + part.length] for s, part in zip(shards, fragment.owned, strict=True)]
            fragment.param.grad = ReducedGradient(fragment.param, parts, fragment.name, self.engine)
        self._shards.clear()
