"""Ranks that are threads of this process, of which one runs at a time.

A rank runs until it has to wait: for a collective on the host, for the device, or a while. Then the seed decides
which other rank goes on. So a seed decides all that happens, and what patches modules for a while, as a capture does,
is never seen by another rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils import _python_dispatch

from tests.fake_cuda.communicators import Communicators, DeviceGroup
from tests.fake_cuda.device import FakeDevice, current_device, use_device
from tests.fake_cuda.scheduler import DeviceError, Scheduler

Condition = Callable[[], bool]


class Ranks:
    """Lets threads take turns.

    Args:
        scheduler: decides whose turn it is.
        count: how many ranks there are.
    """

    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self.scheduler = scheduler
        self.conditions: dict[int, Condition] = {rank: lambda: True for rank in range(count)}
        self.turns = [threading.Semaphore(0) for _ in range(count)]
        self.errors: dict[int, BaseException] = {}

    def block(self, until: Condition) -> None:
        """Let other ranks go on until a condition is met."""
        own = current_device().index
        while not until():
            self._check()
            self.conditions[own] = until
            self._hand_over(own)
        self._check()

    def pause(self) -> None:
        """Let another rank go on, or the device; what a rank does that looks at something again and again."""
        own = current_device().index
        self.scheduler.run_any()
        self.conditions[own] = lambda: True
        self._hand_over(own)
        self._check()

    def _check(self) -> None:
        if self.errors:
            raise DeviceError(f"rank {min(self.errors)} failed")

    def _hand_over(self, own: int) -> None:
        """Give the turn to a rank that can go on, and wait for this rank's next turn."""
        while True:
            ready = [rank for rank, met in self.conditions.items() if met() or self.errors]
            if ready:
                break
            if not self.scheduler.run_any():
                self.errors[own] = DeviceError("all ranks wait: " + self._waiting())
                return
        chosen = self.scheduler.random.choice(ready)
        if chosen != own:
            with own_mode_flags():
                self.turns[chosen].release()
                self.turns[own].acquire()

    def _waiting(self) -> str:
        return "; ".join(f"{q.name}: {q.items[0].name}" for q in self.scheduler.queues if q.items)

    def run(self, work: Callable[[int], Any], around: Callable[[int], Any]) -> list[Any]:
        """Run a function on every rank and return what each of them returned.

        Args:
            work: takes the rank.
            around: makes the context of a rank.

        Raises:
            BaseException: the error of the first rank that failed.
        """
        results: dict[int, Any] = {}

        def rank_of(rank: int) -> None:
            self.turns[rank].acquire()
            try:
                with around(rank):
                    self._check()
                    results[rank] = work(rank)
            except BaseException as error:
                self.errors.setdefault(rank, error)
            finally:
                del self.conditions[rank]
                if self.conditions:
                    self._leave()

        threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in self.conditions]
        for thread in threads:
            thread.start()
        self.turns[0].release()
        for thread in threads:
            thread.join()
        if self.errors:
            raise next(iter(self.errors.values()))
        return [results[rank] for rank in sorted(results)]

    def _leave(self) -> None:
        """Give the turn away for good."""
        while True:
            ready = [rank for rank, met in self.conditions.items() if met() or self.errors]
            if ready:
                self.turns[self.scheduler.random.choice(ready)].release()
                return
            if not self.scheduler.run_any():
                self.errors[-1] = DeviceError("the other ranks wait for one that is done: " + self._waiting())


class Meeting:
    """A collective on the host, in the place of `multi_threaded_pg.Collective`."""

    block: Callable[[Condition], None]

    def __init__(self, world_size: int, collective: Any, group: Any) -> None:
        self.data: list[Any] = [None] * world_size
        self.came, self.collective, self.done = 0, collective, False

    def join(self, rank: int, data: Any) -> Any:
        """Bring this rank's part, and wait until the last rank has done the work."""
        self.data[rank] = data
        self.came += 1
        if self.came == len(self.data):
            self.collective.work(self.data)
            self.done = True
        Meeting.block(lambda: self.done)
        return threaded.ret_work(data)


# Torch keeps in the process, not in threads, whether any dispatch mode is on. Guards of Dynamo ask for the last one.
MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


@contextlib.contextmanager
def own_mode_flags() -> Iterator[None]:
    """Inside this context another rank runs, with no dispatch mode on; afterwards this one, with its own."""
    own = {name: getattr(_python_dispatch, name) for name in MODE_FLAGS if hasattr(_python_dispatch, name)}
    vars(_python_dispatch).update(dict.fromkeys(own, False))
    try:
        yield
    finally:
        vars(_python_dispatch).update(own)


@contextlib.contextmanager
def thread_ranks(scheduler: Scheduler, count: int) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Make `count` ranks with a device each; gives the function that runs something on all of them.

    torch's own threaded process group, from its tests, keeps a world per thread; waiting is replaced by turns.
    """
    ranks = Ranks(scheduler, count)
    store = HashStore()
    communicators = Communicators(scheduler)

    @contextlib.contextmanager
    def around(rank: int) -> Iterator[None]:
        use_device(FakeDevice(rank, scheduler, ranks.block))
        torch.autograd.set_multithreading_enabled(False)
        if count > 1:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=count)
        try:
            yield
        finally:
            if count > 1:
                threaded.ThreadLocalWorld._world.__dict__.clear()
            use_device(None)

    def barrier(rank: int, store: Any, name: str, world_size: int, *_: Any, **__: Any) -> None:
        key = f"barrier/{name}"
        store.add(key, 1)
        ranks.block(lambda: store.add(key, 0) >= world_size)

    with contextlib.ExitStack() as stack:
        if count > 1:
            world = dist.distributed_c10d._world
            stack.callback(setattr, dist.distributed_c10d, "_world", world)
            dist.distributed_c10d._world = threaded.ThreadLocalWorld()
            _set_thread_isolation_mode(True)
            stack.callback(_set_thread_isolation_mode, False)
            Meeting.block = staticmethod(ranks.block)
            DeviceGroup.communicators = communicators
            threaded.ProcessLocalGroup.reset()
            for module, name, value in (
                (threaded, "Collective", Meeting),
                (threaded, "ProcessLocalGroup", DeviceGroup),
                (threaded, "_store_based_barrier", barrier),
                (dist.distributed_c10d, "_store_based_barrier", barrier),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
            stack.enter_context(mock.patch("time.sleep", side_effect=lambda _: ranks.pause()))
        yield lambda work: ranks.run(work, around)
