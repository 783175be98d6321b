"""A model whose forward and backward passes run on the stand-in, as torch runs them on CUDA.

Parameters lie in plain tensors, as in `on_device`, and say that they lie on the device while training code looks.
Autograd is torch's. The gradient of each parameter is a value that the test gives and a multiple of what the forward
pass read of the parameter, so a forward pass that reads too early shows. Autograd runs a node on the stream that its
forward ran on, hooks of parameters included. The caller's stream waits for that at the end, and then callbacks run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable

from tests.fake_cuda.device import FakeStream, current_device, has_device
from tests.fake_cuda.tensors import CallsForDevice, DeviceTensor, adopted

READ = 0.125  # how much of what the forward pass reads is in the gradient
_plain_device = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]


def device_of(param: nn.Parameter) -> torch.device:
    """Stands in for the attribute `device` of parameters."""
    if has_device() and current_device().shown:
        return torch.device("cuda", current_device().index)
    found: torch.device = _plain_device(param)
    return found


@contextlib.contextmanager
def shown(value: bool) -> Iterator[None]:
    """Inside this context, parameters say that they lie on the device, or that they do not."""
    device = current_device()
    before, device.shown = device.shown, value
    try:
        yield
    finally:
        device.shown = before


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Inside this context runs what users write, and what ZeRO-1 does around steps."""
    with shown(True), CallsForDevice():
        yield


@contextlib.contextmanager
def beside_training() -> Iterator[None]:
    """Inside this context, within a training, an optimizer's own code runs, and planning, on the CPU."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with shown(False):
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def parameters_on_device() -> Any:
    """A patch for the whole process: parameters say that they lie on the device of the rank that asks."""
    return mock.patch.object(nn.Parameter, "device", property(device_of), create=True)


class Read(Function):
    """Reads a parameter."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, param: Tensor, value: Tensor) -> Tensor:
        ctx.stream, ctx.value = current_device().current, value
        ctx.read = adopted(param) * READ
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # type: ignore[override]
        current_device().current = ctx.stream
        read, ctx.read = ctx.read, None
        return token, read + adopted(ctx.value), None


class Loss(Function):
    """The last node of a forward pass, and the first one of its backward pass."""

    @staticmethod
    def forward(ctx: Any, token: Tensor) -> Tensor:
        ctx.stream = current_device().current
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # type: ignore[override]
        device, stream = current_device(), ctx.stream
        caller = device.current

        def ended() -> None:
            device.current = caller
            wait_for(caller, stream)

        wait_for(stream, caller)
        device.current = stream
        Variable._execution_engine.queue_callback(ended)  # before all that hooks queue
        return token


def wait_for(stream: FakeStream, other: FakeStream) -> None:
    """Let a stream wait for another one."""
    if stream is not other:
        stream.wait_stream(other)


class Part(nn.Module):
    """A module with parameters of its own."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, token: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        for name, param in self.named_parameters():
            token = Read.apply(token, param, values[name])  # type: ignore[no-untyped-call]
        return token


class Parts(nn.Module):
    """Modules that run one after the other.

    Args:
        first: by module, the first values of its parameters.
    """

    def __init__(self, first: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Part(params) for name, params in first.items()})

    def forward(self, values: Mapping[str, Mapping[str, Tensor]], missing: tuple[str, ...] = ()) -> Tensor:
        """Run all modules but those that are missing.

        Args:
            values: by module and parameter, the gradients beside what is read.
            missing: the names of modules that take no part.
        """
        token = torch.zeros((), device="cpu", requires_grad=True)
        for name, part in self.parts.items():
            if name not in missing:
                token = part(token, values[name])
        loss: Tensor = Loss.apply(token)  # type: ignore[no-untyped-call]
        return loss


def backward(loss: Tensor) -> None:
    """Run a backward pass. If it fails, the caller's stream is current again."""
    device = current_device()
    before = device.current
    try:
        # A mode of functions hides itself from all that `loss.backward()` calls, hooks included.
        options = {"allow_unreachable": True, "accumulate_grad": True}
        Variable._execution_engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), **options)
    finally:
        device.current = before


def plain_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor of the device, as a plain tensor."""
    return tensor.inner if isinstance(tensor, DeviceTensor) else tensor
