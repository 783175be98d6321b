"""Parameters whose update is elementwise: the optimizer's own step, on this rank's fragments.

On the plain fragments, not on DTensors: that saves their dispatch, and torch has no sharding rule for
some of the operators that optimizers use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from canzona_compile.binding import Bound
from canzona_compile.capture.leaves import Path, leaf_name, paths_of, read, write
from canzona_compile.capture.twin import make_twin, step_plainly
from canzona_compile.layout import local_part
from canzona_compile.state import like_param


class Elementwise:
    """Steps the elementwise parameters of a plan."""

    def __init__(self, optimizer: Optimizer, bounds: Sequence[Bound]) -> None:
        self.optimizer, self.bounds = optimizer, bounds

    def step(self) -> None:
        present = [b for b in self.bounds if b.param.grad is not None]
        if not present:
            return
        own = {b.task.name: own_param(b.param) for b in present}
        twin = make_twin(self.optimizer, {}, [], {own[b.task.name]: self._fragments(b) for b in present})
        twin.param_groups = [
            {**group, "params": [own[b.task.name] for b in present if b.group == g]}
            for g, group in enumerate(self.optimizer.param_groups)
        ]
        twin.param_groups = [group for group in twin.param_groups if group["params"]]
        step_plainly(twin)
        for b in present:
            self._keep(b, twin.state[own[b.task.name]])

    def _fragments(self, bound: Bound) -> dict[str, Any]:
        """A parameter's state with this rank's part of every DTensor."""
        state: dict[str, Any] = self.optimizer.state.get(bound.param, {})
        if not isinstance(bound.param, DTensor):
            return state
        return {key: pytree.tree_map(part_of, value) for key, value in state.items()}

    def _keep(self, bound: Bound, found: dict[str, Any]) -> None:
        """Show what the step left in the state, laid out like the parameter where it has its shape."""
        if not isinstance(bound.param, DTensor):
            self.optimizer.state[bound.param] = found
            return
        state = self.optimizer.state[bound.param]
        for path in paths_of(found).values():
            new, old = read(found, path), read(state, path)
            if isinstance(old, DTensor) and old._local_tensor is new:
                continue
            write(state, path, self._laid_out(bound, path, new), found)

    def _laid_out(self, bound: Bound, path: Path, value: Any) -> Any:
        leaf = next((leaf for leaf in bound.kind.state if leaf.name == leaf_name(path)), None)
        if not isinstance(value, Tensor) or leaf is None or leaf.shape != bound.task.shape:
            return value
        return like_param(value, bound.param, leaf)


def own_param(param: Tensor) -> Tensor:
    """The fragment as a parameter of its own, with its gradient; plain ones are that already."""
    if not isinstance(param, DTensor):
        return param
    assert param.grad is not None
    own, grad = torch.nn.Parameter(param._local_tensor.detach()), local_part(param.grad)
    if grad.dtype != own.dtype:
        own.grad_dtype = grad.dtype
    own.grad = grad
    return own


def part_of(leaf: Any) -> Any:
    return leaf._local_tensor if isinstance(leaf, DTensor) else leaf
