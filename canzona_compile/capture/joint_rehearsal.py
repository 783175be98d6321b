"""Rehearse the step of all parameters at once, beside the plain optimizer's: on whole copies, without the real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.contents import changed
from canzona_compile.capture.coupling import NamesByGroup, attribute_of, difference, where
from canzona_compile.capture.joint import JointUpdate, NotPlain, absent, check_shown, show, step_at_once, whole_copy
from canzona_compile.capture.miniature import Miniature
from canzona_compile.capture.outside import Outside
from canzona_compile.capture.randomness import seeded
from canzona_compile.capture.rehearsal import (
    Rehearsal,
    check_returned,
    default_names,
    scenarios,
)
from canzona_compile.capture.trial import RehearsedSteps, Scenario, run, together
from canzona_compile.capture.twin import marks_of, plain_class
from canzona_compile.errors import UnsupportedOptimizer


def rehearse_jointly(
    optimizer: Optimizer, refused: UnsupportedOptimizer, names: NamesByGroup = (), advice: str = ""
) -> Rehearsal:
    """Rehearse an optimizer that steps all parameters at once. Every rank gets the same, without communication.

    Args:
        optimizer: the optimizer.
        refused: why parameters cannot be stepped one by one.
        names: those of its parameters by group, for errors.
        advice: what its author can do about it.

    Raises:
        UnsupportedOptimizer: `refused`, with the reason why this is no way out.
    """
    counts = [len(group["params"]) for group in optimizer.param_groups]
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    names = names or default_names(optimizer)
    try:
        found = [rehearse_one(optimizer, scenario, device, refused, names) for scenario in scenarios(counts)]
    except (NotPlain, UnsupportedOptimizer) as problem:
        hint = f"{refused.hint}; " if refused.hint else ""
        told = problem.problem if isinstance(problem, UnsupportedOptimizer) else str(problem)
        if told == refused.problem:
            raise refused from None
        raise UnsupportedOptimizer(
            refused.problem, at=refused.at, hint=f"{hint}one rank cannot step all parameters at once either: {told}"
        ) from refused
    joints = [one.joint for one in found if one.joint is not None]
    return Rehearsal(
        writes_gradients=any(one.writes_gradients for one in found),
        drops_gradients=any(one.drops_gradients for one in found),
        needs_gradients=any(one.needs_gradients for one in found),
        asks_frozen=any(one.asks_frozen for one in found),
        joint=JointUpdate(
            refused.problem,
            advice,
            frozenset().union(*(joint.attributes for joint in joints)),
            frozenset().union(*(joint.hyperparameters for joint in joints)),
        ),
    )


def rehearse_one(
    optimizer: Optimizer, scenario: Scenario, device: torch.device, refused: UnsupportedOptimizer, names: NamesByGroup
) -> Rehearsal:
    """Rehearse one scenario; if need be without a frozen parameter or missing gradients.

    Raises:
        UnsupportedOptimizer: the step does something else on whole copies, draws random numbers, or fails.
        NotPlain: it changes what other ranks cannot be shown.
    """
    kind = plain_class(optimizer).__name__
    thawed = replace(scenario, frozen=None)
    variants = [scenario, thawed, replace(scenario, missing={}), replace(thawed, missing={})]
    for one in variants:
        with seeded(device) as dice:
            whole = together(optimizer, one)
        if whole.error is not None and not whole.after:
            raise refused
        if dice.rolled:
            raise UnsupportedOptimizer(f"{kind} draws random numbers")
        check_returned(optimizer, whole)
        joint = kept_by(whole, refused)
        with seeded(device):
            copies = at_once(optimizer, one, joint)
        if not difference(whole, copies):
            return Rehearsal(
                writes_gradients=whole.writes_gradients,
                drops_gradients=not whole.keeps_gradients,
                needs_gradients=one.missing != scenario.missing,
                asks_frozen=one.frozen != scenario.frozen,
                joint=joint,
            )
    if copies.error is not None and whole.error is None:
        raise UnsupportedOptimizer(f"{kind}.step fails on copies of its parameters: {copies.error}")
    raise UnsupportedOptimizer(
        f"{kind}.step does something else on copies of its parameters", at=where(difference(whole, copies), one, names)
    )


def kept_by(whole: RehearsedSteps, refused: UnsupportedOptimizer) -> JointUpdate:
    """Find the attributes and hyperparameters that steps changed."""
    attributes: set[str] = set()
    hyperparameters: set[str] = set()
    for one, other in zip(whole.after, whole.after[1:], strict=False):
        places = changed(one, other)
        attributes |= {attribute_of(place) for place in places} - {""}
        hyperparameters |= {p.partition("['")[2].partition("']")[0] for p in places if p.startswith("param_groups")}
    return JointUpdate(refused.problem, "", frozenset(attributes), frozenset(hyperparameters))


def at_once(optimizer: Optimizer, scenario: Scenario, joint: JointUpdate) -> RehearsedSteps:
    """Step whole copies of all parameters on a twin, as the rank does that steps them all.

    Raises:
        NotPlain: the step changes what other ranks cannot be shown.
    """
    small = Miniature(optimizer, scenario.chosen, scenario.stateful, scenario.loops)
    outside = Outside(optimizer, small.label)
    groups = small.optimizer.param_groups

    def step() -> None:
        copies = {param: copy_of(param) for param in small.params}
        state = {own: small.optimizer.state.get(param) or {} for param, own in copies.items()}
        with hidden(small.params):
            by_group = [[copies[p] for p in group["params"]] for group in groups]
            changes = step_at_once(small.optimizer, by_group, state, joint.attributes | joint.hyperparameters)
        check_shown(changes)
        show(changes, small.optimizer)
        for param, own in copies.items():
            if param.grad is not None:
                param.data.copy_(own.detach())
            if state[own]:
                small.optimizer.state[param] = state[own]

    try:
        return run(small, scenario, step)
    finally:
        outside.restore()


def copy_of(param: Tensor) -> Tensor:
    """Make a whole copy of a parameter; one without values if it has no gradient."""
    if param.grad is None:
        return absent(tuple(param.shape), param.dtype, param.device, marks_of(param))
    return whole_copy(param, param.grad, marks_of(param))


@contextlib.contextmanager
def hidden(params: Sequence[Tensor]) -> Iterator[None]:
    """Inside this context, parameters have no gradients and no values, as real ones are fragments on this rank."""
    before = [(param, param.grad, param.detach().clone()) for param in params]
    for param, _, values in before:
        param.grad = None
        param.data.fill_(float("nan") if values.is_floating_point() else 0)
    try:
        yield
    finally:
        for param, grad, values in before:
            param.data.copy_(values)
            param.grad = grad
