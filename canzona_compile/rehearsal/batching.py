"""Tell an optimizer that batches matrices from one that couples them: one alone has other bits in both.

1. Do values depend? With other gradients for one half of the parameters, the batches are the same, so the other half
   keeps all bits, unless a value of one reaches another.
2. Does a parameter alone get the same? A step may ask how many there are, or which is the first one. In 64 bits the
   differences that rounding makes vanish, so those that are left are of the algorithm.

What is batched has the bits of each matrix alone then, which is what owners compute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.rehearsal.diagnosis import attribute_of, caches, parameters_in
from canzona_compile.rehearsal.scenario import Scenario
from canzona_compile.rehearsal.trial import RehearsedSteps, each_alone, take
from canzona_compile.replica.snapshot import changed

ROUNDING = 2.0**-20  # the relative difference in 64 bits from which on it is none of rounding; 1e-14 is usual


def other_products(plain: RehearsedSteps, parts: RehearsedSteps) -> bool:
    """Tell whether the first step calls products or sums for all together that it calls for none alone."""
    return bool(plain.operators.products - parts.operators.products)


def dependent_places(optimizer: Optimizer, scenario: Scenario, plain: RehearsedSteps) -> list[str]:
    """The places of parameters that are other ones if only the gradients of others are; none if there are no such."""
    for half in halves(optimizer, scenario):
        found = take(optimizer, replace(scenario, others=half))
        if len(found.after) < min(2, len(plain.after)):
            return ["a step that fails with other gradients"]
        for one, other in zip(plain.after, found.after, strict=False):
            if places := [p for p in changed(one, other) if any(i not in half for i in parameters_in([p]))]:
                return places
    return []


def halves(optimizer: Optimizer, scenario: Scenario) -> tuple[set[int], set[int]]:
    """Two halves of the parameters of a scenario; those of one shape, which may be batched, are in both."""
    seen: Counter[Any] = Counter()
    found: tuple[set[int], set[int]] = set(), set()
    chosen = ((group["params"], own) for group, own in zip(optimizer.param_groups, scenario.chosen, strict=True))
    for number, shape in enumerate(params[i].shape for params, own in chosen for i in own):
        place = list(seen).index(shape) if shape in seen else len(seen)
        found[(place + seen[shape]) % 2].add(number)
        seen[shape] += 1
    return found


def alike_in_double(optimizer: Optimizer, scenario: Scenario, plain: RehearsedSteps) -> bool:
    """Tell whether parameters alone get what they get together, but for rounding."""
    wide = replace(scenario, double=True)
    whole = take(optimizer, wide)
    parts = each_alone(optimizer, wide, plain)
    return len(whole.after) == len(plain.after) and all(found < ROUNDING for found in differences(whole, parts))


def differences(whole: RehearsedSteps, parts: RehearsedSteps) -> Iterator[float]:
    """The relative differences of two runs, place by place and step by step; see `difference`.

    They are infinite outside of parameters and their state, where nothing may change but counters.
    """
    if len(whole.after) != len(parts.after) or type(whole.error) is not type(parts.error):
        yield math.inf
    cached = caches(whole)
    for one, other in zip(whole.after, parts.after, strict=False):
        for place in changed(one, other):
            if parameters_in([place]):
                yield difference(one.get(place), other.get(place))
            elif attribute_of(place) not in cached:
                yield math.inf


def difference(one: Any, other: Any) -> float:
    """The relative difference of two tensors or numbers, as `Snapshot` describes them; infinite if they are none.

    It is NaN if one of them alone has elements that are not finite. It is the larger one of two halves of a tensor: a
    trial shrinks every second element of parameters, see `TINY`.
    """
    a, b = numbers_in(one), numbers_in(other)
    if a is None or b is None or one[:-1] != other[:-1]:
        return math.inf
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.nan
    a, b = (x.nan_to_num(0.0, 0.0, 0.0) for x in (a, b))
    pairs = [(a[..., k::2], b[..., k::2]) for k in (0, 1)]
    return max(float((x - y).norm() / x.norm().clamp(min=torch.finfo(x.dtype).tiny)) for x, y in pairs)


def numbers_in(described: Any) -> Tensor | None:
    """The numbers of a tensor or of a float as `Snapshot` describes it, with 64 bits; None if it is something else."""
    match described:
        case (shape, torch.dtype() as dtype, _, bytes() as bits) if dtype.is_floating_point and bits:
            return torch.frombuffer(bytearray(bits), dtype=dtype).double().view(shape or (1,))
        case ("float", float() as number):
            return torch.tensor([number], dtype=torch.float64, device="cpu")
    return None
