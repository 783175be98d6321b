"""`round_state`: the plain optimizer whose state is rounded after each step, which `state=` is compared with."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.storage import WHERE, StateOption, rounded, rules_of, storable
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.tensors import local_part


def round_state(optimizer: Optimizer, state: StateOption) -> RemovableHandle:
    """Round the state of a plain optimizer after each of its steps, in place.

    `wrap(optimizer, state=...)` takes the same steps, with state that is stored so, on any layout.

    Args:
        optimizer: one that is not wrapped, of whole parameters.
        state: as in `wrap`, by names of leaves where "int8" is for some of them. "cpu" rounds nothing.

    Returns:
        What ends it, by its `remove()`.

    Raises:
        CanzonaError: `state` is none of what `wrap` takes, or is "int8" for all leaves, which depends on the step.
    """
    rules = rules_of(state)
    if rules is None:
        raise CanzonaError("round_state takes what wrap(state=) takes, not None", at=WHERE)
    if rules.lenient and rules.rules[0][1].dtype == "int8":
        raise CanzonaError(
            f"state={state!r} is int8 for some leaves and bfloat16 for others, which the plain optimizer cannot tell",
            at=WHERE,
            hint="pass a dict by names of leaves; print(optimizer.canzona.report()) lists them",
        )

    def after(own: Optimizer, *_: Any) -> None:
        for held in own.state.values():
            for name, value in state_leaves(held):
                storage = rules.of(name)
                if storage is not None and isinstance(value, Tensor) and storable(value.shape, value.dtype):
                    local = local_part(value)
                    local.copy_(rounded(local, storage))

    return optimizer.register_step_post_hook(after)
