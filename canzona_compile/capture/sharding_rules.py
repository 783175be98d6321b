"""Try the optimizer's own step: does it run on DTensors, for which torch lacks some rules? What state does it make?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from canzona_compile.compat.interrupts import uninterrupted
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.raised import blamed, first_line
from canzona_compile.replica.randomness import undisturbed
from canzona_compile.replica.twin import as_written, make_twin, step_plainly

DATA_SETTER = Tensor.data.__set__  # type: ignore[attr-defined]


@uninterrupted
def state_after_a_step(optimizer: Optimizer, group: Mapping[str, Any], spec: ParameterSpec) -> dict[str, Tensor]:
    """Take a step with a whole parameter of this kind, drop it, and return the tensors of its state by name."""
    random = torch.Generator().manual_seed(0)
    like = spec.parameter(lambda dtype: torch.randn(spec.shape, generator=random, device="cpu").to(spec.device, dtype))
    twin = make_twin(optimizer, group, [like])
    try:
        with undisturbed(optimizer), as_written():
            step_plainly(twin)
    except Exception:  # whatever it is: then the step of the real parameter will raise it
        return {}
    leaves = state_leaves(twin.state.get(like) or {})
    return {name: value for name, value in leaves if isinstance(value, Tensor)}


@uninterrupted
def missing_rule(optimizer: Optimizer, group: Mapping[str, Any], param: DTensor) -> str:
    """Try two steps on a copy of a parameter and drop the copy. This is no collective if the work is elementwise.

    Args:
        param: the parameter. The copy has the same fragments, because rules may depend on whether all have equal sizes.

    Returns:
        Why the step fails, with torch's message about the operator; empty if the step runs.
    """
    spec = ParameterSpec.of(param)
    own = spec.parameter(lambda dtype: torch.zeros_like(param, dtype=dtype))
    own.grad = torch.ones_like(param, dtype=spec.grad_dtype)
    twin = make_twin(optimizer, group, [own])
    try:
        with undisturbed(optimizer), NoNewData():
            step_plainly(twin)
            step_plainly(twin)
    except Exception as error:  # whatever it is: on whole tensors the step may work
        return f"torch cannot run its step on shards: {first_line(error)}{blamed(error)}"
    return ""


class NoNewData(TorchFunctionMode):
    """Raises if code assigns to `data` of a DTensor: torch changes what holds the fragment then, not the fragment."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == DATA_SETTER and isinstance(args[0], DTensor):
            raise TypeError("an assignment to .data does not reach the fragment of a DTensor")
        return func(*args, **(kwargs or {}))
