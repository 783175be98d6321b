"""Find out what a step reads or writes that it should not, once it gave something else for a parameter alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import UnsupportedOptimizer, some
from canzona_compile.rehearsal.contract import TOGETHER, broken, object_per_matrix
from canzona_compile.rehearsal.scenario import Scenario
from canzona_compile.rehearsal.stepping import OneByOne, VisibleContext
from canzona_compile.rehearsal.trial import RehearsedSteps, contents_of, take
from canzona_compile.replica.homes import copied_attributes
from canzona_compile.replica.miniature import Miniature, public
from canzona_compile.replica.raised import blamed, first_line
from canzona_compile.replica.snapshot import Contents, changed
from canzona_compile.tensors import plain_attributes

NamesByGroup = Sequence[Sequence[str]]  # of parameters, by group


def difference(whole: RehearsedSteps, parts: RehearsedSteps) -> list[str]:
    """The places at which two runs differ first; none if they do not. Only one of them raising is a difference.

    Caches do not count: attributes that stay as the first steps left them.
    """
    cached = caches(whole)
    return first_difference(
        whole, parts, lambda one, other: [place for place in changed(one, other) if attribute_of(place) not in cached]
    )


def first_difference(
    whole: RehearsedSteps, parts: RehearsedSteps, differing: Callable[[Contents, Contents], list[str]]
) -> list[str]:
    """The places at which two runs differ first, as a function finds them; the end of the run if one ends before."""
    for one, other in zip(whole.after, parts.after, strict=False):
        if places := differing(one, other):
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


def refusal(
    optimizer: Optimizer, scenario: Scenario, whole: RehearsedSteps, parts: RehearsedSteps, names: NamesByGroup
) -> UnsupportedOptimizer:
    """Make the error for a step that gives something else for a parameter alone: find out what it reads or writes."""
    kind = whole.kind
    if parts.error is not None and whole.error is None:
        return UnsupportedOptimizer(
            f"{kind}.step fails for one parameter without the others{tensors_kept(optimizer)}: "
            f"{first_line(parts.error)}{blamed(parts.error)}",
            hint=f"{broken(3)}; {object_per_matrix(optimizer)}",
        )
    places = difference(whole, parts)
    at = where(places, scenario, names)
    beside = [p for p in places if p.startswith(("self.", "param_groups"))]
    if beside and not any(p.startswith(("parameter", "the state")) for p in places):
        return UnsupportedOptimizer(
            f"{kind} updates parameters together: its step changes {some(beside)}, outside of self.state[param]",
            hint=f"{broken(4)}: keep statistics in self.state[param], as elsewhere only plain numbers may change; "
            f"{TOGETHER}; {object_per_matrix(optimizer)}",
        )
    if own := sorted({found[1] for p in places if (found := re.match(r"the attributes of parameter \d+\['(\w+)'", p))}):
        return UnsupportedOptimizer(
            f"{kind}.step changes attributes of its parameter: {some(own)}",
            at=at,
            hint=f"{broken(4)}: keep per-parameter data in self.state[param]",
        )
    small = Miniature(optimizer, scenario.chosen, scenario.stateful, scenario.loops)
    knowing = sorted({p.partition("[")[0].partition("(")[0] for p in holding_parameters(small)})
    kept = f"; {some(knowing)} {'refers' if len(knowing) == 1 else 'refer'} to parameters" if knowing else ""
    for company in (VisibleContext.ATTRIBUTES, VisibleContext.ITSELF, VisibleContext.GROUP, VisibleContext.ALL_GROUPS):
        other = take(optimizer, scenario, OneByOne(bool(whole.counters), whole.drew, company))
        if not difference(whole, other):
            detail = f": {some(others_than_marks(small.params))}" if company is VisibleContext.ATTRIBUTES else kept
            line = 2 if company in (VisibleContext.GROUP, VisibleContext.ALL_GROUPS) else 3
            return UnsupportedOptimizer(
                f"{kind}.step {company.value}{detail}", at=at, hint=f"{broken(line)}; {object_per_matrix(optimizer)}"
            )
    first, last = whole.after[0], whole.after[-1]
    moving = sorted({f"self.{name}" for p, v in last.items() if v != first.get(p) and (name := attribute_of(p))})
    written = f", and it changes {some(beside or moving)}" if beside or moving else ""
    hint = f"{broken(2)}; {TOGETHER}"
    if beside or moving or kept:  # it may break line 3 or 4 only
        hint += f"; {object_per_matrix(optimizer)}"
    if any(isinstance(leaf, Module) for leaf in pytree.tree_leaves(vars(optimizer))):
        hint += "; to change weights of modules after the step, use a hook as in examples/qk_clip.py"
    return UnsupportedOptimizer(
        f"{kind} updates parameters together: the update of one depends on others{written}{kept}", at=at, hint=hint
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
    numbers = sorted({int(found[1]) for place in places if (found := re.search(r"parameter (\d+)", place))})
    return chosen[numbers[0]] if numbers else some(places)


def holding_parameters(small: Miniature) -> list[str]:
    """The places among the attributes of an optimizer where parameters are, or what tells which is which."""
    found = []
    addresses = {number for p in small.params for number in (id(p), p.data_ptr())}
    for place, value in contents_of(small).items():
        if place.startswith("self.") and (
            (isinstance(value, str) and value.startswith("parameter "))
            or (isinstance(value, tuple) and value[0] == "int" and value[1] in addresses)
            or (isinstance(value, tuple) and isinstance(value[1], frozenset) and value[1] & addresses)
            or (isinstance(value, tuple) and isinstance(value[1], frozenset) and any(map(names_parameter, value[1])))
            or "['parameter " in place
            or any(f"[{number}]" in place for number in addresses)
        ):
            found.append(place)
    return found


def names_parameter(value: Any) -> bool:
    """Tell whether a value is the name that a miniature gives to a parameter."""
    return isinstance(value, str) and value.startswith("parameter ")


def others_than_marks(params: Sequence[Tensor]) -> list[str]:
    """The attributes of parameters that plans do not give to steps of one parameter."""
    return sorted({name for p in params for name in public(vars(p)).keys() - plain_attributes(p).keys()})
