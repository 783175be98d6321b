"""Rehearse an optimizer in miniature: step all parameters together, then each by itself as plans do, and compare bits.

What a step reads and writes other than its parameter, gradient, state and group shows as a difference, whatever it is.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from canzona_compile.compat.optimizer_class import compiled_methods, plain_class, plain_step
from canzona_compile.errors import CanzonaError, RoundsOtherwise, UnsupportedOptimizer, some
from canzona_compile.rehearsal.asked import ADDRESS
from canzona_compile.rehearsal.batching import (
    alike_in_double,
    dependent_places,
    differences,
    numbers_in,
    other_products,
)
from canzona_compile.rehearsal.diagnosis import (
    NamesByGroup,
    differing_places,
    drawing,
    object_per_matrix,
    parameters_in,
    refusal,
    tensors_kept,
)
from canzona_compile.rehearsal.scenario import Scenario, scenarios
from canzona_compile.rehearsal.trial import (
    RehearsedSteps,
    contents_of,
    each_alone,
    take,
    take_plainly,
    texts_written,
)
from canzona_compile.replica.external_counters import Counter
from canzona_compile.replica.miniature import Miniature, divisors_of
from canzona_compile.replica.raised import as_its_own, blamed, first_line, is_meant
from canzona_compile.replica.snapshot import Contents, changed
from canzona_compile.replica.twin import LOOSE, Loose, loose_of, step_plainly

WARNED: MutableMapping[Optimizer, set[str]] = WeakIdKeyDictionary()  # what was said of optimizers


@dataclass(frozen=True, slots=True)
class Habits:
    """What an optimizer does that keeps the contract, and that plans have to know.

    Attributes:
        counters: the numbers that a step counts outside of the state of parameters.
        drops_gradients: whether it sets all of them to None.
        aliases: where it holds a gradient itself after a step, and no copy of it, e.g. "self.state[param]['prev']".
        needs_gradients: whether a step does something, or fails, if a parameter has no gradient.
        asks_frozen: whether it does something else for a parameter that has a gradient and requires none.
        asks_layout: what it asks about the layout of gradients in memory, see `LayoutQuestions`.
        reads_variables: whether the code calls `os.getenv`, which Dynamo takes for a constant.
        batches: whether it batches matrices, whose bits may be other ones then than those of each matrix alone: the
            largest relative difference of a rehearsal. None if it does not.
    """

    counters: frozenset[Counter] = frozenset()
    writes_gradients: bool = False
    drops_gradients: bool = False
    aliases: tuple[str, ...] = ()
    needs_gradients: bool = False
    asks_frozen: bool = False
    asks_layout: frozenset[str] = frozenset()
    reads_variables: bool = False
    draws: bool = False
    batches: float | None = field(default=None, compare=False)  # another one after a change of hyperparameters

    def bits_of(self, kind: str) -> str:
        """Say which bits results have if an optimizer batches matrices; empty if it does not."""
        if self.batches is None:
            return ""
        seen = f"the largest relative difference is {self.batches:.1e}" if self.batches else "there is no difference"
        return (
            f"{kind} batches matrices, which may round otherwise than each matrix alone. Results have the bits of the "
            f"plain optimizer that steps each matrix alone; on the small matrices of a rehearsal {seen}"
        )


def habits_of(found: Sequence[Habits]) -> Habits:
    """Put together what several scenarios showed."""
    return Habits(
        frozenset().union(*(one.counters for one in found)),
        writes_gradients=any(one.writes_gradients for one in found),
        drops_gradients=any(one.drops_gradients for one in found),
        aliases=tuple(dict.fromkeys(place for one in found for place in one.aliases)),
        needs_gradients=any(one.needs_gradients for one in found),
        asks_frozen=any(one.asks_frozen for one in found),
        asks_layout=frozenset().union(*(one.asks_layout for one in found)),
        reads_variables=any(one.reads_variables for one in found),
        draws=any(one.draws for one in found),
        batches=max((one.batches for one in found if one.batches is not None), default=None),
    )


class CannotBegin(Exception):
    """The plain optimizer fails in miniature, at its first step; the message says how."""


def rehearse(optimizer: Optimizer, names: NamesByGroup = ()) -> Habits:
    """Rehearse an optimizer. Every rank gets the same, without communication."""
    numbers = [len(group["params"]) for group in optimizer.param_groups]
    meta = (p.device.type == "meta" for group in optimizer.param_groups for p in group["params"])
    if not any(numbers) or any(meta):  # there is nothing to step, or it has no values
        return Habits()
    names = names or default_names(optimizer)
    LOOSE.pop(optimizer, None)
    for cast in zip(*(ways_to_begin(optimizer, scenario) for scenario in scenarios(numbers)), strict=True):
        try:
            found = [rehearse_one(optimizer, scenario, names) for scenario in cast]
            break
        except CannotBegin as problem:
            check_groups(optimizer, problem.__cause__)
            last, failed = problem, cast[0]
    else:
        raise never_begins(optimizer, failed, names, last) from last.__cause__
    kind = plain_class(optimizer)
    if methods := compiled_methods(kind):
        warn_once(
            optimizer,
            f"{kind.__name__} compiles methods, which take the optimizer: {', '.join(methods)}. They run as "
            "written, so results may differ by rounding from those of the compiled methods.",
        )
    habits = habits_of(found)
    if habits.batches is not None:
        warn_once(optimizer, f"{habits.bits_of(kind.__name__)}.")
    return habits


def warn_once(optimizer: Optimizer, says: str) -> None:
    """Warn that results round otherwise, unless this was said of the optimizer before: some are rehearsed again."""
    about = WARNED.setdefault(optimizer, set[str]())
    subject = says.partition(".")[0]
    if subject not in about:
        about.add(subject)
        warnings.warn(RoundsOtherwise(says), stacklevel=3)


def check_groups(optimizer: Optimizer, error: BaseException | None) -> None:
    """Raise CanzonaError if a step fails because groups lack what the constructor gives them."""
    for g, group in enumerate(optimizer.param_groups):
        lacking = [key for key in optimizer.defaults if key not in group]
        if isinstance(error, KeyError) and error.args and error.args[0] in lacking:
            raise CanzonaError(
                f"the parameter group lacks {some(list(map(repr, lacking)))}, which "
                f"{plain_class(optimizer).__name__}.step needs",
                at=f"param_groups[{g}]",
                hint="load a state_dict that this class of optimizer has saved. After a change of optimizers, load "
                "only the model's weights",
            )


def ways_to_begin(optimizer: Optimizer, scenario: Scenario) -> Iterator[Scenario]:
    """A scenario on the smallest parameters, and then as steps need it that fail for these.

    Parameters may need the state that they have, if the constructor made it, or sizes that keep what divides them.
    """
    stateful = any(isinstance(key, Tensor) for key in optimizer.state)
    for larger in (False, True):
        counts = divisors_of(optimizer) if larger else ()
        yield from (replace(scenario, counts=counts, stateful=own) for own in (False, True)[: 1 + stateful])


def never_begins(
    optimizer: Optimizer, scenario: Scenario, names: NamesByGroup, problem: CannotBegin
) -> UnsupportedOptimizer:
    """Make the error for a step that fails at once in every form of a scenario, of which this is the last one."""
    kind, own, groups = plain_class(optimizer).__name__, problem.__cause__, optimizer.param_groups
    assert own is not None
    failing, kinds = [], {(g, p.shape): i for g, group in enumerate(groups) for i, p in enumerate(group["params"])}
    for (g, _), i in kinds.items() if is_meant(own) else ():
        chosen = [[i] * (g == other) for other in range(len(groups))]
        if take(optimizer, replace(scenario, chosen=chosen, steps=1, missing={})).error is not None:
            failing.append(names[g][i])
    at = failing[0] if 0 < len(failing) < len(kinds) else ""
    if at:
        hint = "leave this parameter to another optimizer, as canzona_compile.hidden_matrices(model) and chain() do"
    elif failing:
        hint = f"this is {kind}'s own error: give it the parameters and hyperparameters that it takes"
    else:
        hint = "create state in step(), for parameters of any size, and do not require a closure. Or, "
        hint += object_per_matrix(optimizer)
    said = UnsupportedOptimizer(
        f"{kind}.step fails on small test parameters, so canzona_compile cannot check that it updates each parameter "
        f"independently{tensors_kept(optimizer)}: {type(own).__name__}: {own}{blamed(own)}",
        at=at,
        hint=hint,
    )
    return as_its_own(own, said) if failing else said


def rehearse_as_now(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Rehearse a few steps from the present counters on, to see what begins late.

    Args:
        states: the state of each parameter, with a `Leaf` in place of each tensor whose values do not matter.
    """
    now = object.__new__(type(optimizer))
    vars(now).update(vars(optimizer))
    now.state = defaultdict(dict, {key: dict(state) for key, state in states.items()})
    first = scenarios([len(group["params"]) for group in optimizer.param_groups])[0]
    with contextlib.suppress(CannotBegin):
        rehearse_one(now, replace(first, stateful=True, counts=divisors_of(optimizer)), default_names(optimizer))


def rehearse_one(optimizer: Optimizer, scenario: Scenario, names: NamesByGroup) -> Habits:
    """Rehearse one scenario; if need be without a frozen parameter or missing gradients."""
    dependent: list[str] = []
    for one in scenario.easier():
        plain = together(optimizer, one)
        parts = each_alone(optimizer, one, plain)
        loose = Loose(plain.loose.scratch | parts.loose.scratch, plain.loose.made)
        if differing_places(plain, parts) and (again := with_loose(optimizer, replace(one, loose=loose), plain)):
            plain, one = again, replace(one, loose=loose)
            parts = each_alone(optimizer, one, plain)
            known = loose_of(optimizer)
            LOOSE[optimizer] = Loose(known.scratch | loose.scratch, known.made | loose.made)
        if not differing_places(plain, parts):
            return habits_in(scenario, one, plain, 0.0 if other_products(plain, parts) else None)
        found = [*differences(plain, parts)]
        if plain.operators.generators or math.inf in found:
            continue  # rounding is not the cause
        dependent = dependent or dependent_places(optimizer, one, plain)
        if not dependent and alike_in_double(optimizer, one, plain):
            return habits_in(scenario, one, plain, max(filter(math.isfinite, found), default=0.0))
    raise refusal(optimizer, one, plain, parts, names, dependent)


def with_loose(optimizer: Optimizer, scenario: Scenario, plain: RehearsedSteps) -> RehearsedSteps | None:
    """Step all parameters together, with new scratch before every step, as twins have it.

    None if there is nothing of this kind, or unless steps write all of it before they read it, do the same then, and
    write the same whatever gradients are. So nothing can come through it from one parameter to another, nor from one
    step to the next.
    """
    if scenario.loose == Loose() or not converts_alike(optimizer, scenario):
        return None
    again = together(optimizer, scenario)
    other = take(optimizer, replace(scenario, others=range(scenario.params)))
    moved = [place for a, b in zip(plain.after, again.after, strict=False) for place in changed(a, b)]
    equal = len(again.after) == len(plain.after) and again.numbers == plain.numbers
    free = len(other.numbers) > 1 and all(a == b for a, b in zip(plain.numbers, other.numbers, strict=False))
    return again if equal and free and not (again.operators.reads_unwritten or parameters_in(moved)) else None


def converts_alike(optimizer: Optimizer, scenario: Scenario) -> bool:
    """Tell whether steps make tensors of hyperparameters by their values alone, as `make_tensors` does."""
    stepping = [group for group, own in zip(optimizer.param_groups, scenario.chosen, strict=True) if own]
    keys = [(g, key) for g, group in enumerate(stepping) for key in scenario.loose.made if type(group[key]) is float]
    scaled = []
    for factor in (1.0, 2.0**-12, 2.0**12) if keys else ():  # which rounds nothing
        first = replace(scenario, steps=1, missing={}, frozen=None, rates={0: factor}, loose=Loose())
        after = (take(optimizer, first).after or [{}])[0]
        held = [after.get(f"param_groups[{g}][{key!r}]", ()) for g, key in keys]
        numbers = [numbers_in(after.get(one[1]) if one[:1] == ("the same as",) else one) for one in held]
        scaled.append([math.nan if number is None else float(number) / factor for number in numbers])
    return all(one == scaled[0] for one in scaled)


def habits_in(scenario: Scenario, one: Scenario, plain: RehearsedSteps, batches: float | None) -> Habits:
    """What a plain run of a scenario, or of an easier one, shows."""
    return Habits(
        frozenset(plain.counters),
        writes_gradients=plain.writes_gradients,
        drops_gradients=not plain.keeps_gradients,
        aliases=tuple(plain.aliases),
        needs_gradients=one.missing != scenario.missing,
        asks_frozen=one.frozen != scenario.frozen,
        asks_layout=frozenset(plain.asks_layout) - {ADDRESS},
        reads_variables=plain.reads_variables,
        draws=plain.drew,
        batches=batches,
    )


def together(optimizer: Optimizer, scenario: Scenario) -> RehearsedSteps:
    """Step all parameters together, as the plain optimizer does."""
    found = take_plainly(optimizer, scenario)
    kind = found.kind
    if found.error is not None and not found.after:
        raise CannotBegin(f"{first_line(found.error)}{blamed(found.error)}") from found.error
    if found.uses_cache:
        raise UnsupportedOptimizer(
            f"{kind}.step {found.uses_cache}", hint="compute it in the step, or keep it in self.state[param]"
        )
    if found.outside and found.draws_elsewhere:
        raise drawing(optimizer, found)
    if found.outside:
        raise UnsupportedOptimizer(
            f"{kind}.step changes {some(found.outside)}, outside of the optimizer",
            hint="keep per-parameter data in self.state[param], and counters in attributes of the optimizer. Or, if "
            "this changes only once, such as when a function is compiled at its first call, and "
            f"{object_per_matrix(optimizer)}",
        )
    if places := texts_written(found):
        raise UnsupportedOptimizer(
            f"{kind}.step writes text to {some(places)}, which would differ between ranks",
            hint="write logs in a hook: optimizer.register_step_post_hook(hook)",
        )
    if any(value is not None for value in found.returned):  # plans step parameters apart
        raise UnsupportedOptimizer(
            f"{kind}.step returns a value when called without a closure, and this value would be lost",
            hint="store the value in an attribute, and return None",
        )
    params = (p for group in optimizer.param_groups for p in group["params"])
    if ADDRESS in found.asks_layout and any(isinstance(p, DTensor) for p in params):
        raise UnsupportedOptimizer(
            f"{kind}.step calls data_ptr() of its parameter, but DTensors have no address",
            hint="distinguish parameters by their attributes, their group, or self.state[param]",
        )
    return found


def default_names(optimizer: Optimizer) -> NamesByGroup:
    """The names that groups give to parameters, or their places."""
    return [
        group.get("param_names") or [f"group{g}.param{i}" for i in range(len(group["params"]))]
        for g, group in enumerate(optimizer.param_groups)
    ]


# -- closures --------------------------------------------------------------------------------------


def no_closure(optimizer: Optimizer, problem: str) -> UnsupportedOptimizer:
    """Make the error for a step that cannot be called with a closure."""
    return UnsupportedOptimizer(
        f"{plain_class(optimizer).__name__}.step cannot be called with a closure: {problem}",
        hint="call loss = closure() yourself, then step() without it",
    )


def closure_problem(optimizer: Optimizer) -> str:
    """Find out whether `step(closure)` is `closure()` followed by `step()`, and returns what the closure returned.

    Returns:
        How it differs; empty if it does not. What it raises itself is raised.
    """
    if "closure" not in inspect.signature(plain_step(plain_class(optimizer))).parameters:
        return ""
    short = scenarios([len(group["params"]) for group in optimizer.param_groups])[0]
    calls: list[tuple[Contents, Contents]] = []  # what the optimizer held when it called the closure, and before
    loss = torch.tensor(2.5, device=next(p.device for group in optimizer.param_groups for p in group["params"]))

    def with_closure(small: Miniature) -> Callable[[], Any]:
        def step() -> Any:
            begun = contents_of(small)

            def closure() -> Tensor:
                calls.append((contents_of(small), begun))
                return loss

            return step_plainly(small.optimizer, closure=closure)

        return step

    for once in ways_to_begin(optimizer, replace(short, steps=1, missing={})):
        alone = take(optimizer, once)
        if alone.error is None:
            break
    else:
        return ""  # it fails without a closure too, which the rehearsal says
    found = take(optimizer, once, with_closure)
    if found.error is not None:
        said = no_closure(optimizer, f"it raises {type(found.error).__name__}: {found.error}")
        raise as_its_own(found.error, said) from found.error
    if len(calls) != 1:
        return f"it evaluates the closure {len(calls)} times"
    places = changed(*calls[0])
    if any(place.startswith("parameter") and not place.endswith(".grad") for place in places):
        return "it evaluates the closure after it changed parameters"
    if differing := differing_places(alone, found):
        return f"what it does depends on the loss: {some(differing)} differs"
    return "" if found.returned[0] is loss else "it does not return the loss"
