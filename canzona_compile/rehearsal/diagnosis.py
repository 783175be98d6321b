"""Compare a step of all parameters with steps of one each, and refuse what gave something else for one alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.eager.own_object import Maker, OwnObject
from canzona_compile.errors import UnsupportedOptimizer, some
from canzona_compile.rehearsal.scenario import Scenario, scenarios
from canzona_compile.rehearsal.trial import RehearsedSteps
from canzona_compile.replica.homes import copied_attributes, hypers
from canzona_compile.replica.miniature import Miniature
from canzona_compile.replica.outside import Outside
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.raised import NoCollectives, blamed, first_line
from canzona_compile.replica.snapshot import changed, known_parameters
from canzona_compile.replica.twin import as_written

NamesByGroup = Sequence[Sequence[str]]  # of parameters, by group
TOGETHER = (
    "if it is elementwise, leave it out of `wrap`: in a chain, wrap only the matrix optimizer; or move the coupling "
    "(global norms, shared statistics) out of step(), for example to clip_grad_norm_"
)


# -- where two runs differ ---------------------------------------------------------------------------


def differing_places(whole: RehearsedSteps, parts: RehearsedSteps) -> list[str]:
    """The places at which two runs differ first; none if they do not. Only one of them raising is a difference.

    Caches do not count: attributes that stay as the first steps left them.
    """
    cached = caches(whole)
    for one, other in zip(whole.after, parts.after, strict=False):
        if places := [place for place in changed(one, other) if attribute_of(place) not in cached]:
            return places
    if len(whole.after) != len(parts.after) or type(whole.error) is not type(parts.error):
        return ["the end of the run"]
    return []


def caches(whole: RehearsedSteps) -> set[str]:
    """The attributes of an optimizer that change on the first two steps at most."""
    early, late = whole.after[1:2], whole.after[-1:]
    if len(whole.after) < 4:
        return set()
    moved = {attribute_of(place) for place in changed(early[0], late[0])}
    return {attribute_of(place) for place in late[0]} - moved - {""}


def attribute_of(place: str) -> str:
    """The attribute of the optimizer in which a place lies; empty if it lies in none."""
    found = re.match(r"self\.(\w+)", place)
    return found[1] if found and not place.startswith("self.state[") else ""


# -- what a refusal says --------------------------------------------------------------------------------


def broken(line: int | str) -> str:
    """Name a line of the contract, which docs/optimizers.md has."""
    return f"this breaks line {line} of the contract"


def object_per_matrix(optimizer: Optimizer) -> str:
    """Say what to write so that each matrix has an optimizer object of its own, with the arguments that can be found.

    They are found by name among the values of the first group. The line is tried; if it fails, this says how, and the
    user knows what else the constructor needs.
    """
    kind = plain_class(optimizer)
    groups = optimizer.param_groups
    values = {**vars(optimizer).get("defaults", {}), **(hypers(groups[0]) if groups else {})}
    arguments = list(inspect.signature(kind.__init__).parameters.values())[2:]
    given = {
        a.name: values[a.name]
        for a in arguments
        if a.name in values and is_written(values[a.name], None if a.name == "lr" else a.default)
    }
    made = f"{kind.__name__}({', '.join(['params', *(f'{name}={value!r}' for name, value in given.items())])})"
    says = "if each matrix is updated by itself, give each an optimizer object of its own"
    if problem := problem_of_objects(optimizer, lambda params: kind(params, **given)):
        return (
            f"{says}: pass one_per_matrix= a function that takes a list of one parameter and returns an optimizer that "
            f"can step. {made} is not enough: {problem}"
        )
    return f"{says}: wrap(optimizer, one_per_matrix=lambda params: {made})"


def try_objects(optimizer: Optimizer, make: Maker) -> None:
    """Step an object of its own for a small parameter of each group; raises what its code raises.

    Its hyperparameters are those of a miniature, as those of the optimizer may lead to parameters.
    """
    groups = optimizer.param_groups
    cast = zip(groups, scenarios([len(group["params"]) for group in groups])[0].chosen, strict=True)
    chosen = [sorted(own, key=lambda i: group["params"][i].numel())[:1] for group, own in cast]
    like = [group["params"][i] for group, own in zip(groups, chosen, strict=True) for i in own]
    if any(real.is_meta for real in like):  # nothing can be tried without values
        return
    small = Miniature(optimizer, chosen)
    for real, group in zip(like, (g for g in small.optimizer.param_groups if g["params"]), strict=True):
        spec, generator = ParameterSpec.of(real), torch.Generator().manual_seed(0)
        grad = torch.randn(spec.shape, generator=generator, device="cpu").to(spec.device, spec.grad_dtype)
        with Outside(optimizer), as_written(), NoCollectives():
            own_object = OwnObject(make, "", spec, small.optimizer, group)
            own_object.step(own_object.param.detach(), grad)


def problem_of_objects(optimizer: Optimizer, make: Maker) -> str:
    """Try an object of its own for a small parameter of each group; say how that fails, or nothing."""
    try:
        try_objects(optimizer, make)
    except Exception as error:  # whatever the user's code raises
        cause = error.__cause__ or error
        return f"{first_line(cause)}{blamed(cause)}"
    return ""


def is_written(value: Any, default: Any) -> bool:
    """Tell whether a value can be written as it is printed, and has to be."""
    if isinstance(value, list | tuple):
        return all(is_written(inside, None) or inside is None for inside in value) and value != default
    return isinstance(value, bool | int | float | str) and (type(value) is not type(default) or value != default)


def refusal(
    optimizer: Optimizer,
    scenario: Scenario,
    whole: RehearsedSteps,
    parts: RehearsedSteps,
    names: NamesByGroup,
    dependent: Sequence[str] = (),
) -> UnsupportedOptimizer:
    """Make the error for a step that gives something else for a parameter alone, from the places that differ.

    Args:
        dependent: the places that other gradients of other parameters changed.
    """
    kind = whole.kind
    known = known_parameters(whole.first)
    if kept := [place for place in known_parameters((whole.after or [{}])[-1]) if place not in known]:
        return changes_elsewhere(optimizer, kept)
    by = f" (it knows parameters by {some(known)})" if known else ""
    if parts.error is not None and whole.error is None:
        return UnsupportedOptimizer(
            f"{kind} updates parameters together: its step fails for one without the others"
            f"{tensors_kept(optimizer)}{by}: {first_line(parts.error)}{blamed(parts.error)}",
            hint=f"{broken('2 or 3')}; {TOGETHER}; {object_per_matrix(optimizer)}",
        )
    places = differing_places(whole, parts)
    at = where(places, scenario, names)
    beside = [p for p in places if p.startswith(("self.", "param_groups"))]
    if beside and not any(p.startswith(("parameter", "the state")) for p in places):
        return changes_elsewhere(optimizer, beside, "updates parameters together: its step")
    if own := sorted({found[1] for p in places if (found := re.match(r"the attributes of parameter \d+\['(\w+)'", p))}):
        return UnsupportedOptimizer(
            f"{kind}.step changes attributes of its parameter: {some(own)}",
            at=at,
            hint=f"{broken(4)}: keep per-parameter data in self.state[param]",
        )
    first, last = whole.after[0], whole.after[-1]
    moving = sorted({f"self.{name}" for p, v in last.items() if v != first.get(p) and (name := attribute_of(p))})
    written = f", and it changes {some(beside or moving)}" if beside or moving else ""
    hint = f"{broken('2 or 3')}; {TOGETHER}; {object_per_matrix(optimizer)}"
    held = {name: pytree.tree_leaves(value) for name, value in vars(optimizer).items()}
    if modules := [f"self.{name}" for name, leaves in held.items() if any(isinstance(x, Module) for x in leaves)]:
        hint += f"; to change weights of {some(modules)} after the step, use a hook as in examples/qk_clip.py"
    if not dependent and (whole.drew or whole.operators.generators):
        return drawing(optimizer, whole)
    on = "the values of others" if dependent else "which others there are"
    return UnsupportedOptimizer(
        f"{kind} updates parameters together: the update of one depends on {on}{by}{written}", at=at, hint=hint
    )


def changes_elsewhere(optimizer: Optimizer, places: Sequence[str], does: str = "") -> UnsupportedOptimizer:
    """Make the error for a step that changes something which is neither in the state of a parameter nor a number."""
    kind, together = plain_class(optimizer).__name__, f"{TOGETHER}; " if does else ""
    return UnsupportedOptimizer(
        f"{kind}{f' {does}' if does else '.step'} changes {some(places)}, outside of self.state[param]",
        hint=f"{broken(4)}: keep statistics in self.state[param], as elsewhere only plain numbers may change; "
        f"{together}{object_per_matrix(optimizer)}",
    )


def drawing(optimizer: Optimizer, whole: RehearsedSteps) -> UnsupportedOptimizer:
    """Make the error for a step that draws other numbers for a parameter alone."""
    source = " from one generator for all parameters" if whole.operators.generators else ""
    hint = "" if whole.draws_elsewhere else f"; or, {object_per_matrix(optimizer)}"
    return UnsupportedOptimizer(
        f"{whole.kind} draws random numbers{source}, and others for one parameter alone",
        hint=f"{broken(5)}: draw from torch's own generator, for one parameter after the other, or choose options with "
        f"which it does not draw{hint}",
    )


def tensors_kept(optimizer: Optimizer) -> str:
    """Name the attributes of an optimizer that hold tensors, for a message; empty if there are none."""
    own = copied_attributes(optimizer)
    found = [
        f"self.{name}"
        for name, value in own.items()
        if any(isinstance(leaf, Tensor | Module) for leaf in pytree.tree_leaves(value))
    ]
    return f" (it keeps tensors in {some(found)})" if found else ""


def where(places: Sequence[str], scenario: Scenario, names: NamesByGroup) -> str:
    """Name the first parameter among some places in a miniature; if there is none, the places."""
    chosen = [names[g][i] for g, own in enumerate(scenario.chosen) for i in own]
    numbers = parameters_in(places)
    return chosen[numbers[0]] if numbers else some(places)


def parameters_in(places: Sequence[str]) -> list[int]:
    """The numbers of the parameters that places belong to."""
    return sorted({int(found[1]) for place in places if (found := re.search(r"parameter (\d+)", place))})
