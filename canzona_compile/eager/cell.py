"""Cells: whole parameters that one rank steps by the optimizer's own code, each by itself on a twin.

The real optimizer never steps. What steps count in parameter groups and attributes belongs to every rank, and users
read it: so every rank has one more twin, with one tiny parameter per group, that takes every step too, and the real
optimizer takes over what it counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.compat.interrupts import one_thread
from canzona_compile.replica.external_counters import around
from canzona_compile.replica.miniature import divisors_of, small_sizes
from canzona_compile.replica.randomness import undisturbed
from canzona_compile.replica.twin import as_written, make_twin, step_plainly


def whole_copy(
    values: Tensor,
    grad: Tensor | None,
    attributes: Mapping[str, Any],
    memory: torch.memory_format = torch.contiguous_format,
) -> nn.Parameter:
    """Make a whole parameter with memory of its own.

    Args:
        memory: how both lie in memory; contiguous as what was gathered, unless it says otherwise.
    """
    made = values.detach().clone(memory_format=memory)
    own = nn.Parameter(made)
    vars(own).update(attributes)
    if grad is not None:
        if grad.dtype != values.dtype:
            own.grad_dtype = grad.dtype
        own.grad = grad.detach().clone(memory_format=memory)
    return own


def step_alone(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor, state: dict[str, Any]) -> Tensor:
    """Step one whole parameter on a twin of an optimizer."""
    twin = make_twin(optimizer, group, [param], {param: state})
    step_plainly(twin)
    state.update(twin.state[param])
    return param.detach()


class Shadow:
    """A twin of an optimizer with tiny parameters, whose counts the optimizer takes over."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._params: list[Tensor] = []
        self._sizes: dict[int, int] = {}  # of parameters that are not as tiny, if the step fails for the tiniest
        self._state: dict[Tensor, dict[str, Any]] = {}

    def count(self, optimizer: Optimizer) -> None:
        """Take a step, and show what it counted. Groups without gradients do not step."""
        groups = optimizer.param_groups
        self._params += [tiny(group["params"], self._sizes) for group in groups[len(self._params) :]]
        for param, group in zip(self._params, groups, strict=True):
            some = any(p.grad is not None for p in group["params"])
            param.grad = torch.randn(param.shape, generator=self._random, device="cpu").to(param) if some else None
        twin = make_twin(optimizer, {}, [], self._state)
        twin.param_groups = [{**group, "params": [p]} for group, p in zip(groups, self._params, strict=True)]
        before = [dict(values) for _, values in around(twin)]
        try:
            with one_thread(), undisturbed(twin), as_written():
                step_plainly(twin)
        except Exception:  # whatever the optimizer's code raises for the tiniest
            if self._sizes:
                raise
            self._sizes = small_sizes((p.shape for g in groups for p in g["params"]), divisors_of(optimizer))
            self._params, self._state = [], {}
            self.count(optimizer)
            return
        self._state = {key: value for key, value in twin.state.items() if isinstance(key, Tensor)}
        homes: list[dict[Any, Any]] = [vars(optimizer), optimizer.state, *groups]
        for home, old, (_, new) in zip(homes, before, around(twin), strict=True):
            changed = {k: v for k, v in new.items() if isinstance(v, int | float) and (k not in old or old[k] != v)}
            home.update(changed)


def tiny(params: Sequence[Tensor], sizes: Mapping[int, int]) -> Tensor:
    """Make a tiny parameter with as many dims as the first of some; on the CPU, so that no device is waited for.

    Args:
        sizes: the small size for each size, see `small_sizes`; empty for the tiniest.
    """
    first = params[0] if params else torch.zeros(2, 3, device="cpu")
    shape = tuple(sizes.get(n, min(n, 2 + i)) for i, n in enumerate(first.shape))
    return torch.nn.Parameter(torch.ones(shape, dtype=first.dtype, device="cpu"))
