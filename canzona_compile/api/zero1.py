"""`zero1`: data parallelism whose optimizer step needs no communication, in place of DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from canzona_compile.api.chain import Chain
from canzona_compile.api.handle import Zero1Canzona
from canzona_compile.api.holders import chain_of, inside, members_of
from canzona_compile.api.wrap import options_of, show
from canzona_compile.api.wrapped_class import attach, check_wrappable, is_wrapped
from canzona_compile.data_parallel.collectives import DataParallelGroup
from canzona_compile.data_parallel.engine import GatherAt, Zero1
from canzona_compile.data_parallel.fragment import Filling
from canzona_compile.data_parallel.hooks import MARK
from canzona_compile.data_parallel.model_plan import agreed_plan, bucket_size
from canzona_compile.data_parallel.session import OwnerSession
from canzona_compile.errors import CanzonaError, CanzonaWarning, UnsupportedLayout
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.ir.options import CAPACITY, StepOptions, made_options
from canzona_compile.ir.sharding import GivenLayout
from canzona_compile.runtime.agreement import PLANNING, Agreement
from canzona_compile.runtime.channel import channel_of
from canzona_compile.runtime.equal_copies import HINT_EXPERTS, digest_of
from canzona_compile.runtime.launch_order import keep_launch_order
from canzona_compile.session.params import check_usable
from canzona_compile.session.planning import PlannedSession
from canzona_compile.tensors import is_expert, local_part
from canzona_compile.views.given_layout import check_marked, shardings_of

Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])


def zero1(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    mesh: DeviceMesh | ProcessGroup,
    bucket_bytes: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather: GatherAt = "step",
    **options: Unpack[StepOptions],
) -> Optimizers:
    """Replace DDP with ZeRO-1: each gradient is reduced to the rank that owns and updates its matrix.

    This takes the place of `DistributedDataParallel(model)` and of `wrap`. During backward, gradients are reduced to
    the ranks that own them. The step updates what each rank owns. An all-gather returns the parameters. A matrix has
    one owner; parameters with elementwise updates are cut so that all ranks own equally much. The first rank's
    parameters and buffers are sent to all ranks now. Buffers are not sent again, which DDP does in every forward pass.
    Ranks compare their hyperparameters, and what they are about to do, before every step.

    Args:
        model: the model, on its device, not wrapped in DDP or FSDP. Parameters may be plain tensors, or DTensors over
            other mesh dims than `mesh` (tensor parallelism).
        optimizer: an optimizer that `wrap` takes, a chain, or a list of optimizers that share no parameter.
        mesh: the data-parallel ranks: a mesh of one dim, a process group, or a mesh of two dims whose first one
            replicates: gradients are then reduced along the second dim and summed over the first.
        bucket_bytes: a bucket closes when it has at least so many bytes of gradients. A matrix lies in one bucket. None
            is at most 64 MiB: ranks measure their link and choose. With `hardware=` or `plan=` it is 64 MiB.
        reduce_dtype: the dtype in which gradients travel; None is that of the gradients.
        gather: "step" if parameters are whole when `step` returns; "forward" if each module waits for its own
            parameters just before it runs. Then all else that reads parameters must come after
            `optimizer.canzona.synchronize()`.
        options: what `canzona_compile.Options` describes, but `replicate` and `strategy`: each matrix has one owner.
            Patterns are those of the model's names. A plan has to be made with `updates="zero1"`, or by
            `optimizer.canzona.plan()` under zero1.

    Returns:
        The same object or objects. Each class is now a subclass of the old one, and each has `.canzona`.

    Raises:
        CanzonaError: the model, an optimizer, the mesh or an option does not fit, or ranks differ in their parameters.
        TypeError: there is no such option.
    """
    listed = isinstance(optimizer, list | tuple)
    held: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else inside(optimizer)
    optimizers: list[Optimizer] = list(held if listed else members_of(held))
    check(model, optimizers, bucket_bytes, reduce_dtype, gather)
    group, ranks = group_of(mesh)
    given = {"capacity": CAPACITY, **options}
    wanted = made_options("zero1", StepOptions.__optional_keys__, given, group.size, strategy="owner")
    each = options_of(optimizers, wanted, model)
    params, meshes = trained_params(model, optimizers, wanted.layout, ranks)
    notice_one_rank(group, meshes)
    device = next(iter(params.values())).device
    keep_launch_order([own for own in (group.shard, group.replicate) if own is not None], device)
    agreement = Agreement(None if group.shard is None else channel_of(ranks, group.shard, device), "zero1()")
    either = group.shard or group.replicate
    around = Agreement(None if either is None else channel_of(every_rank(mesh, meshes, group), either, device), "model")
    around.take_number()
    said = f"{gather} {bucket_bytes} {reduce_dtype} {[type(own).__name__ for own in optimizers]}{wanted.rates_text}"
    agreement.compare(PLANNING, {"plan": "\n".join([said, *(own.text for own in each), *described(model, params)])})
    check_experts(params, group, given=wanted.layout is not None)
    send_from_first(model, group)
    planned = [PlannedSession(own, its) for own, its in zip(optimizers, each, strict=True)]
    size = bucket_size(bucket_bytes, params, group, around, wanted)
    model_plan = agreed_plan(planned, params, group.shard, ranks, size, agreement)
    filling = Filling.of(model_plan, params, group.rank)
    engine = Zero1(model, filling, group, reduce_dtype, gather, wanted.missing_grads == "zero", around)
    sessions = [
        OwnerSession(own, engine, model_plan, bound, agreement)
        for own, bound in zip(planned, model_plan.bound, strict=True)
    ]
    for session in sessions:
        attach(session.optimizer, Zero1Canzona([session], engine, model_plan))
    if not listed:
        show(optimizer, optimizers, chain_of(held))
    return optimizer


def notice_one_rank(group: DataParallelGroup, meshes: Sequence[DeviceMesh]) -> None:
    """Warn if this rank shares gradients with none, although the job has others and nothing is sharded over them."""
    others = dist.get_world_size() - 1
    if others and not meshes and group.size * group.replicas == 1:
        warnings.warn(
            CanzonaWarning(
                f"mesh= has one rank, but the job has {others} more, and gradients are not reduced between them. To "
                'train one model on all of them, pass the data-parallel mesh, such as mesh["dp"]. For pipeline stages '
                "of one rank each, ignore this."
            ),
            stacklevel=3,
        )


def trained_params(
    model: nn.Module, optimizers: Sequence[Optimizer], given: GivenLayout | None, ranks: Sequence[int]
) -> tuple[dict[str, nn.Parameter], list[DeviceMesh]]:
    """Find the parameters that the optimizers train, by canonical name, and the meshes over which they are sharded."""
    trained = {id(p) for own in optimizers for g in own.param_groups for p in g["params"] if p.requires_grad}
    params = {name: p for name, p in canonical_params(model).items() if id(p) in trained}
    check_params(model, params)
    check_marked(given, params.values())
    sharded = {name: param.device_mesh for name, param in params.items() if isinstance(param, DTensor)}
    told = shardings_of([(name, 0, param) for name, param in params.items()], given).by_name
    check_meshes(sharded, ranks)
    check_meshes({name: sharding.mesh for name, sharding in told.items()}, ranks)
    return params, [*sharded.values(), *(sharding.mesh for sharding in told.values())]


def group_of(mesh: DeviceMesh | ProcessGroup) -> tuple[DataParallelGroup, tuple[int, ...]]:
    """Find the process groups of a mesh.

    Returns:
        The groups, and the global ranks that own shards together, in the order of their group.
    """
    if isinstance(mesh, ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(mesh))
        if dist.get_rank() not in ranks:
            raise CanzonaError(f"rank {dist.get_rank()} is not one of the ranks {ranks}", at="zero1(..., mesh=)")
        return DataParallelGroup(mesh, None, mesh.rank(), len(ranks), 1), ranks
    if not isinstance(mesh, DeviceMesh):
        raise CanzonaError(
            f"mesh= takes a DeviceMesh or a ProcessGroup, not a {type(mesh).__name__}",
            at="zero1(..., mesh=)",
            hint="call torch.distributed.init_process_group() before torch.distributed.group.WORLD is read"
            if mesh is None
            else 'pass the data-parallel mesh, such as mesh["dp"], or torch.distributed.group.WORLD',
        )
    if mesh.ndim > 2:
        raise CanzonaError(
            f"the mesh has {mesh.ndim} dims",
            at="zero1(..., mesh=)",
            hint='pass its data-parallel dim, such as mesh["dp"], or two dims: replicas first, then shards',
        )
    if mesh.get_coordinate() is None:
        raise CanzonaError(f"rank {dist.get_rank()} is not part of {mesh}", at="zero1(..., mesh=)")
    shard = mesh.get_group(mesh.ndim - 1)
    ranks = tuple(dist.get_process_group_ranks(shard))
    replicate = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    alone = len(ranks) == 1
    return DataParallelGroup(None if alone else shard, replicate, shard.rank(), len(ranks), replicas), ranks


def every_rank(mesh: DeviceMesh | ProcessGroup, others: Sequence[DeviceMesh], group: DataParallelGroup) -> list[int]:
    """The global ranks whose collectives depend on one another. This is a collective of the data-parallel ranks.

    Args:
        others: the meshes over which parameters are sharded. A norm is a sum over these, too.

    Returns:
        Those over which gradients are reduced, and all that share a parameter with one of them.
    """
    found = set(dist.get_process_group_ranks(mesh) if isinstance(mesh, ProcessGroup) else mesh.mesh.flatten().tolist())
    for other in others:
        found |= set(other.mesh.flatten().tolist())
    for own in (group.shard, group.replicate) if others else ():
        if own is not None:
            parts: list[set[int]] = [set() for _ in range(dist.get_world_size(own))]
            dist.all_gather_object(parts, found, group=own)
            found = found.union(*parts)
    return sorted(found)


def check_experts(params: Mapping[str, Tensor], group: DataParallelGroup, given: bool) -> None:
    """Refuse experts of which ranks may hold different ones. This is a collective if there are experts."""
    experts = {name: param for name, param in params.items() if is_expert(param)}
    if not experts or group.size * group.replicas == 1:
        return
    told = [torch.stack([*map(digest_of, experts.values())]).tolist()]
    for own in filter(None, (group.shard, group.replicate)):
        parts: list[list[list[int]]] = [[] for _ in range(dist.get_world_size(own))]
        dist.all_gather_object(parts, told, group=own)
        told = [digests for part in parts for digests in part]
    differ = [name for name, *digests in zip(experts, *told, strict=True) if len(set(digests)) > 1]
    if differ or not given:  # ranks that draw with one seed have equal values of different experts
        raise UnsupportedLayout(
            "its attribute allreduce=False says that it is an expert, and ranks of mesh= may hold different ones, but "
            "zero1 adds the gradients of all of them",
            at=[*differ, *experts][0],
            hint=f"without zero1, {HINT_EXPERTS}. If all ranks of mesh= have the same values of the same experts, pass "
            'layout={"*.experts.*": None} to zero1',
        )


def described(model: nn.Module, params: Mapping[str, Tensor]) -> Iterable[str]:
    """One line per parameter of the model: what must be equal on all ranks."""
    for name, param in canonical_params(model).items():
        trained = "trained" if name in params else "not trained"
        trained += " expert" if is_expert(param) else ""
        yield f"{name} {list(param.shape)} {param.dtype} requires_grad={param.requires_grad} {trained}"


def send_from_first(model: nn.Module, group: DataParallelGroup) -> None:
    """Give all ranks the parameters and buffers of the first one, as DDP does. This is a collective."""
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        for own in (group.shard, group.replicate):
            for tensor in tensors if own is not None else ():
                dist.broadcast(local_part(tensor).detach(), dist.get_process_group_ranks(own)[0], group=own)


def check(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    bucket_bytes: int | None,
    reduce_dtype: torch.dtype | None,
    gather: str,
) -> None:
    """Refuse arguments of `zero1` that cannot work."""
    for path, part in model.named_modules():
        # Megatron's own wrappers, of which nothing is imported, have this method.
        if isinstance(part, DistributedDataParallel | FSDPModule) or hasattr(part, "finish_grad_sync"):
            raise CanzonaError(
                f"{'a submodule' if path else 'the model'} is already wrapped in {type(part).__name__}, which reduces "
                "gradients itself",
                at="zero1(model)",
                hint="zero1 replaces DDP: pass the plain model. With FSDP, call wrap(optimizer) instead",
            )
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
    if bucket_bytes is not None and (type(bucket_bytes) is not int or bucket_bytes < 1):
        raise CanzonaError(f"bucket_bytes={bucket_bytes!r} is not a positive integer", at="the option bucket_bytes")
    if gather not in ("step", "forward"):
        raise CanzonaError(f"gather={gather!r} is neither 'step' nor 'forward'", at="the option gather")
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise CanzonaError(f"reduce_dtype={reduce_dtype!r} is not a floating-point dtype", at="the option reduce_dtype")


def check_params(model: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Refuse trained parameters that cannot lie in buckets, and others whose gradients nobody would reduce."""
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
    """Refuse fragments, by name, that are sharded or replicated over the data-parallel ranks already."""
    for name, mesh in meshes.items():
        if len(set(mesh.mesh.flatten().tolist()) & set(ranks)) > 1:
            raise CanzonaError(
                f"the parameter is sharded over {mesh}, which contains data-parallel ranks",
                at=name,
                hint="zero1 needs every data-parallel rank to hold the whole parameter; with FSDP2 call "
                "wrap(optimizer)",
            )
