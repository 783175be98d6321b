"""Prepares arguments for kernels: batches with one leading dim, alignment, and where to run."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from canzona_compile.kernels.dispatch import KernelChoice, Problem, Verdicts, choose
from canzona_compile.kernels.tuning_cache import GpuKind, load


def batched(tensor: Tensor, batch: Sequence[int]) -> Tensor:
    """`tensor`, broadcast to leading dims `batch`, as [prod(batch), rows, columns]: a view where strides allow it."""
    rows, columns = tensor.shape[-2:]
    return tensor.expand(*batch, rows, columns).reshape(math.prod(batch), rows, columns)


def matrices(name: str, tensor: Tensor, shape: tuple[int, int] | None = None, like: Tensor | None = None) -> None:
    """Check that a tensor is a stack of real matrices, of one shape, on the device of another tensor."""
    if tensor.dim() < 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be a matrix or a stack of matrices")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} is {tensor.dtype}: it must have a floating-point dtype")
    if shape is not None and tuple(tensor.shape[-2:]) != shape:
        raise ValueError(f"{name} holds {'x'.join(map(str, tensor.shape[-2:]))} matrices, not {shape[0]}x{shape[1]}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, but the first operand is on {like.device}")


def alignment(*tensors: Tensor) -> int:
    """Return `Problem.alignment` of [batch, rows, columns] tensors; the caller checks k."""
    least = 16
    for tensor in tensors:
        strides = tensor.stride()
        if 1 not in strides[1:] or tensor.data_ptr() % 16:
            return 1
        inner = 2 if strides[2] == 1 else 1
        others = [s for dim, s in enumerate(strides) if dim != inner and tensor.shape[dim] > 1]
        if any(s * tensor.element_size() % 16 for s in others):
            return 1
        if any(s % 16 for s in others):
            least = 8
    return least


# -- where to run ---------------------------------------------------------------------------------


@cache
def machine(device: torch.device) -> GpuKind | None:
    """Return the GPU that `dispatch.choose` and the verdicts need: None without CUDA, with ROCm, or without Triton."""
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return GpuKind(10 * major + minor, torch.cuda.get_device_name(device), processors(device))


@cache
def processors(device: torch.device) -> int:
    """Count the multiprocessors of a device; 0 without CUDA."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@cache
def _verdicts(here: GpuKind) -> Verdicts:
    return load(here)


@cache
def decide(problem: Problem, device: torch.device) -> KernelChoice:
    """Call `dispatch.choose` with this machine's architecture and verdicts; remember the result per problem."""
    here = machine(device)
    return choose(problem, None) if here is None else choose(problem, here.arch, _verdicts(here), here.processors)


def tuned(device: torch.device) -> str:
    """List the verdicts for a device, a line each. Ranks that compute the same matrices need the same verdicts."""
    here = machine(device)
    found = {} if here is None else _verdicts(here)
    return "\n".join(sorted(f"tuned {problem}: {choice.kernel} {choice.tile}" for problem, choice in found.items()))


def forget_decisions() -> None:
    """Read the verdicts on disk again on the next call."""
    decide.cache_clear()
    _verdicts.cache_clear()


def guard(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, because Triton launches there."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def runnable(choice: KernelChoice, tensor: Tensor, interpreted: bool) -> None:
    """Raise ValueError if a Triton kernel cannot run where the tensor is."""
    if tensor.device.type == "cuda" and interpreted:
        raise ValueError(f"{choice.kernel}: TRITON_INTERPRET is set, which is for CPU tensors")
    if tensor.device.type != "cuda" and not interpreted:
        raise ValueError(f"{choice.kernel}: Triton kernels run on CUDA, and elsewhere only with TRITON_INTERPRET=1")
