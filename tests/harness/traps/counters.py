"""Counters outside of states: in objects, classes, globals, closures, default arguments, NumPy, modules."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap

FAMILY = "counters"


@dataclass
class Clock:
    """Counts."""

    ticks: int = 0


class ClockModule(nn.Module):
    """Counts in a buffer."""

    ticks: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ticks", torch.zeros(()))


class Counting(Optimizer):
    """Base of optimizers that count steps somewhere and divide by the count."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})
        self.begin()

    def begin(self) -> None:
        """Set what counts to where it begins."""

    def tick(self) -> Any:
        """Count one step, and give the count."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self.tick()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group["lr"] / count)

    def update(self, param: Tensor, grad: Tensor, rate: Any) -> None:
        param.sub_(cube(grad) * rate)


class InObject(Counting):
    """An object on the optimizer."""

    def begin(self) -> None:
        self.clock = Clock()

    def tick(self) -> Any:
        self.clock.ticks += 1
        return self.clock.ticks


class InObjectElementwise(InObject):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, rate: Any) -> None:
        param.sub_(grad * rate)


class InObjectOnHost(InObject):
    """The same, and nobody can trace it."""

    def update(self, param: Tensor, grad: Tensor, rate: Any) -> None:
        update = cube(grad)
        if update.norm().item() > 2:
            update = update / update.norm()
        param.sub_(update * rate)


class InClass(Counting):
    """An attribute of the class."""

    ticks = 0

    def begin(self) -> None:
        InClass.ticks = 0

    def tick(self) -> Any:
        InClass.ticks += 1
        return InClass.ticks


ticks = 0
TALLY: Counter[str] = Counter()


class InGlobal(Counting):
    """A global."""

    def begin(self) -> None:
        global ticks
        ticks = 0

    def tick(self) -> Any:
        global ticks
        ticks += 1
        return ticks


class InGlobalCounter(Counting):
    """An entry of a global Counter."""

    def begin(self) -> None:
        TALLY.clear()

    def tick(self) -> Any:
        TALLY["steps"] += 1
        return TALLY["steps"]


class InClosure(Counting):
    """A variable of the function that made the function."""

    def begin(self) -> None:
        count = 0

        def advance() -> int:
            nonlocal count
            count += 1
            return count

        self.advance = advance

    def tick(self) -> Any:
        return self.advance()


class InDefaultArgument(Counting):
    """A list that is the default of an argument."""

    def begin(self) -> None:
        self.advance.__func__.__defaults__[0][0] = 0  # type: ignore[attr-defined]

    def advance(self, memory: list[int] = [0]) -> int:  # noqa: B006 - a trap
        memory[0] += 1
        return memory[0]

    def tick(self) -> Any:
        return self.advance()


class InList(Counting):
    """A list of one number."""

    def begin(self) -> None:
        self.cell = [0]

    def tick(self) -> Any:
        self.cell[0] += 1
        return self.cell[0]


class InNumpy(Counting):
    """A number of NumPy's."""

    def begin(self) -> None:
        self.count = np.int64(0)

    def tick(self) -> Any:
        self.count += 1
        return float(self.count)


class InNumpyArray(Counting):
    """An array of NumPy's."""

    def begin(self) -> None:
        self.counts = np.zeros(1)

    def tick(self) -> Any:
        self.counts[0] += 1
        return float(self.counts[0])


class InTensor(Counting):
    """A tensor on the optimizer."""

    def begin(self) -> None:
        self.count = torch.zeros(())

    def tick(self) -> Any:
        return self.count.add_(1)


class InModule(Counting):
    """A buffer of a module on the optimizer."""

    def begin(self) -> None:
        self.clock = ClockModule()

    def tick(self) -> Any:
        return self.clock.ticks.add_(1)


class InIterator(Counting):
    """`itertools.count`."""

    def begin(self) -> None:
        self.numbers = itertools.count(1)

    def tick(self) -> Any:
        return next(self.numbers)


class InGenerator(Counting):
    """A generator gives the numbers of a schedule."""

    def begin(self) -> None:
        def schedule() -> Iterator[float]:
            value = 1.0
            while True:
                yield value
                value *= 1.5

        self.schedule = schedule()

    def tick(self) -> Any:
        return next(self.schedule)


class InDeque(Counting):
    """The last learning rates, of which the mean counts."""

    def begin(self) -> None:
        self.recent: deque[float] = deque([1.0], maxlen=3)

    def tick(self) -> Any:
        self.recent.append(self.recent[-1] * 1.5)
        return sum(self.recent) / len(self.recent)


class InFloat(Counting):
    """A number on the optimizer that decays."""

    def begin(self) -> None:
        self.rate = 1.0

    def tick(self) -> Any:
        self.rate *= 1.5
        return self.rate


class InProperty(Counting):
    """A property that counts how often it was asked."""

    asked = 0

    @property
    def count(self) -> int:
        self.asked += 1
        return self.asked

    def tick(self) -> Any:
        return self.count


class InGroup(Counting):
    """An object in the group."""

    def begin(self) -> None:
        self.param_groups[0]["clock"] = Clock()

    def tick(self) -> Any:
        self.param_groups[0]["clock"].ticks += 1
        return self.param_groups[0]["clock"].ticks


class Threshold(Counting):
    """A number on the optimizer decides which algorithm is meant."""

    steps = 0

    def tick(self) -> Any:
        self.steps += 1
        return 1.0

    def update(self, param: Tensor, grad: Tensor, rate: Any) -> None:
        param.sub_((grad if self.steps < 4 else cube(grad)) * rate)


class PerIdentity(PerParameter):
    """Counts for every id."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.counts: dict[Any, int] = {}

    def key(self, param: Tensor) -> Any:
        return id(param)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        key = self.key(param)
        self.counts[key] = self.counts.get(key, 0) + 1
        param.add_(cube(grad), alpha=-group["lr"] / self.counts[key])


class PerShape(PerIdentity):
    """Counts for every shape, so that parameters of one shape are coupled."""

    def key(self, param: Tensor) -> Any:
        return tuple(param.shape)


class PerKey(PerIdentity):
    """Counts for every parameter."""

    def key(self, param: Tensor) -> Any:
        return param


class Calls(PerParameter):
    """Counts updates, not steps, so that parameters are coupled."""

    calls = 0

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        self.calls += 1
        param.add_(cube(grad), alpha=-group["lr"] / self.calls)


class Hooked(Counting):
    """A hook counts after every step."""

    def begin(self) -> None:
        self.steps = 1
        self.register_step_post_hook(lambda opt, args, kwargs: setattr(opt, "steps", opt.steps + 1))

    def tick(self) -> Any:
        return self.steps


def start_again(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.steps = 0


TRAPS = (
    Trap("count-in-object", FAMILY, InObject, "either", ("clock",), seen=lambda o: o.clock.ticks),
    Trap("count-in-object-elementwise", FAMILY, InObjectElementwise, "either", ("clock",)),
    Trap("count-in-object-on-host", FAMILY, InObjectOnHost, "either", ("clock",)),
    Trap("count-in-class", FAMILY, InClass, "either", ("ticks",), seen=lambda o: InClass.ticks),
    Trap("count-in-global", FAMILY, InGlobal, "either", ("ticks",), seen=lambda o: ticks),
    Trap("count-in-global-counter", FAMILY, InGlobalCounter, "either", ("TALLY",), seen=lambda o: TALLY["steps"]),
    Trap("count-in-closure", FAMILY, InClosure, "either"),
    Trap("count-in-default-argument", FAMILY, InDefaultArgument, "either"),
    Trap("count-in-list", FAMILY, InList, "either", ("cell",), seen=lambda o: o.cell),
    Trap("count-in-numpy", FAMILY, InNumpy, "either", ("count",), seen=lambda o: float(o.count)),
    Trap("count-in-numpy-array", FAMILY, InNumpyArray, "either", ("counts",), seen=lambda o: float(o.counts[0])),
    Trap("count-in-tensor", FAMILY, InTensor, "either", ("count",), seen=lambda o: o.count),
    Trap("count-in-module", FAMILY, InModule, "either", ("clock",), seen=lambda o: o.clock.ticks),
    Trap("count-in-iterator", FAMILY, InIterator, "either", ("numbers",)),
    Trap("count-in-generator", FAMILY, InGenerator, "either"),
    Trap("count-in-deque", FAMILY, InDeque, "either", ("recent",), seen=lambda o: list(o.recent)),
    Trap("count-in-float", FAMILY, InFloat, "either", ("rate",), seen=lambda o: o.rate),
    Trap("count-in-property", FAMILY, InProperty, "either", ("asked",), seen=lambda o: o.asked),
    Trap("count-in-group-object", FAMILY, InGroup, "either", ("clock",)),
    Trap("count-decides", FAMILY, Threshold, "equal", steps=6, seen=lambda o: o.steps),
    Trap("count-decides-and-starts-again", FAMILY, Threshold, "equal", steps=7, edit=start_again),
    Trap("count-per-id", FAMILY, PerIdentity, "either", ("counts",)),
    Trap("count-per-shape", FAMILY, PerShape, "either", ("counts",)),
    Trap("count-per-parameter", FAMILY, PerKey, "either", ("counts",)),
    Trap("count-of-calls", FAMILY, Calls, "either", ("calls",)),
    Trap("count-by-hook", FAMILY, Hooked, "equal", seen=lambda o: o.steps),
)
