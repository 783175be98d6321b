"""One training run per optimizer, told by the plain optimizer on one device, and ranks that take it up halfway.

Ranks save their part of the run after SAVED steps, other ranks load it and go on to END; both are compared
with the plain run, bit for bit. SAVED lies between refreshes, and some come before END.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from torch.utils import _pytree as pytree

import canzona_compile
from examples.optimizers.normuon import NorMuon
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.layouts import Case, Laid, full, replicate_of
from tests.harness.optimizers import share_captures
from tests.harness.pairs import params_of, same_bits
from tests.harness.toy_habits import Columns
from tests.harness.toy_optimizers import HostReading, Listing, Nesting, ObjectKeeping, PerParameter, State, cube

SHAPES = ((7, 4), (5, 5), (7, 4))  # rows that no number of ranks shares evenly; one leaf of the square is like it
SAVED, END = 4, 7
EVERY = 3

OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.1),
    "shampoo": lambda params: Shampoo(params, every=EVERY),
    "soap": lambda params: SOAP(params, every=EVERY),
    "normuon": lambda params: NorMuon(params),
    "adamw": lambda params: AdamW(params, lr=0.1),  # elementwise: fragments, and counters that are tensors
    "objects": lambda params: ObjectKeeping(params, lr=0.01),  # interpreted, as is the next one
    "host": lambda params: HostReading(params, lr=0.01),
    "columns": lambda params: Columns(params, lr=0.01),
    "words": lambda params: Wording(params, lr=0.01),
    "nested": lambda params: Nesting(params, lr=0.01),
    "lists": lambda params: Listing(params, lr=0.01),
}


class Wording(PerParameter):
    """A word in the state decides what the next step does, and two averages stand in a tuple."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(next="add", averages=(torch.zeros_like(param), torch.zeros_like(param, dtype=torch.float64)))
        sign = {"add": -1, "take": 1}[state["next"]]
        for average in state["averages"]:
            average.lerp_(grad.to(average.dtype), 0.1)
        state["next"] = "take" if state["next"] == "add" else "add"
        param.add_(cube(sum(state["averages"]).to(param.dtype)), alpha=sign * group["lr"])


@dataclass(frozen=True, eq=False)
class Moment:
    """The plain optimizer after some steps."""

    params: list[Tensor]
    state: dict[str, Any]  # its state_dict()


@functools.cache
def first_values(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return values_of(-1, dtype)


def values_of(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The gradients of a step."""
    random = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=random).to(dtype) for shape in SHAPES]


@functools.cache
def plain_moment(name: str, steps: int, dtype: torch.dtype = torch.float32) -> Moment:
    """What the run is compared with."""
    optimizer = OPTIMIZERS[name]([nn.Parameter(v.clone()) for v in first_values(dtype)])
    for step in range(steps):
        for param, grad in zip(params_of(optimizer), values_of(step, dtype), strict=True):
            param.grad = grad
        optimizer.step()
    return Moment(copy.deepcopy(params_of(optimizer)), copy.deepcopy(optimizer.state_dict()))


class Holder(nn.Module):
    """Gives parameters names."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)


class Run:
    """The run on this rank, laid out as `case` says; begun with other values if it is to be loaded."""

    def __init__(
        self,
        name: str,
        case: Case,
        dtype: torch.dtype = torch.float32,
        wrapped: bool = True,
        begun: bool = True,
        **options: Any,
    ) -> None:
        self.name, self.dtype = name, dtype
        values = first_values(dtype)
        self.laid = Laid(values if begun else [torch.full_like(v, 0.25) for v in values], case)
        self.model = Holder(self.laid.params)
        self.optimizer: Any = OPTIMIZERS[name](list(self.laid.params))
        if wrapped:
            canzona_compile.wrap(self.optimizer, replicate=replicate_of(case), **{"strategy": "owner", **options})
            share_captures(self.optimizer)

    def feed(self, step: int) -> None:
        for i, (param, grad) in enumerate(zip(self.laid.params, values_of(step, self.dtype), strict=True)):
            param.grad = self.laid.like_param(grad, i)

    def steps(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.feed(step)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def differs(self, steps: int) -> list[str]:
        """What differs from the plain run after so many steps; a collective."""
        found = self.differs_from(plain_moment(self.name, steps, self.dtype))
        return [f"after {steps}: {what}" for what in found]

    def differs_from(self, plain: Moment) -> list[str]:
        pairs = zip(plain.params, self.laid.params, strict=True)
        found = [f"parameter {i}" for i, (a, b) in enumerate(pairs) if not same_bits(a, full(b))]
        state = self.optimizer.state_dict()["state"]
        if state.keys() != plain.state["state"].keys():
            return [*found, f"there is state of {sorted(state)}"]
        for i, param in enumerate(self.laid.params):
            found += [f"{i}{leaf}" for leaf in different_leaves(plain.state["state"][i], state[i], param)]
        return found


def different_leaves(plain: Any, state: Any, param: Tensor) -> list[str]:
    """Leaves of a state that are not the plain one's, bit for bit and of its types, or not laid out as they should."""
    one, two = (dict(pytree.tree_flatten_with_path(dict(s))[0]) for s in (plain, state))
    if one.keys() != two.keys():
        return [f" has other leaves: {sorted(map(pytree.keystr, two))}"]
    found = []
    for path, value in two.items():
        if isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements != param.placements:
            found.append(f"{pytree.keystr(path)} is laid out as {value.placements}")
        whole = full(value) if isinstance(value, Tensor) else value
        if not same_bits(one[path], whole):
            found.append(pytree.keystr(path))
    return found


def once(name: str, dtype: torch.dtype = torch.float32) -> functools.partial[Any]:
    """For `run(after=...)`: the run in one process, so that ranks need not capture what it did."""
    return functools.partial(whole_run, name, dtype)


def whole_run(name: str, dtype: torch.dtype) -> None:
    for steps in (0, SAVED, END):
        plain_moment(name, steps, dtype)
    Run(name, Case("plain", ()), dtype).steps(0, END)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
