"""Rehearse an optimizer in miniature: step all parameters together, then one by one as plans do, and compare the bits.

What a step reads and writes beside its parameter, gradient, state and group shows as a difference, whatever it is. Then
further runs give the step more company, one thing at a time, until the difference goes away; that tells what it reads.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.asked import ADDRESS
from canzona_compile.capture.cached_calls import CachedCalls
from canzona_compile.capture.contents import Contents, changed
from canzona_compile.capture.coupling import NamesByGroup, difference, refusal, tensors_kept
from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.external_counters import Counter
from canzona_compile.capture.joint import JointUpdate
from canzona_compile.capture.miniature import Miniature
from canzona_compile.capture.outside import Outside
from canzona_compile.capture.parts import Company
from canzona_compile.capture.randomness import seeded
from canzona_compile.capture.real_sizes import check_real_sizes
from canzona_compile.capture.resident import Recipe
from canzona_compile.capture.trial import RehearsedSteps, Scenario, apart, contents_of, run, together
from canzona_compile.capture.twin import plain_class, plain_step
from canzona_compile.errors import RoundsOtherwise, UnsupportedOptimizer, some

MOST_PARAMETERS = 64  # of all in the short scenario; the first ones and the last one of each group
MOST_GROUPS = 16  # of the short scenario; the first ones and the last one. The long one has four
LONG = 46  # steps of the long scenario


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a rehearsal showed.

    Attributes:
        counters: the numbers that a step counts outside of the state of parameters.
        writes_gradients: whether a step writes `param.grad`.
        drops_gradients: whether it sets all of them to None.
        aliases: where it holds a gradient itself after a step, and no copy of it, e.g. "self.state[param]['prev']".
        needs_gradients: whether a step does something, or fails, if a parameter has no gradient.
        asks_frozen: whether it does something else for a parameter that has a gradient and requires none.
        asks_layout: what it asks about the layout of gradients in memory, see `LayoutQuestions`.
        reads_variables: whether the code calls `os.getenv`, which Dynamo takes for a constant.
        rounds_in_foreach: whether `foreach` stacks matrices of equal shape, which rounds otherwise than one by one.
        draws: whether a step draws random numbers.
        skipped: why the optimizer cannot be rehearsed; empty if it was.
        resident: why it runs as residents, one object per matrix; empty if it does not.
        recipe: how to make a resident, if it runs as such.
        joint: what it does if one rank steps all parameters at once; None if it does not run like that.
    """

    counters: frozenset[Counter] = frozenset()
    writes_gradients: bool = False
    drops_gradients: bool = False
    aliases: tuple[str, ...] = ()
    needs_gradients: bool = False
    asks_frozen: bool = False
    asks_layout: frozenset[str] = frozenset()
    reads_variables: bool = False
    rounds_in_foreach: bool = False
    draws: bool = False
    skipped: str = ""
    resident: str = ""
    recipe: Recipe | None = None
    joint: JointUpdate | None = None


def rehearse(optimizer: Optimizer, names: NamesByGroup = ()) -> Rehearsal:
    """Rehearse an optimizer. Every rank gets the same result, without communication.

    Args:
        optimizer: the optimizer.
        names: those of its parameters by group, for errors.

    Raises:
        UnsupportedOptimizer: its step reads or writes something that a plan does not give it, or fails in miniature.
    """
    numbers = [len(group["params"]) for group in optimizer.param_groups]
    if not any(numbers):
        return Rehearsal()
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    if device.type == "meta":
        return Rehearsal(skipped="its parameters have no values")
    names = names or default_names(optimizer)
    cast = scenarios(numbers)
    found = [rehearse_one(optimizer, scenario, device, names) for scenario in cast]
    if any(one.skipped for one in found) and any(isinstance(key, Tensor) for key in optimizer.state):
        # The state was made in the constructor, or the step cannot make it anew.
        cast = [replace(scenario, stateful=True) for scenario in cast]
        found = [rehearse_one(optimizer, scenario, device, names) for scenario in cast]
    if skipped := next((one for one in found if one.skipped), None):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step fails on parameters that are none of the model's, so that nothing "
            f"shows whether it updates them independently{tensors_kept(optimizer)}: {skipped.skipped}",
            hint="make the state in step() and for parameters of any size; pass no closure that step() needs",
        )
    check_real_sizes(optimizer, names, stateful=cast[0].stateful)
    if any(one.rounds_in_foreach for one in found):
        warnings.warn(
            RoundsOtherwise(
                f"{plain_class(optimizer).__name__} with foreach stacks equal shapes, which rounds otherwise than "
                "one by one; results have the bits of foreach=False."
            ),
            stacklevel=2,
        )
    return habits_of(found)


def habits_of(found: Sequence[Rehearsal]) -> Rehearsal:
    """Put together what several scenarios showed, without how the optimizer runs."""
    return Rehearsal(
        frozenset().union(*(one.counters for one in found)),
        writes_gradients=any(one.writes_gradients for one in found),
        drops_gradients=any(one.drops_gradients for one in found),
        aliases=all_of(one.aliases for one in found),
        needs_gradients=any(one.needs_gradients for one in found),
        asks_frozen=any(one.asks_frozen for one in found),
        asks_layout=frozenset().union(*(one.asks_layout for one in found)),
        reads_variables=any(one.reads_variables for one in found),
        rounds_in_foreach=any(one.rounds_in_foreach for one in found),
        draws=any(one.draws for one in found),
    )


def all_of(places: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Put places together, each once, in the order in which they come first."""
    return tuple(dict.fromkeys(place for some_places in places for place in some_places))


def rehearse_as_now(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Rehearse a few steps from the present counters on, to see what begins late.

    Args:
        optimizer: the optimizer.
        states: the state of each parameter, with a `Leaf` in place of each tensor whose values do not matter.

    Raises:
        UnsupportedOptimizer: its step reads or writes something that a plan does not give it.
    """
    now = object.__new__(type(optimizer))
    vars(now).update(vars(optimizer))
    now.state = defaultdict(dict, {key: dict(state) for key, state in states.items()})
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    first = scenarios([len(group["params"]) for group in optimizer.param_groups])[0]
    rehearse_one(now, replace(first, stateful=True), device, default_names(optimizer))
    check_real_sizes(now, default_names(optimizer), stateful=True)


def rehearse_one(optimizer: Optimizer, scenario: Scenario, device: torch.device, names: NamesByGroup) -> Rehearsal:
    """Rehearse one scenario; if need be without a frozen parameter, missing gradients, or `foreach`.

    Raises:
        UnsupportedOptimizer: parameters stepped apart do not give what they give together.
    """
    thawed = replace(scenario, frozen=None)
    variants = [scenario, thawed, replace(thawed, missing={})]
    if takes_foreach(optimizer):
        variants += [replace(variant, loops=True) for variant in variants]
    for one in variants:
        with seeded(device) as dice:
            whole = together(optimizer, one)
        whole.drew = dice.rolled
        if whole.error is not None and not whole.after:
            return Rehearsal(skipped=f"{first_line(whole.error)}{blamed(whole.error)}", draws=dice.rolled)
        check_returned(optimizer, whole)
        check_address(optimizer, whole)
        if whole.uses_cache:
            raise UnsupportedOptimizer(
                f"{plain_class(optimizer).__name__}.step {whole.uses_cache}",
                hint="make such things in the step, or keep them in self.state[param]",
            )
        with seeded(device):
            parts = apart(optimizer, one, Company.NONE, whole)
        if not difference(whole, parts):
            return Rehearsal(
                frozenset(whole.counters),
                writes_gradients=whole.writes_gradients,
                drops_gradients=not whole.keeps_gradients,
                aliases=tuple(whole.aliases),
                needs_gradients=one.missing != scenario.missing,
                asks_frozen=one.frozen != scenario.frozen,
                asks_layout=frozenset(whole.asks_layout) - {ADDRESS},
                reads_variables=whole.reads_variables,
                rounds_in_foreach=one.loops,
                draws=dice.rolled,
            )
    raise refusal(optimizer, one, whole, parts, names)


def takes_foreach(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer has an option `foreach`, in its groups or as an attribute."""
    return hasattr(optimizer, "foreach") or any("foreach" in group for group in optimizer.param_groups)


def default_names(optimizer: Optimizer) -> NamesByGroup:
    """The names that groups give to parameters, or their places."""
    return [
        group.get("param_names") or [f"group{g}.param{i}" for i in range(len(group["params"]))]
        for g, group in enumerate(optimizer.param_groups)
    ]


def scenarios(numbers: Sequence[int]) -> list[Scenario]:
    """Make a short scenario with many parameters and a long one with few.

    Args:
        numbers: the number of parameters of each group; not all of them 0.
    """
    filled = [g for g, n in enumerate(numbers) if n]
    groups = {*filled[: MOST_GROUPS - 1], filled[-1]}
    share = max(MOST_PARAMETERS // len(groups), 3)
    many = [[*range(min(n, share) - 1), n - 1] if g in groups else [] for g, n in enumerate(numbers)]
    groups = {*filled[:3], filled[-1]}
    few = [sorted({0, n - 1}) if g in groups else [] for g, n in enumerate(numbers)]
    nan = float("nan")
    last = sum(map(len, many)) - 1
    # Near the end, because what gradients of another size leave in the state hides slight differences.
    surges = {LONG - 3: 1e6, LONG - 2: 1e-6}
    return [
        Scenario(many, 8, {1: 0, 2: last}, {4: 1e4, 5: 0.0, 7: nan}, {3: 0.5}, frozen=5),
        Scenario(
            few, LONG, {5: 0, 9: 1}, {15: 1e6, 16: 1e-6, LONG - 1: nan}, {20: 0.01, 30: 1e-9, 31: 1e11}, surges=surges
        ),
    ]


def check_returned(optimizer: Optimizer, whole: RehearsedSteps) -> None:
    """Raise if a step returns something: plans step parameters apart, and nobody puts results together."""
    if any(value is not None for value in whole.returned):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step returns a value without a closure, which would be lost",
            hint="keep the value elsewhere, or return None",
        )


def check_address(optimizer: Optimizer, whole: RehearsedSteps) -> None:
    """Raise if a step asks for the address of a parameter, and parameters are DTensors, which have none."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    if ADDRESS in whole.asks_layout and any(isinstance(p, DTensor) for p in params):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__}.step asks for the address of its parameter (data_ptr), and "
            "DTensors have none",
            hint="tell parameters apart by attributes of theirs, by group, or by self.state[param]",
        )


def closure_problem(optimizer: Optimizer) -> str:
    """Find out whether `step(closure)` is `closure()` followed by `step()`, and returns what the closure returned.

    Returns:
        How it differs; empty if it does not.
    """
    step = plain_step(plain_class(optimizer))
    if "closure" not in inspect.signature(step).parameters:
        return ""
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    first = scenarios([len(group["params"]) for group in optimizer.param_groups])[0]
    one_step = Scenario(first.chosen, 1, {}, {}, {})
    loss = torch.tensor(2.5, device=device)
    calls: list[Contents] = []
    begun: list[Contents] = []

    def taken(with_closure: bool) -> RehearsedSteps:
        small = Miniature(optimizer, first.chosen)
        outside = Outside(optimizer, small.label, small.kept, CachedCalls())

        def closure() -> Tensor:
            calls.append(contents_of(small))
            return loss

        def once() -> Any:
            begun.append(contents_of(small))
            with torch.no_grad():
                return step(small.optimizer, closure=closure) if with_closure else step(small.optimizer)

        try:
            with seeded(device):
                return run(small, one_step, once)
        finally:
            outside.restore()

    alone, found = taken(False), taken(True)
    if found.error is not None:
        return f"it raises {first_line(found.error)}"
    if len(calls) != 1:
        return f"it evaluates the closure {len(calls)} times"
    places = changed(calls[0], begun[-1])
    if any(place.startswith("parameter") and not place.endswith(".grad") for place in places):
        return "it evaluates the closure after it changed parameters"
    if differing := difference(alone, found):
        return f"what it does depends on the loss: {some(differing)} differs"
    return "" if found.returned[0] is loss else "it does not return the loss"
