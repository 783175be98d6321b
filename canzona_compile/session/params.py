"""The parameters of an optimizer: their names, and what is wrong with them."""

from __future__ import annotations

import gc
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import is_flattened, is_non_overlapping_and_dense_or_false
from canzona_compile.errors import (
    CanzonaError,
    EveryRankComputes,
    UnsupportedLayout,
    UnsupportedOptimizer,
    some,
)
from canzona_compile.ir.canonical_names import DDP, canonical_groups, canonical_name
from canzona_compile.ir.step import Step
from canzona_compile.runtime.process_groups import distributed
from canzona_compile.session.gradients import check_gradient
from canzona_compile.tensors import inner_tensors, local_part, made_of
from canzona_compile.views.given_layout import Named

Module = TypeVar("Module", bound=nn.Module)


def named_params(
    optimizer: Optimizer, names: Sequence[Sequence[str]] = (), prefix: str = ""
) -> list[tuple[str, int, Tensor]]:
    """Name every parameter of an optimizer, with unique names that are the same whatever wraps the model's modules.

    Args:
        names: the canonical names that the model gives to the parameters of each group, for groups without
            `param_names`; empty if the model is not known.
        prefix: starts the names of unnamed parameters. It distinguishes the optimizers of a chain.
    """
    own = [list(map(str, group.get("param_names") or ())) for group in optimizer.param_groups]
    if not names:  # without names, the model shows whether DDP added a prefix
        own = canonical_groups(own)
    found = []
    for g, group in enumerate(optimizer.param_groups):
        given = names[g] if g < len(names) else ()
        for i, param in enumerate(group["params"]):
            name = given[i] if i < len(given) else ""
            if i < len(own[g]) and (said := canonical_name(own[g][i])) != DDP + name:
                name = said
            found.append((printable(name) if name else f"{prefix}group{g}.param{i}", g, param))
    counts: dict[str, int] = {}
    unique = []
    for name, g, p in found:
        counts[name] = counts.get(name, 0) + 1
        unique.append((name if counts[name] == 1 else f"{name}#{counts[name]}", g, p))
    return unique


def printable(name: str) -> str:
    """Escape what a terminal would obey."""
    return name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


# -- before a plan ---------------------------------------------------------------------------------


def check_differentiable(optimizer: Optimizer) -> None:
    """Refuse groups with `differentiable=True`: steps run without autograd, so their gradients would be wrong."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__} has differentiable=True, but a wrapped step runs without autograd",
            hint="pass differentiable=False, or use the plain optimizer to differentiate through its steps",
        )


def check_params(named: Named, refused: dict[str, CanzonaError] | None = None) -> None:
    """Refuse parameters whose steps would train nothing, that are no longer matrices, or whose gradients do not fit.

    Args:
        refused: gets the errors of single parameters, by name, and nothing is raised for them.
    """
    for name, _, param in named:
        try:
            check_usable(name, param)
            if param.grad is not None:
                check_gradient(param, name, param.grad.dtype)
        except CanzonaError as error:
            if refused is None:
                raise
            refused[name] = error
    check_in_use(named)


def check_usable(name: str, param: Tensor) -> None:
    """Raise CanzonaError for a parameter that has no values, or that FSDP1 has flattened."""
    if param.is_meta:
        raise CanzonaError(
            "the parameter is on the meta device, which holds no values",
            at=name,
            hint="call model.to_empty(device=...), initialize the weights, then build the optimizer from the "
            "new parameters",
        )
    if is_flattened(param):
        raise UnsupportedLayout(
            "FSDP1 has flattened the parameter, so it is unknown which elements belong to which matrix",
            at=name,
            hint="shard the model with torch.distributed.fsdp.fully_shard (FSDP2), then build the optimizer",
        )


def of_odd_class(name: str, param: Tensor, need: str) -> UnsupportedLayout | None:
    """The error for a parameter that is not a plain tensor, where a plan needs one; None if it is a plain tensor."""
    part = local_part(param)
    if not (held := inner_tensors(part)):
        return None
    return UnsupportedLayout(
        f"the parameter is a {type(part).__name__}, made of {some(held)}, but {need}",
        at=name,
        hint="leave it to an elementwise optimizer such as AdamW under wrap(), which steps it by its class's own "
        "operators, or switch off what converts it to this class before fully_shard, such as torchao's quantize_()",
    )


def check_in_use(named: Named) -> None:
    """Raise if a model has replaced the parameters by DTensors.

    That is so if none of them has a gradient, no module has one of them, and modules have DTensors of all their shapes.
    Looking for modules takes a moment, and happens only on ranks, where no parameter has a gradient at the first step.
    """
    if not named or not distributed():
        return
    if any(param.grad is not None or isinstance(param, DTensor) for _, _, param in named):
        return
    modules = (vars(module).get("_parameters") or {} for module in live(nn.Module))
    held = {id(param): param for own in modules for param in own.values()}
    sharded = {param.shape for param in held.values() if isinstance(param, DTensor)}
    if any(id(param) in held or param.shape not in sharded for _, _, param in named):
        return
    raise CanzonaError(
        "no parameter of the optimizer has a gradient or is still in the model, which now has DTensors of the same "
        "shapes: the model was sharded after the optimizer was built, so steps would train nothing",
        at=some(name for name, _, _ in named),
        hint="call fully_shard(model) or parallelize_module(model) first, then build the optimizer from "
        "model.parameters(), and wrap it",
    )


def flat_shards(named: Named) -> UnsupportedLayout | None:
    """The error for what DeepSpeed puts in the place of a model's parameters; None if there is nothing of it."""
    flat = [name for name, _, param in named if param.ndim == 1]
    modules = (vars(module).get("_parameters") or {} for module in (live(nn.Module) if flat else ()))
    params = (param for own in modules for param in own.values() if param is not None)
    if not any({"_hp_mapping", "ds_id"} & vars(param).keys() for param in params):  # of stages 1 and 2, and of 3
        return None
    return UnsupportedLayout(
        "DeepSpeed has given the optimizer a flat shard of a partition, in which matrices are cut anywhere",
        at=some(flat),
        hint='use ZeRO stage 0 ({"zero_optimization": {"stage": 0}}) and wrap(optimizer, '
        "replicate=torch.distributed.group.WORLD), or DeepSpeed's own Muon",
    )


def notice_data_parallel(owned: Step, params: Sequence[Tensor]) -> None:
    """Warn of ranks that do not know of one another, and rank 0 of parameters under DDP for which `replicate=` lacks.

    Args:
        owned: the step with owner ranks.
    """
    if not distributed():
        if (world := os.environ.get("WORLD_SIZE", "")) not in ("", "1"):
            warnings.warn(
                EveryRankComputes(
                    f"WORLD_SIZE is {world}, but there is no process group, so every rank trains a model of its own. "
                    "To share the work, call torch.distributed.init_process_group() before wrap()."
                ),
                stacklevel=2,
            )
        return
    if dist.get_rank() or not any(t.layout.grid.size == 1 and t.layout.placements == "local" for t in owned.tasks):
        return
    own = {id(param) for param in params}
    if any(id(param) in own for model in live(DistributedDataParallel) for param in model.parameters()):
        warnings.warn(
            EveryRankComputes(
                "The model is wrapped in DistributedDataParallel, and every rank computes all of "
                "the updates. To share the work, call canzona_compile.wrap(optimizer, "
                "replicate=torch.distributed.group.WORLD), or pass the mesh or process group of DDP as replicate=."
            ),
            stacklevel=2,
        )


def live(kind: type[Module]) -> Iterator[Module]:
    """The modules of a kind that are in memory."""
    return (module for module in gc.get_objects() if issubclass(type(module), kind))


def check_disjoint(named: Named) -> None:
    """Raise if parameters overlap in memory."""
    found: list[tuple[int, int, str]] = []
    for name, own in ((name, own) for name, _, param in named for own in made_of(param)):
        size = own.numel() * own.itemsize
        held = size and own.device.type != "meta" and own.untyped_storage().size()
        if held and is_non_overlapping_and_dense_or_false(own):
            found.append((own.data_ptr(), own.data_ptr() + size, name))
    found.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(found):
        if start < end:
            raise UnsupportedOptimizer(
                f"the parameter shares memory with {first}",
                at=second,
                hint="pass only one of the two, or one parameter that contains both",
            )
