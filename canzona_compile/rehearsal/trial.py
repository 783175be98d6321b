"""Trials: take the steps of a scenario on a miniature, in one way of stepping it, and note all that they do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.compat.interrupts import interrupted_here
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import pytree, without_function_modes
from canzona_compile.eager.cell import Shadow, step_alone, whole_copy
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.rehearsal.asked import LayoutQuestions
from canzona_compile.rehearsal.endless import Endless, Lines, NoCrash, unfinished
from canzona_compile.rehearsal.operators import InDouble, Operators
from canzona_compile.rehearsal.scenario import Scenario
from canzona_compile.replica.copies import CachedCalls
from canzona_compile.replica.external_counters import Counter, Counts, counts_of
from canzona_compile.replica.homes import homes_of, hypers, own_attributes
from canzona_compile.replica.miniature import Miniature
from canzona_compile.replica.outside import Outside
from canzona_compile.replica.randomness import seeded
from canzona_compile.replica.snapshot import Contents, Label, Snapshot, bits_of, changed
from canzona_compile.replica.twin import (
    LOOSE,
    Loose,
    as_written,
    blank_scratch,
    make_tensors,
    may_be_scratch,
    scratch_of,
    step_plainly,
)
from canzona_compile.tensors import memory_of, plain_attributes, storage_of

ASKING = 4  # steps in which questions about the layout of gradients are noticed
TINY = 2.0**-30  # the factor by which some elements of parameters shrink before each step
StepOf = Callable[[Miniature], Callable[[], Any]]  # makes what steps a miniature once, and returns what that returned


def plainly(small: Miniature) -> Callable[[], Any]:
    """Step all parameters together, as the plain optimizer does."""
    return partial(step_plainly, small.optimizer)


def alone(small: Miniature, counters: bool, in_order: bool) -> Callable[[], None]:
    """Step each parameter of a miniature by itself."""
    return apart(small.optimizer, counters, in_order)


def each_alone(optimizer: Optimizer, scenario: Scenario, plain: RehearsedSteps) -> RehearsedSteps:
    """Step each parameter by itself, where a plain run has shown how."""
    return take(optimizer, scenario, partial(alone, counters=bool(plain.counters), in_order=plain.drew))


def apart(optimizer: Optimizer, counters: bool, in_order: bool) -> Callable[[], None]:
    """Step each parameter by itself on a twin, as the owners of matrices do.

    Args:
        counters: whether steps count outside of the state of parameters.
        in_order: whether parameters step in their order, as random numbers come in it. Otherwise the last one is the
            first, so that what one step leaves to the next shows.
    """
    params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    shadow = Shadow()

    def step() -> None:
        group_of = [group for group in optimizer.param_groups for _ in group["params"]]
        with hidden(params) as grads:
            for i in range(len(params)) if in_order else reversed(range(len(params))):
                if (grad := grads[i]) is not None:
                    own = whole_copy(params[i], grad, plain_attributes(params[i]))
                    params[i].data.copy_(step_alone(optimizer, group_of[i], own, optimizer.state[params[i]]))
                    with without_function_modes():
                        drop_gradients(params)  # that the step gave to others
        if counters:
            shadow.count(optimizer)

    return step


@contextlib.contextmanager
def hidden(params: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Inside this context, parameters have no gradients: what an optimizer does to them beside its step shows."""
    with without_function_modes():
        grads = [param.grad for param in params]
        drop_gradients(params)
    try:
        yield grads
    finally:
        with without_function_modes():
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad


def drop_gradients(params: Iterable[Tensor]) -> None:
    """Let parameters have no gradients."""
    for param in params:
        if param.grad is not None:
            param.grad = None


@dataclass(slots=True)
class RehearsedSteps:
    """What steps did.

    Attributes:
        first: what the optimizer held before the first step.
        after: by step, everything that the optimizer held after it.
        counters: what they counted outside of the state of parameters.
        keeps_gradients: whether one of them left a gradient to its parameter.
        aliases: where the optimizer held a gradient itself after one of them, and no copy of it.
        asks_layout: what they asked about the layout of gradients in memory, see `LayoutQuestions`.
        outside: the places outside of the optimizer that they changed.
        uses_cache: why they need a cache of the user's process, see `CachedCalls`; empty if they do not.
        reads_variables: whether the code calls `os.getenv`, which Dynamo takes for a constant.
        drew: whether they drew from torch's own generators.
        draws_elsewhere: whether they drew from one that is neither torch's own nor held by the optimizer.
        loose: which attributes with tensors without dims they wrote, and which hyperparameters they made tensors.
        numbers: by step, what such attributes held after it.
        operators: what the first of them called.
        error: what ended the run early; None if it took all steps.
    """

    kind: str = ""
    first: Contents = field(default_factory=dict)
    after: list[Contents] = field(default_factory=list)
    counters: set[Counter] = field(default_factory=set)
    writes_gradients: bool = False
    keeps_gradients: bool = False
    aliases: dict[str, None] = field(default_factory=dict)
    asks_layout: set[str] = field(default_factory=set)
    outside: list[str] = field(default_factory=list)
    uses_cache: str = ""
    reads_variables: bool = False
    returned: list[Any] = field(default_factory=list)
    drew: bool = False
    draws_elsewhere: bool = False
    loose: Loose = field(default_factory=Loose)
    numbers: list[Any] = field(default_factory=list)
    operators: Operators = field(default_factory=lambda: Operators())
    error: Exception | None = None


def take(optimizer: Optimizer, scenario: Scenario, step_of: StepOf = plainly) -> RehearsedSteps:
    """Take the steps of a scenario on a miniature of an optimizer. What lies outside is as before then.

    Random numbers are the same each time. Questions about layouts are noted of plain steps only.
    """
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    with seeded(device) as drew, InDouble() if scenario.double else contextlib.nullcontext():
        small = Miniature(optimizer, scenario.chosen, scenario.stateful, scenario.counts)
        LOOSE[small.optimizer] = scenario.loose
        for param in small.params if scenario.double else ():
            param.grad_dtype = param.dtype
        with Outside(optimizer, small.label, small.kept, CachedCalls()) as outside:
            found = run(small, scenario, step_of(small), asks=step_of is plainly)
            found.outside = outside.changed()
        found.kind, found.drew = type(small.optimizer).__name__, drew()
        held = pytree.tree_leaves([vars(small.optimizer), list(small.optimizer.state.values())])
        known = {id(torch.default_generator), *map(id, held)}
        found.draws_elsewhere = any(id(one) not in known for one in found.operators.generators)
    found.uses_cache = outside.calls_problem or small.calls.problem
    found.reads_variables = outside.reads_variables
    return found


def take_plainly(optimizer: Optimizer, scenario: Scenario) -> RehearsedSteps:
    """Take plain steps, and leave only those aliases of gradients that later steps read.

    They read none if all is the same once every gradient is written over the one before.
    """
    found = take(optimizer, scenario)
    if found.aliases:
        again = take(optimizer, replace(scenario, in_place=True)).after
        if len(again) == len(found.after) and not any(map(changed, found.after, again)):
            found.aliases.clear()
    return found


def run(small: Miniature, scenario: Scenario, step: Callable[[], Any], asks: bool) -> RehearsedSteps:
    """Take the steps of a scenario, up to one of odd gradients that does not end."""
    found, lines = RehearsedSteps(first=contents_of(small)), Lines()
    gradients = Gradients(small, scenario)
    for number in range(scenario.steps):
        interrupted_here()
        change_what_users_change(small, scenario, number)
        given = gradients.give(number)
        for param in small.params:  # beside elements as large as theirs, small differences of updates would vanish
            torch.atleast_1d(param.data)[..., ::2].mul_(TINY)
        make_tensors(small.optimizer)
        vars(small.optimizer).update(blank_scratch(vars(small.optimizer), small.optimizer))
        found.operators.unwritten = {storage_of(tensor): tensor for tensor in scratch_of(small.optimizer).values()}
        before, numbers = counts_of(small.optimizer), numbers_on(small.optimizer)
        try:
            with watched(small, scenario, number, lines, found, asks):
                found.returned.append(step())
        except CanzonaError:
            raise
        except Endless as error:
            if scenario.is_odd(number):
                break
            raise UnsupportedOptimizer(
                f"{plain_class(small.optimizer).__name__}.step does not end on small random matrices: it "
                f"was stopped after {error}",
                hint="limit its loops to a number of iterations",
            ) from None
        except Exception as error:  # whatever the optimizer's code raises: the other run has to raise it as well
            found.error = error
            break
        found.writes_gradients |= any(p.grad is not own or written(own, old) for p, own, old in given)
        found.keeps_gradients |= any(p.grad is not None for p, _, _ in given)
        found.counters |= {c for c, n in counts_of(small.optimizer).items() if c not in before or before[c] != n}
        found.loose.made.update(turned_into_tensors(before, small.optimizer))
        now = numbers_on(small.optimizer)
        found.loose.scratch.update(name for name, held in now.items() if held != numbers.get(name))
        found.numbers.append({name: [bits for bits, *_ in held] for name, held in now.items()})
        for param in small.params:
            param.grad = None
        walk = walk_of(small.optimizer, small.params, small.label)
        found.after.append(walk.found)
        places = [place for place, value in walk.tensors() if memory_of(value) & gradients.memory]
        found.aliases |= dict.fromkeys(re.sub(r"the state of parameter \d+", "self.state[param]", p) for p in places)
    return found


class Gradients:
    """Draws the gradients of a scenario."""

    def __init__(self, small: Miniature, scenario: Scenario) -> None:
        self.small, self.scenario = small, scenario
        self.memory: set[Any] = set()
        self._random, self._other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        self._homes: dict[int, Tensor] = {}

    def give(self, number: int) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Give each parameter its gradient of a step; the parameters, the gradients, and copies of these."""
        scenario, given = self.scenario, list[tuple[Tensor, Tensor | None, Tensor | None]]()
        for i, param in enumerate(self.small.params):
            grad = torch.randn(param.shape, generator=self._random, device="cpu")
            grad = grad.to(param.device, param.grad_dtype or param.dtype)
            grad *= scenario.surges.get(number, 1.0)
            if i == 0:
                grad *= scenario.scales.get(number, 1.0)
            if i in scenario.others:
                grad = torch.randn(param.shape, generator=self._other, device="cpu").to(grad) * scenario.other(number)
            missing = scenario.missing.get(number) == i
            if scenario.in_place and not missing:
                grad = self._homes.setdefault(i, grad).copy_(grad)
            param.grad = None if missing else grad
            given.append((param, param.grad, None if missing else grad.clone()))
        self.memory |= memory_of(*(grad for _, grad, _ in given))
        return given


def change_what_users_change(small: Miniature, scenario: Scenario, number: int) -> None:
    """Change hyperparameters, and whether the last parameter requires a gradient, as a scenario does before a step."""
    factor = scenario.rates.get(number, 1.0)
    for group in small.optimizer.param_groups if factor != 1.0 else ():
        group.update({k: v * factor for k, v in hypers(group).items() if isinstance(v, float)})
    if number == scenario.frozen:
        small.params[-1].requires_grad_(False)


@contextlib.contextmanager
def watched(
    small: Miniature, scenario: Scenario, number: int, lines: Lines, found: RehearsedSteps, asks: bool
) -> Iterator[None]:
    """Inside this context, the step of a number is watched.

    A mode costs as much as a small operator, and so does counting lines: only the first steps are watched for all.

    Args:
        asks: whether it is to be noted what they ask about the layout of gradients.
    """
    grads = [param.grad for param in small.params if param.grad is not None]
    odd, first = scenario.is_odd(number), number == 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_written())
        if first:
            stack.enter_context(found.operators)
        if number < ASKING and asks:
            stack.enter_context(LayoutQuestions(grads, small.params, found.asks_layout))
        if any(map(unfinished, grads)):
            stack.enter_context(NoCrash())
        if odd or first:
            stack.enter_context(lines.bounded(odd))
        yield


def turned_into_tensors(before: Counts, optimizer: Optimizer) -> dict[str, tuple[torch.dtype, torch.device]]:
    """The hyperparameters that are tensors now of what was a number, with dtype and device."""
    return {
        key: (value.dtype, value.device)
        for group in optimizer.param_groups
        for key, value in group.items()
        if may_be_scratch(value) and Counter("group", key) in before
    }


def numbers_on(optimizer: Optimizer) -> dict[str, list[tuple[Any, ...]]]:
    """The 0-d tensors in attributes of an optimizer, by name: the bits of each, its id and its version."""
    leaves = {name: pytree.tree_leaves(value) for name, value in own_attributes(optimizer).items()}
    return {name: [(bits_of(x), id(x), x._version) for x in own if may_be_scratch(x)] for name, own in leaves.items()}


def written(grad: Tensor | None, before: Tensor | None) -> bool:
    """Tell whether the bits of a gradient changed."""
    return grad is not None and before is not None and bits_of(grad) != bits_of(before)


def texts_written(found: RehearsedSteps) -> list[str]:
    """The places of files in memory that steps wrote to."""
    last = found.after[-1] if found.after else found.first
    kinds = {place: value[0] for place, value in found.first.items() if isinstance(value, tuple) and value}
    return [place for place in changed(found.first, last) if kinds.get(place) in ("StringIO", "BytesIO")]


def contents_of(small: Miniature) -> Contents:
    """Everything that a miniature holds now, by place."""
    return walk_of(small.optimizer, small.params, small.label).found


def walk_of(optimizer: Optimizer, params: Sequence[Tensor], label: Label) -> Snapshot:
    """Look at everything that an optimizer holds now."""
    walk = Snapshot(label)
    for i, param in enumerate(params):
        values = Snapshot()
        values.add(f"parameter {i}", param)
        walk.found.update(values.found)
        walk.add(f"the state of parameter {i}", optimizer.state.get(param) or {})
        walk.add(f"the attributes of parameter {i}", vars(param))
    scratch = scratch_of(optimizer)
    for home, entries in homes_of(optimizer).items():
        walk.label = (lambda x: "scratch" if id(x) in scratch else label(x)) if home == "self" else label
        walk.add_home(home, entries)
    return walk
