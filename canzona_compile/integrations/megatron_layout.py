"""Who steps which matrices in Megatron's ZeRO-1: its shards, each for the data-parallel rank that has least to do.

Megatron balances the elements of a bucket's shards. Matrices do not cost in proportion to their elements, and which
rank gets which shard is free: the most costly shard of a bucket goes to the rank with the least work in the buckets
before. All buffers stay as long as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from megatron.core.optimizer import emerging_optimizers as registry
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer, tag_params_for_buffer_routing
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.nn import Parameter

from canzona_compile.analysis.flops import flops_of, symbolic_flops
from canzona_compile.capture.eager_parity import miniature
from canzona_compile.capture.templates import Capture
from canzona_compile.errors import CanzonaError
from canzona_compile.integrations.megatron import WHERE, Weights, check_name, fused, plain_name
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample


def param_layouts(
    config: Any,
    model_chunks: Sequence[nn.Module],
    ddp_config: Any,
    bucket_sizes: Sequence[int | None] | None = None,
    pg_collection: Any = None,
) -> list[FullParamLayout]:
    """Lay model chunks out, each for `full_param_layout=` of Megatron's DistributedDataParallel.

    Args:
        config: Megatron's `OptimizerConfig`. What a matrix costs is the FLOPs of the captured step of its optimizer.
        model_chunks: before DistributedDataParallel.
        ddp_config: with `use_distributed_optimizer=True`, as Megatron sets it for such layouts.
        bucket_sizes: elements, by chunk, as for Megatron; None of a chunk is one bucket, which leaves nothing to
            balance. By default `ddp_config.bucket_size`, or as many as Megatron takes without it.
        pg_collection: Megatron's process groups; None for those of its `parallel_state`.

    Raises:
        CanzonaError: the config's optimizer is not known or steps no matrices; `use_distributed_optimizer` is False.
    """
    if not ddp_config.use_distributed_optimizer:
        raise CanzonaError(
            "layouts are for use_distributed_optimizer=True of the DistributedDataParallelConfig",
            at=f"{WHERE}_layout.param_layouts",
            hint="set it, and use_layer_wise_distributed_optimizer=True in the OptimizerConfig",
        )
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    usual = ddp_config.bucket_size or max(40_000_000, 1_000_000 * groups.dp_cp.size())
    tag_params_for_buffer_routing(model_chunks)
    balance = Balance(config, groups)
    return [
        balance(
            chunk,
            LayerWiseDistributedOptimizer.compute_full_param_layout(
                [param for param in chunk.parameters() if param.requires_grad],
                bucket_size,
                groups.dp_cp.size(),
                ddp_config,
                expert_data_parallel_world_size=groups.expt_dp.size(),
            ),
        )
        for chunk, bucket_size in zip(model_chunks, bucket_sizes or [usual] * len(model_chunks), strict=True)
    ]


class Balance:
    """Gives each rank about as much to do, over all chunks."""

    def __init__(self, config: Any, groups: Any) -> None:
        check_name(config.optimizer)
        self.config, self.groups = config, groups
        self.flops: Callable[[tuple[int, int]], int] | None = None  # captures once for all chunks
        self.load: dict[bool, list[float]] = {}  # of the ranks of experts, and of the others

    def __call__(self, chunk: nn.Module, layout: FullParamLayout) -> FullParamLayout:
        """Exchange the shards of matrices in Megatron's layout of the next chunk."""
        self.flops = self.flops or flops_of_steps(self.config, chunk, self.groups)
        costs = costs_of(chunk, self.groups, self.flops)
        found = dict(layout.layouts)
        for key, own in found.items():
            if key.is_managed_by_layer_wise_optimizer:
                load = self.load.setdefault(key.is_expert_parallel, [0.0] * own.num_optimizer_shards)
                found[key] = with_balanced_owners(own, costs, load)
        return FullParamLayout(found)


def with_balanced_owners(
    layout: PerBufferParamLayout, costs: Mapping[Parameter, float], load: list[float]
) -> PerBufferParamLayout:
    """Exchange the shards of each bucket.

    Args:
        load: what each rank has to do in other chunks; what it has to do in this one is added.
    """
    shards: list[dict[int, list[Parameter]]] = [defaultdict(list) for _ in layout.bucket_indices]
    sizes = [(end - start) // len(load) for start, end in layout.bucket_indices]
    for param, (first, _, bucket) in layout.param_index_map.items():
        shards[bucket][(first - layout.bucket_indices[bucket][0]) // sizes[bucket]].append(param)
    places = dict(layout.param_index_map)
    for bucket, own in enumerate(shards):
        cost = {shard: sum(costs[param] for param in own[shard]) for shard in range(len(load))}
        idlest = sorted(range(len(load)), key=lambda rank: (load[rank], rank))
        for rank, shard in zip(idlest, sorted(cost, key=lambda shard: (-cost[shard], shard)), strict=True):
            load[rank] += cost[shard]
            for param in own[shard]:
                first, end, _ = places[param]
                moved = (rank - shard) * sizes[bucket]
                places[param] = first + moved, end + moved, bucket
    return replace(layout, param_index_map=places)


def flops_of_steps(config: Any, chunk: nn.Module, groups: Any) -> Callable[[tuple[int, int]], int]:
    """Get a function that says how many FLOPs the step of a matrix of a shape takes, by its heaviest variant."""
    name = plain_name(config.optimizer)
    entry = registry._EMERGING_OPTIMIZERS[name]
    arguments = entry.config_to_kwargs or partial(registry._default_adam_based_eopt_config_to_kwargs, name)
    matrix = Parameter(torch.zeros(2, 2, device="cpu"))
    optimizer = entry.optimizer_cls([matrix], **arguments(config, [chunk], groups))
    capture = Capture(optimizer)

    @cache
    def flops(shape: tuple[int, int]) -> int:
        for dims in (miniature(shape), shape):
            spec = ParameterSpec(dims, torch.float32, torch.float32, torch.device("cpu"))
            kind = capture.kind_of(ParamExample(optimizer.param_groups[0], spec, "a matrix"))
        return max(flops_of(symbolic_flops(t.graph, t), shape) for t in kind.templates.values())

    return flops


def costs_of(chunk: nn.Module, groups: Any, flops: Callable[[tuple[int, int]], int]) -> dict[Parameter, float]:
    """The FLOPs that each matrix of a model chunk costs its owners. What is fused costs as much as its parts."""
    mark_qkv(chunk)
    weights = Weights([chunk], groups)
    found: dict[Parameter, float] = {}
    for _, param in weights.named.values():
        if getattr(param, "is_managed_by_layer_wise_optimizer", False):
            found[param] = float(sum(map(flops, matrices_of(param, weights.ranks_of(param)[0].size()))))
    return found


def matrices_of(param: Any, ranks: int) -> list[tuple[int, int]]:
    """The shapes of the matrices of which `ranks` ranks hold fragments in a weight."""
    rows, columns = param.shape
    if ranks > 1 and getattr(param, "tensor_model_parallel", False):
        rows, columns = (rows * ranks, columns) if param.partition_dim == 0 else (rows, columns * ranks)
    parts = fused(param, ranks)
    return [(rows, columns)] if parts is None else [(size, columns) for _, size in parts.parts]


def mark_qkv(chunk: nn.Module) -> None:
    """Mark fused weights of attention, as Megatron does later when it makes the optimizer."""
    sizes = registry._get_qkv_split_shapes(chunk.config)
    for name, param in chunk.named_parameters():
        if "linear_qkv.weight" in name and param.shape[0] % sum(sizes) == 0:
            param.is_qkv, param.qkv_split_shapes = True, sizes  # type: ignore[attr-defined]
