"""Work of devices that is done later: streams of items, and an order among all of them that a seed decides.

Nothing runs in parallel. A stream does its items one after the other; between streams there is no order but that of
events, so the scheduler may run any item that has nothing to wait for. How soon it runs items, and which ones it
prefers, is drawn once per seed: one seed leaves all work until somebody needs it, another one does it at once. The
same seed gives the same order again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

LAZY = (0.0, 0.0, 0.3, 0.6, 0.9)  # by seed: how likely it is that a further item runs when one is put into a queue


class DeviceError(BaseException):
    """The device was used in a way that a real one would not survive. No `except Exception` takes it for less."""


class Item:
    """One piece of work.

    Args:
        name: of the work, for errors.
        stream: the stream that does it; None if it belongs to none.
        work: does it.
        needs: what has to be done before, beside the items that are in the stream already.
    """

    def __init__(self, name: str, stream: Queue | None, work: Callable[[], None], needs: list[Item]) -> None:
        self.name, self.stream, self.work = name, stream, work
        self.needs = [need for need in needs if not need.done]
        self.together: list[Item] | None = None  # of a collective: the items of its ranks, as far as they came
        self.members = 1  # of a collective: how many ranks it needs
        self.kept: list[Any] = []  # of a collective: what it holds until it is done or a stream waits for it
        self.done = False

    @property
    def first(self) -> bool:
        """Whether nothing that its stream has to do before is left."""
        return self.stream is None or self.stream.items[0] is self

    @property
    def ready(self) -> bool:
        """Whether it may run now, its peers left aside."""
        return self.first and all(need.done for need in self.needs)

    @property
    def runnable(self) -> bool:
        """Whether it may run now. All ranks of a collective have to be ready."""
        if self.together is None:
            return self.ready
        return len(self.together) == self.members and all(item.ready for item in self.together)


class Queue:
    """The items of one stream that are not done yet, in order.

    Args:
        name: of the stream, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: deque[Item] = deque()
        self.last: Item | None = None  # the newest item, done or not

    @property
    def tail(self) -> list[Item]:
        """What has to be done when everything in this stream is."""
        return [] if self.last is None or self.last.done else [self.last]


class Scheduler:
    """Decides which item runs next.

    Args:
        seed: decides everything. None stands for an order that hides every mistake: each item runs at once.
    """

    def __init__(self, seed: int | None) -> None:
        self.random = random.Random(seed)
        self.prompt = seed is None
        self.eager = 1.0 if seed is None else self.random.choice(LAZY)
        self.loyal = self.random.choice((0.5, 0.9, 1.0))  # how likely the stream with the highest rank is taken
        self.queues: list[Queue] = []
        self.loose: list[Item] = []  # items that belong to no stream
        self._ranks: dict[Queue | None, float] = {}
        self._running: Item | None = None
        self.count = 0  # items that ran so far

    def queue(self, name: str) -> Queue:
        """Make a stream."""
        made = Queue(name)
        self.queues.append(made)
        return made

    def put(self, item: Item) -> Item:
        """Let an item be done later."""
        if item.stream is None:
            self.loose.append(item)
        else:
            item.stream.items.append(item)
            item.stream.last = item
        return item

    def run_some(self) -> None:
        """Run a few items, as many as this seed wants to run ahead."""
        while self.random.random() < self.eager or self.prompt:
            if not self.run_any():
                return

    def run_any(self) -> bool:
        """Run one item that may run; returns whether there was any."""
        found = list(self._runnable())
        if not found:
            return False
        if self.random.random() < 0.05:
            self._ranks.clear()
        item = self.random.choice(found)
        if self.random.random() < self.loyal:
            item = max(found, key=lambda i: self._rank(i.stream))
        self._run(item)
        return True

    def _rank(self, queue: Queue | None) -> float:
        return self._ranks.setdefault(queue, self.random.random())

    def _runnable(self) -> Iterator[Item]:
        heads = [queue.items[0] for queue in self.queues if queue.items]
        yield from (item for item in [*heads, *self.loose] if item.runnable)

    def _run(self, item: Item) -> None:
        if self._running:
            raise DeviceError(f"{item.name} runs inside {self._running.name}")
        self._running = item
        try:
            self._do(item)
        finally:
            self._running = None

    def _do(self, item: Item) -> None:
        self.count += 1
        item.work()
        for own in item.together or [item]:
            own.done = True
            own.needs = []
            own.kept.clear()
            if own.stream is None:
                self.loose.remove(own)
            else:
                own.stream.items.popleft()

    def advance(self, target: Item) -> bool:
        """Run one item, mostly one that `target` waits for.

        Returns:
            Whether an item ran. If not, `target` waits for work that no host has asked for yet.
        """
        if self.random.random() < 0.3 and self.eager and self.run_any():
            return True
        blocking = self._blocking(target, [])
        if blocking is None:
            return False
        self._run(blocking)
        return True

    def _blocking(self, target: Item, path: list[Item]) -> Item | None:
        """The first item that has to run before `target` can; None if a rank of a collective has not come."""
        if target in path:
            raise DeviceError("the device waits for itself: " + " <- ".join(i.name for i in [*path, target]))
        if target.stream is not None and not target.first:
            target = target.stream.items[0]
            if target in path:
                raise DeviceError("the device waits for itself: " + " <- ".join(i.name for i in [*path, target]))
        path = [*path, target]
        waiting = [need for need in target.needs if not need.done]
        if waiting:
            return self._blocking(self.random.choice(waiting), path)
        if target.together is None:
            return target
        if len(target.together) < target.members:
            return None
        late = [peer for peer in target.together if not peer.ready]
        return self._blocking(self.random.choice(late), path) if late else target
