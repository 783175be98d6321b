"""What is wrong with parameters and their gradients before a plan is made, and what users forget to say of them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from canzona_compile.compat.torch_private import is_flattened
from canzona_compile.errors import CanzonaError, EveryRankComputes, UnsupportedLayout, some
from canzona_compile.ir.step import Step
from canzona_compile.session.gradient_checks import check_gradient

Module = TypeVar("Module", bound=nn.Module)
Named = Sequence[tuple[str, int, Tensor]]  # name, index of the parameter group, parameter


def check_params(named: Named, refused: dict[str, CanzonaError] | None = None) -> None:
    """Refuse parameters whose steps would train nothing, that are no matrices any more, or whose gradients do not fit.

    Args:
        named: the parameters of the optimizer.
        refused: gets the errors of single parameters, by name, and nothing is raised for them.

    Raises:
        CanzonaError: parameters have no values, are flattened, or were replaced in the model.
        InvalidGradient: a gradient is none that a step can take.
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
            hint="call model.to_empty(device=...), initialize the weights, and make the optimizer from the parameters "
            "that the model has then",
        )
    if is_flattened(param):
        raise UnsupportedLayout(
            "FSDP1 has flattened the parameter, so a rank no longer knows which matrix its elements are of",
            at=name,
            hint="shard the model by torch.distributed.fsdp.fully_shard (FSDP2), and make the optimizer after it",
        )


def check_in_use(named: Named) -> None:
    """Raise if a model has replaced the parameters by DTensors.

    That is so if none of them has a gradient, no module has one of them, and modules have DTensors of all their shapes.
    Looking for modules takes a moment, and happens only where no parameter has a gradient at the first step.

    Args:
        named: the parameters of the optimizer.

    Raises:
        CanzonaError: the parameters were replaced by DTensors.
    """
    if not named or any(param.grad is not None or isinstance(param, DTensor) for _, _, param in named):
        return
    modules = (vars(module).get("_parameters") or {} for module in live(nn.Module))
    held = {id(param): param for own in modules for param in own.values()}
    sharded = {param.shape for param in held.values() if isinstance(param, DTensor)}
    if any(id(param) in held or param.shape not in sharded for _, _, param in named):
        return
    raise CanzonaError(
        "no parameter has a gradient, and no module has any of them, while modules have DTensors of their shapes: the "
        "model was sharded after its optimizer was made, so steps would train nothing",
        at=some(name for name, _, _ in named),
        hint="call fully_shard(model) or parallelize_module(model) first, then make the optimizer from "
        "model.parameters(), and wrap it",
    )


def notice_data_parallel(owned: Step, params: Sequence[Tensor]) -> None:
    """Warn, on rank 0, of parameters under DDP that each rank would update by itself for want of `replicate=`.

    Args:
        owned: the step with owner ranks.
        params: the parameters of the optimizer.
    """
    if dist.get_rank() or not any(t.layout.grid.size == 1 and t.layout.placements == "local" for t in owned.tasks):
        return
    own = {id(param) for param in params}
    if any(id(param) in own for model in live(DistributedDataParallel) for param in model.parameters()):
        warnings.warn(
            EveryRankComputes(
                "The parameters are those of a model under DistributedDataParallel, and every rank computes all of "
                "their updates. To share the work: canzona_compile.wrap(optimizer, "
                "replicate=torch.distributed.group.WORLD), or the mesh or process group that DDP was given."
            ),
            stacklevel=2,
        )


def live(kind: type[Module]) -> Iterator[Module]:
    """The modules of a kind that are in memory."""
    return (module for module in gc.get_objects() if issubclass(type(module), kind))
