"""An optimizer whose state is of a class that has few operators, as the classes for low-bit state of torchao are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.harness.toy_optimizers import PerParameter, State

aten = torch.ops.aten
ON_THE_INSIDE = {"all_gather_into_tensor", "wait_tensor", "_wrap_tensor_autograd", "detach", "view"}


class LowBit(Tensor):
    """A tensor of float32 that remembers bfloat16. It can be read, written and gathered; no other operator knows it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> LowBit:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[return-value]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LowBit({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _context: None, _size: Any, _stride: Any) -> LowBit:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ON_THE_INSIDE:
            return cls(func(args[0].inner, *args[1:], **(kwargs or {})))
        values = [value.inner.float() if isinstance(value, LowBit) else value for value in args]
        if func is aten.copy_.default and isinstance(args[0], LowBit):
            args[0].inner.copy_(values[1])
            return args[0]
        if func is aten.add.Tensor:
            return func(*values, **(kwargs or {}))
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class LowBitMomentum(PerParameter):
    """Momentum in `LowBit`; a number is read on the host, so that the step is interpreted.

    Args:
        noise: draw random numbers, as stochastic rounding does.
    """

    def __init__(self, params: Any, noise: bool = False) -> None:
        super().__init__(params)
        self.noise = noise

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["step"], state["momentum"] = torch.tensor(0.0), low_bit_zeros(param)
        state["step"] += 1
        update = torch.add(grad, state["momentum"], alpha=0.9 if state["step"].item() > 1 else 0.0)
        if self.noise:
            update = update + torch.rand_like(update)
        state["momentum"].copy_(update)
        param.add_(update, alpha=-group["lr"])


def low_bit_zeros(param: Tensor) -> Tensor:
    """Zeros, laid out as a parameter."""
    local = param.to_local() if isinstance(param, DTensor) else param
    made = LowBit(torch.zeros_like(local, dtype=torch.bfloat16))
    if not isinstance(param, DTensor):
        return made
    layout = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(made, param.device_mesh, param.placements, run_check=False, **layout)
