"""The norm of all gradients of a model whose gradients are with their owners, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from canzona_compile.data_parallel.collectives import DataParallelGroup, all_reduce
from canzona_compile.data_parallel.fragment import Fragment
from canzona_compile.data_parallel.gradient import ReducedGradient
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.program_ops import Watch


def check_reduced(fragments: Mapping[str, Fragment]) -> None:
    """Raise if a gradient is not reduced yet."""
    for fragment in fragments.values():
        if fragment.param.grad is not None and not isinstance(fragment.param.grad, ReducedGradient):
            raise CanzonaError(
                "the gradient is not reduced yet",
                at=fragment.name,
                hint="clip after the last backward pass, and run that one outside of no_sync()",
            )


def clip_by_norm(
    fragments: Mapping[str, Fragment], norm: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> None:
    """Scale gradients by the norm that `total_norm` found, as `torch.nn.utils.clip_grad_norm_` does whole ones."""
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from the parameters is non-finite, "
            "so it cannot be clipped. To disable this error, set error_if_nonfinite=False"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [fragment.param.grad for fragment in fragments.values()]
    parts = [part for grad in grads if isinstance(grad, ReducedGradient) for part in grad.parts]
    for own in by_dtype(parts).values():
        torch._foreach_mul_([parts[i] for i in own], scale)


def total_norm(fragments: Mapping[str, Fragment], group: DataParallelGroup, watch: Watch, norm_type: float) -> Tensor:
    """The norm of all gradients, which are reduced, from the norm of each: 0-d, equal on all ranks. A collective.

    Its bits are those of torch's norm over the parameters in the order of the model, unless a parameter is cut: the sum
    over its elements then has another order.
    """
    present = [f for f in fragments.values() if f.param.grad is not None]
    device = next(iter(fragments.values())).param.device
    if not present:
        return torch.zeros((), device=device)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    found = torch.stack(norms_held(present, norm_type))
    all_reduce(found, op, (group.shard,), watch)  # replicas hold the same shards, which count once
    norms = list(found.unbind())
    for cut, own in cut_by_mesh(present).items():
        # A list as the index would be copied to the device, and the host would wait for the copy.
        values = torch.stack([norms[i] for i in own])
        all_reduce(values, op, cut.groups(), watch)
        replace(norms, own, values.unbind())
    if takes_powers(norm_type):
        cut_ones = [i for i, fragment in enumerate(present) if fragment.spread]
        replace(norms, cut_ones, powers([norms[i] for i in cut_ones], 1.0 / norm_type))
    whole_norm: Tensor = torch.linalg.vector_norm(
        torch.stack(as_dtypes(norms, [fragment.param.dtype for fragment in present])), norm_type
    )
    return whole_norm


def norms_held(fragments: Sequence[Fragment], norm_type: float) -> list[Tensor]:
    """The norms of what this rank holds of each gradient: 0-d, float32, zero if it holds nothing.

    Of gradients that are cut they are what norms of several ranks are sums of: sums of powers, or counts. One launch
    takes the norms of all gradients of a dtype, as in torch's own clipping.
    """
    held = [
        [part for part in fragment.param.grad.parts if part.numel()]
        for fragment in fragments
        if isinstance(fragment.param.grad, ReducedGradient)
    ]
    flat = [part for own in held for part in own]
    norms = list(flat)
    for own in by_dtype(flat).values():
        replace(norms, own, torch._foreach_norm([flat[i] for i in own], norm_type))
    norms = as_dtypes(norms, [torch.float32] * len(norms))
    if takes_powers(norm_type):
        cut = [i for i, f in enumerate(f for f, own in zip(fragments, held, strict=True) for _ in own) if f.spread]
        replace(norms, cut, powers([norms[i] for i in cut], norm_type))
    joined = torch.maximum if math.isinf(norm_type) else torch.add
    nothing = torch.zeros((), device=fragments[0].param.device)
    remaining = iter(norms)
    return [reduce(joined, [next(remaining) for _ in own]) if own else nothing for own in held]


def takes_powers(norm_type: float) -> bool:
    """Whether the norm of a whole is a root of a sum of powers; else it is a maximum, or a count (order 0)."""
    return norm_type != 0 and not math.isinf(norm_type)


def powers(values: Sequence[Tensor], exponent: float) -> Sequence[Tensor]:
    """Raise every value to a power, with one launch."""
    return torch._foreach_pow(list(values), exponent) if values else []


def replace(values: list[Tensor], at: Iterable[int], new: Iterable[Tensor]) -> None:
    """Replace some entries of a list."""
    for i, value in zip(at, new, strict=True):
        values[i] = value


def by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    """The positions of the tensors of each dtype: operators on lists take one launch for tensors of one dtype."""
    found: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(i)
    return found


def as_dtypes(values: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Convert 0-d values to dtypes of their own, with one launch for each dtype."""
    found = list(values)
    for dtype in dict.fromkeys(dtypes):
        own = [i for i, wanted in enumerate(dtypes) if wanted == dtype and values[i].dtype != dtype]
        if own:
            replace(found, own, torch.stack([values[i] for i in own]).to(dtype).unbind())
    return found


class MeshCut(NamedTuple):
    """The dims of a mesh along which ranks hold different elements of a parameter.

    Along the other dims they hold the same ones, which count once.
    """

    mesh: DeviceMesh
    dims: tuple[int, ...]

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of this rank along these dims."""
        return [self.mesh.get_group(dim) for dim in self.dims]


def cut_by_mesh(fragments: Sequence[Fragment]) -> dict[MeshCut, list[int]]:
    """The positions of the parameters that mesh dims cut, by these dims."""
    found: dict[MeshCut, list[int]] = {}
    for i, fragment in enumerate(fragments):
        if fragment.sharding is not None and fragment.sharding.cutting_dims:
            cut = MeshCut(fragment.sharding.mesh, fragment.sharding.cutting_dims)
            found.setdefault(cut, []).append(i)
    return found
