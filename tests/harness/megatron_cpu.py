"""Megatron-core on CPUs: its modules see a `torch` whose CUDA is the CPU. Call `install` after they are imported."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange", "rand", "randn")


class Replaced(types.ModuleType):
    """A module, some of whose attributes are others."""

    def __init__(self, real: types.ModuleType, **own: Any) -> None:
        super().__init__(real.__name__)
        vars(self).update(own, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)


class Stream:
    """The only one of a CPU, and an event in it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of tensors that makes those for a GPU on the CPU."""
    return lambda *args, device=None, **more: make(*args, device=device and "cpu", **more)


def install() -> None:
    """Let the modules of Megatron that are imported by now find no GPU missing."""
    patch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = shown()  # type: ignore[attr-defined]


@functools.cache
def shown() -> Replaced:
    """What Megatron sees as torch."""
    cuda = Replaced(
        torch.cuda,
        current_device=lambda: "cpu",
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        Stream=Stream,
        Event=Stream,
        current_stream=Stream,
        stream=lambda _: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
    )
    return Replaced(torch, cuda=cuda, **{name: on_cpu(getattr(torch, name)) for name in FACTORIES})


@functools.cache
def patch() -> None:
    """Replace what asks for a GPU, or has no twin on CPUs."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async
    import megatron.core.dist_checkpointing.strategies.state_dict_saver  # noqa: F401  # Megatron imports them late
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    own: Any = LayerWiseDistributedOptimizer, CudaRNGStatesTracker, WrappedTorchNorm
    layer_wise, states, norm = own
    layer_wise.allgather_params = layer_wise.broadcast_params  # gloo gathers equal sizes only
    states.fork = lambda self, name=None: contextlib.nullcontext()  # of dropout on GPUs
    norm.__new__ = layer_norm
    tensor: Any = torch.Tensor
    plain_type = tensor.type
    tensor.type = lambda self, *to, **more: (  # Megatron asks for "torch.cuda.FloatTensor"
        plain_type(self, *to, **more) if to or more else plain_type(self).replace("torch.", "torch.cuda.")
    )
    tensor.cuda = lambda self, *_, **__: self


def layer_norm(_kind: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.LayerNorm:
    """Torch's, also with sequence parallelism, for which Megatron has that of Apex and Transformer Engine."""
    made: Any = torch.nn.LayerNorm(hidden_size, eps)
    for param in made.parameters():
        param.sequence_parallel = config.sequence_parallel
    return made  # type: ignore[no-any-return]
