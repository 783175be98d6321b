"""What `zero1` refuses before it plans anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from canzona_compile.api.chains.chain import Chain
from canzona_compile.api.wrapped_class import check_wrappable, is_wrapped
from canzona_compile.data_parallel.hooks import MARK
from canzona_compile.errors import CanzonaError, UnsupportedLayout
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.session.params import check_usable
from canzona_compile.tensors import local_part


def check(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    bucket_bytes: int,
    reduce_dtype: torch.dtype | None,
    gather: str,
) -> None:
    """Refuse arguments of `zero1` that cannot work."""
    if isinstance(model, DistributedDataParallel | FSDPModule):
        raise CanzonaError(
            f"the model is already wrapped in {type(model).__name__}, which reduces gradients itself",
            at="zero1(model)",
            hint="zero1 replaces DDP: pass the plain model. With FSDP, call canzona_compile.wrap(optimizer) instead",
        )
    for part in model.modules():
        if isinstance(part, DistributedDataParallel | FSDPModule):
            raise CanzonaError("a submodule is already wrapped in DDP or FSDP", at="zero1(model)")
    if not optimizers:
        raise CanzonaError("zero1 needs at least one optimizer", at="zero1(model, [])")
    seen: set[int] = set()
    for own in optimizers:
        if not isinstance(own, Optimizer):
            raise CanzonaError(f"zero1 takes a torch.optim.Optimizer, not a {type(own).__name__}", at="zero1()")
        if isinstance(own, Chain):
            raise CanzonaError(
                "the list of optimizers contains a chain",
                at="zero1(model, [...])",
                hint="put all optimizers into one chain and call zero1(model, chain)",
            )
        if is_wrapped(own):
            raise CanzonaError(
                "the optimizer is already wrapped",
                at="zero1()",
                hint="call zero1 on the plain optimizer: unwrap(optimizer)",
            )
        check_wrappable(own)
        ids = {id(p) for g in own.param_groups for p in g["params"]}
        if ids & seen:
            raise CanzonaError("two of the optimizers share a parameter", at="zero1()")
        seen |= ids
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise CanzonaError(f"bucket_bytes={bucket_bytes!r} is not a positive integer", at="the option bucket_bytes")
    if gather not in ("step", "forward"):
        raise CanzonaError(f"gather={gather!r} is neither 'step' nor 'forward'", at="the option gather")
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise CanzonaError(f"reduce_dtype={reduce_dtype!r} is not a floating-point dtype", at="the option reduce_dtype")


def check_params(model: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Refuse parameters that cannot lie in buckets, or that nobody would reduce.

    Args:
        model: the model.
        params: the parameters that the optimizers train, by name.
    """
    if not params:
        raise CanzonaError("no parameter of the optimizers requires a gradient", at="zero1()")
    for name, param in canonical_params(model).items():
        if param.requires_grad and name not in params:
            raise CanzonaError(
                "the parameter requires a gradient but is in no optimizer, so its gradient would never be reduced",
                at=name,
                hint="pass all optimizers of the model in one call of zero1, or freeze it with requires_grad_(False)",
            )
    devices = {param.device for param in params.values()}
    if len(devices) > 1:
        raise CanzonaError(f"the parameters are on several devices: {', '.join(map(str, devices))}", at="zero1()")
    for name, own in params.items():
        check_usable(name, own)
        if getattr(own, MARK, False):
            raise CanzonaError(
                "an earlier call of zero1 already reduces the gradient of this parameter",
                at=name,
                hint="first call canzona_compile.unwrap on the optimizers of that call",
            )
        if not local_part(own).numel():
            raise UnsupportedLayout(
                "this rank holds no element of the parameter",
                at=name,
                hint="shard it over fewer ranks, or replicate it",
            )


def check_meshes(meshes: Mapping[str, DeviceMesh], ranks: Sequence[int]) -> None:
    """Refuse parameters that are sharded or replicated over the data-parallel ranks already.

    Args:
        meshes: those of the parameters that are fragments, by name.
        ranks: the data-parallel ranks.
    """
    for name, mesh in meshes.items():
        if len(set(mesh.mesh.flatten().tolist()) & set(ranks)) > 1:
            raise CanzonaError(
                f"the parameter is sharded over {mesh}, which contains data-parallel ranks",
                at=name,
                hint="zero1 needs every data-parallel rank to hold the whole parameter; with FSDP2 call "
                "wrap(optimizer)",
            )
