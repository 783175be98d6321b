"""Take steps of a miniature: of all parameters together, as plain optimizers do, or of each apart, as plans do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.asked import LayoutQuestions
from canzona_compile.capture.cached_calls import CachedCalls
from canzona_compile.capture.contents import Contents, Walk, bits_of, changed
from canzona_compile.capture.dynamo import as_written
from canzona_compile.capture.endless import Endless, Lines, NoCrash, unfinished
from canzona_compile.capture.external_counters import Counter, CounterShadow, counts_of
from canzona_compile.capture.memory import memory_of
from canzona_compile.capture.miniature import Miniature
from canzona_compile.capture.no_collectives import NoCollectives
from canzona_compile.capture.outside import Outside
from canzona_compile.capture.parts import Company, step_one
from canzona_compile.capture.twin import NOT_COPIED, hypers, plain_class, plain_step
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer, some
from canzona_compile.progress.interrupts import interrupted_here

ASKING = 4  # steps in which questions about the layout of gradients are noticed
TINY = 2.0**-30  # the factor by which some elements of parameters shrink before each step


@dataclass(frozen=True, slots=True)
class Scenario:
    """Steps that are rehearsed.

    Attributes:
        chosen: the parameters that take part.
        steps: the number of steps.
        missing: by step, the parameter that has no gradient.
        scales: by step, the factor of the first parameter's gradient.
        surges: by step, the factor of all gradients.
        rates: by step, the factor of all hyperparameters that are floats, from that step on.
        frozen: the step before which the last parameter stops to require a gradient, although it has one.
        loops: whether steps do without `foreach`.
        in_place: whether every gradient is written over the one before.
        stateful: whether parameters begin with small copies of the state that they have now.
    """

    chosen: Sequence[Sequence[int]]
    steps: int
    missing: Mapping[int, int]
    scales: Mapping[int, float]
    rates: Mapping[int, float]
    frozen: int | None = None
    stateful: bool = False
    loops: bool = False
    in_place: bool = False
    surges: Mapping[int, float] = field(default_factory=dict)

    def is_odd(self, number: int) -> bool:
        """Whether a step has gradients of a size that a training may never have."""
        return number in self.scales or number in self.surges


@dataclass(slots=True)
class RehearsedSteps:
    """What steps did.

    Attributes:
        first: what the optimizer held before the first step.
        after: by step, everything that the optimizer held after it.
        counters: what they counted outside of the state of parameters.
        writes_gradients: whether one of them wrote a gradient.
        keeps_gradients: whether one of them left a gradient to its parameter.
        aliases: where the optimizer held a gradient itself after one of them, and no copy of it.
        uses_cache: why they need a cache of the user's process, see `CachedCalls`; empty if they do not.
        reads_variables: whether the code calls `os.getenv`, which Dynamo takes for a constant.
        returned: by step, what it returned.
        asks_layout: what they asked about the layout of gradients in memory, see `LayoutQuestions`.
        drew: whether they drew random numbers from torch's own generators.
        error: what ended the run early; None if it took all steps.
    """

    first: Contents = field(default_factory=dict)
    after: list[Contents] = field(default_factory=list)
    counters: set[Counter] = field(default_factory=set)
    writes_gradients: bool = False
    keeps_gradients: bool = False
    aliases: dict[str, None] = field(default_factory=dict)
    asks_layout: set[str] = field(default_factory=set)
    uses_cache: str = ""
    reads_variables: bool = False
    returned: list[Any] = field(default_factory=list)
    error: Exception | None = None
    drew: bool = False


def together(optimizer: Optimizer, scenario: Scenario) -> RehearsedSteps:
    """Step all parameters together, as the plain optimizer does.

    Raises:
        UnsupportedOptimizer: the step writes something outside of the optimizer.
    """
    return read_later(lambda one: all_together(optimizer, one), scenario)


def read_later(take: Callable[[Scenario], RehearsedSteps], scenario: Scenario) -> RehearsedSteps:
    """Take steps, and leave only those aliases of gradients that later steps read.

    They read none if all is the same once every gradient is written over the one before.
    """
    found = take(scenario)
    if found.aliases:
        again = take(replace(scenario, in_place=True)).after
        if len(again) == len(found.after) and not any(map(changed, found.after, again)):
            found.aliases.clear()
    return found


def all_together(optimizer: Optimizer, scenario: Scenario) -> RehearsedSteps:
    """Take the steps of `together`."""
    small, calls = Miniature(optimizer, scenario.chosen, scenario.stateful, scenario.loops), CachedCalls()
    outside = Outside(optimizer, small.label, small.kept, calls)

    def step() -> Any:
        with torch.no_grad():
            return plain_step(type(small.optimizer))(small.optimizer)

    try:
        found = run(small, scenario, step)
        if places := changed(outside.contents, Outside(optimizer, small.label, small.kept).contents):
            raise UnsupportedOptimizer(
                f"{plain_class(optimizer).__name__}.step changes {some(places)}, outside of the optimizer",
                hint="keep what belongs to a parameter in self.state[param], and counters on the optimizer",
            )
        if places := texts_written(found):
            raise UnsupportedOptimizer(
                f"{plain_class(optimizer).__name__}.step writes to {some(places)}, and ranks would write other texts",
                hint="write logs in a hook of the step (register_step_post_hook)",
            )
    finally:
        outside.restore()
    found.uses_cache, found.reads_variables = calls.problem or small.calls.problem, outside.reads_variables
    return found


def texts_written(found: RehearsedSteps) -> list[str]:
    """The places of files in memory that steps wrote to."""
    last = found.after[-1] if found.after else found.first
    kinds = {place: value[0] for place, value in found.first.items() if isinstance(value, tuple) and value}
    return [place for place in changed(found.first, last) if kinds.get(place) in ("StringIO", "BytesIO")]


def apart(optimizer: Optimizer, scenario: Scenario, company: Company, whole: RehearsedSteps) -> RehearsedSteps:
    """Step each parameter by itself, as plans do for an optimizer that did `whole` together."""
    small = Miniature(optimizer, scenario.chosen, scenario.stateful, scenario.loops)
    outside = Outside(optimizer, small.label, small.kept, CachedCalls())
    shadow = CounterShadow(small.optimizer)

    def step() -> None:
        order = range(len(small.params)) if whole.drew else reversed(range(len(small.params)))
        for i in order:  # backwards, so that what one step leaves to the next shows; random numbers come in one order
            if small.params[i].grad is not None:
                step_one(small, i, company)
        if whole.counters:
            shadow.count()

    try:
        return run(small, scenario, step)
    finally:
        outside.restore()


def run(small: Miniature, scenario: Scenario, step: Callable[[], Any]) -> RehearsedSteps:
    """Take the steps of a scenario, up to one of odd gradients that does not end.

    Raises:
        UnsupportedOptimizer: a step of ordinary gradients does not end.
    """
    found, lines = RehearsedSteps(contents_of(small)), Lines()
    random = torch.Generator().manual_seed(0)
    memory: set[Any] = set()
    homes: dict[int, Tensor] = {}
    for number in range(scenario.steps):
        interrupted_here()
        factor = scenario.rates.get(number, 1.0)
        for group in small.optimizer.param_groups if factor != 1.0 else ():
            group.update({k: v * factor for k, v in hypers(group).items() if isinstance(v, float)})
        if number == scenario.frozen:
            small.params[-1].requires_grad_(False)
        given = []
        for i, param in enumerate(small.params):
            grad = torch.randn(param.shape, generator=random, device="cpu").to(
                param.device, param.grad_dtype or param.dtype
            )
            grad *= scenario.surges.get(number, 1.0)
            if i == 0:
                grad *= scenario.scales.get(number, 1.0)
            if scenario.in_place and scenario.missing.get(number) != i:
                grad = homes.setdefault(i, grad).copy_(grad)
            param.grad = None if scenario.missing.get(number) == i else grad
            given.append((param, param.grad, None if param.grad is None else param.grad.clone()))
        memory |= memory_of(*(grad for _, grad, _ in given))
        for param in small.params:  # beside elements as large as theirs, small differences of updates would vanish
            torch.atleast_1d(param.data)[..., ::2].mul_(TINY)
        before = counts_of(small.optimizer)
        try:
            # A mode costs as much as a small operator, and so does counting lines: only the first step is watched.
            watched = number == 0
            grads = [grad for _, grad, _ in given if grad is not None]
            asking = (
                LayoutQuestions(grads, small.params, found.asks_layout) if number < ASKING else contextlib.nullcontext()
            )
            odd = scenario.is_odd(number)
            with (
                as_written(),
                NoCollectives() if watched else contextlib.nullcontext(),
                asking if number < ASKING else contextlib.nullcontext(),
                NoCrash() if any(map(unfinished, grads)) else contextlib.nullcontext(),
                lines.bounded(odd) if odd or watched else contextlib.nullcontext(),
            ):
                found.returned.append(step())
        except CanzonaError:
            raise
        except Endless as error:
            if odd:
                break
            raise UnsupportedOptimizer(
                f"{plain_class(small.optimizer).__name__}.step does not end on matrices of a few random elements: it "
                f"was stopped after {error}",
                hint="bound its loops by a number of iterations",
            ) from None
        except Exception as error:  # whatever the optimizer's code raises: the other run has to raise it as well
            found.error = error
            break
        found.writes_gradients |= any(p.grad is not own or written(own, old) for p, own, old in given)
        found.keeps_gradients |= any(p.grad is not None for p, _, _ in given)
        found.counters |= {c for c, n in counts_of(small.optimizer).items() if c not in before or before[c] != n}
        for param in small.params:
            param.grad = None
        walk = walk_of(small)
        found.after.append(walk.found)
        places = [place for place, value in walk.tensors() if memory_of(value) & memory]
        found.aliases |= dict.fromkeys(re.sub(r"the state of parameter \d+", "self.state[param]", p) for p in places)
    return found


def written(grad: Tensor | None, before: Tensor | None) -> bool:
    """Tell whether the bits of a gradient changed."""
    return grad is not None and before is not None and bits_of(grad) != bits_of(before)


def contents_of(small: Miniature) -> Contents:
    """Everything that a miniature holds now, by place."""
    return walk_of(small).found


def walk_of(small: Miniature) -> Walk:
    """Look at everything that a miniature holds now."""
    optimizer, walk = small.optimizer, Walk(lambda v: small.label(v))
    for i, param in enumerate(small.params):
        values = Walk()
        values.add(f"parameter {i}", param)
        walk.found.update(values.found)
        walk.add(f"the state of parameter {i}", optimizer.state.get(param) or {})
        walk.add(f"the attributes of parameter {i}", vars(param))
    for g, group in enumerate(optimizer.param_groups):
        for name, value in hypers(group).items():
            walk.add(f"param_groups[{g}][{name!r}]", value)
    for name, value in vars(optimizer).items():
        if name not in NOT_COPIED:
            walk.add(f"self.{name}", value)
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            walk.add(f"self.state[{key!r}]", value)
    return walk
