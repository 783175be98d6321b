"""The optimizer's own step for parameters whose update is elementwise; each rank updates its own fragments."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from canzona_compile.capture.twin import make_twin, step_plainly
from canzona_compile.session.bind import BoundParam


class LocalStep:
    """Steps the elementwise parameters of a plan.

    The optimizer sees DTensors as DTensors and not as plain fragments, because its code may read the parameter's
    shape.

    Args:
        optimizer: the wrapped optimizer.
        bounds: the elementwise parameters.
    """

    def __init__(self, optimizer: Optimizer, bounds: Sequence[BoundParam]) -> None:
        self.optimizer, self.bounds = optimizer, bounds

    def step(self) -> None:
        """Update the parameters that have gradients, and keep their state in `optimizer.state`."""
        present = [b for b in self.bounds if b.param.grad is not None]
        if not present:
            return
        state = self.optimizer.state
        twin = make_twin(self.optimizer, {}, [], {b.param: state[b.param] for b in present if b.param in state})
        groups = sorted({b.param_group for b in present})
        twin.param_groups = [
            {**self.optimizer.param_groups[g], "params": [b.param for b in present if b.param_group == g]}
            for g in groups
        ]
        step_plainly(twin)
        state.update({b.param: twin.state[b.param] for b in present if b.param in twin.state})
