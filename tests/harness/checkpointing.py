"""One training run per optimizer, told by the plain optimizer on one device, and ranks that take it up halfway.

Ranks save their part of the run after SAVED steps, other ranks load it and go on to END; both are compared
with the plain run, bit for bit. SAVED lies between refreshes, and some come before END.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
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
from tests.harness.layouts import ALONE, Case, Laid, replicate_of
from tests.harness.optimizers import share_captures
from tests.harness.pairs import different, params_of
from tests.harness.toy_optimizers import HostReading
from tests.harness.toys import Columns, Listing, Nesting, ObjectKeeping, Wording

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


@functools.cache
def first_values(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return values_of(-1, dtype)


def values_of(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The gradients of a step."""
    random = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=random).to(dtype) for shape in SHAPES]


@functools.cache
def plain_run(name: str, steps: int, dtype: torch.dtype = torch.float32) -> Optimizer:
    """The plain optimizer after some steps: what the run is compared with."""
    optimizer = OPTIMIZERS[name]([nn.Parameter(v.clone()) for v in first_values(dtype)])
    for step in range(steps):
        for param, grad in zip(params_of(optimizer), values_of(step, dtype), strict=True):
            param.grad = grad
        optimizer.step()
    return optimizer


class Holder(nn.Module):
    """Gives parameters names."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)


class Run:
    """The run on this rank, laid out as `case` says; begun with other values if it is to be loaded."""

    makers = OPTIMIZERS

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
        self.optimizer: Any = self.makers[name](list(self.laid.params))
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
        return [f"after {steps}: {what}" for what in self.differs_from(plain_run(self.name, steps, self.dtype))]

    def differs_from(self, plain: Optimizer) -> list[str]:
        state = self.optimizer.state_dict()["state"]
        found = [f"state of {i} on one side" for i in state.keys() ^ plain.state_dict()["state"].keys()]
        for i, param in enumerate(self.laid.params):
            for path, leaf in pytree.tree_flatten_with_path(dict(state.get(i, {})))[0]:
                if isinstance(leaf, DTensor) and isinstance(param, DTensor) and leaf.placements != param.placements:
                    found.append(f"{i}{pytree.keystr(path)} is laid out as {leaf.placements}")
        # Without parameters that were added since.
        own: Any = SimpleNamespace(param_groups=[{"params": self.laid.params}], state_dict=self.optimizer.state_dict)
        return found + different(plain, own, self.laid)


def once(name: str, dtype: torch.dtype = torch.float32) -> functools.partial[Any]:
    """For `run(after=...)`: the run in one process, so that ranks need not capture what it did."""
    return functools.partial(whole_run, name, dtype)


def whole_run(name: str, dtype: torch.dtype) -> None:
    for steps in (0, SAVED, END):
        plain_run(name, steps, dtype)
    Run(name, ALONE, dtype).steps(0, END)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
