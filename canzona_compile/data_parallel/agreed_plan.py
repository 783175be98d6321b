"""The plan of a model under ZeRO-1, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from canzona_compile.compat.telling import SOON, shown
from canzona_compile.data_parallel.model_plan import ModelPlan, plan_model
from canzona_compile.data_parallel.session import OwnerSession
from canzona_compile.errors import CanzonaError
from canzona_compile.runtime.store_agreement import StoreAgreement


def agreement_on_plans(shard: ProcessGroup | None, ranks: Sequence[int], device: torch.device) -> StoreAgreement | None:
    """Make what ranks compare their plans by; None if this rank plans alone."""
    return None if shard is None else StoreAgreement(sorted(ranks), shard, device, "zero1()")


def agreed_plan(
    sessions: Sequence[OwnerSession],
    params: Iterable[str],
    shard: ProcessGroup | None,
    ranks: Sequence[int],
    bucket_bytes: int,
    agreement: StoreAgreement | None,
) -> ModelPlan:
    """Plan for all optimizers of a model, and see that all ranks made the same plan.

    Raises:
        CanzonaError: this rank cannot plan, or another one.
    """
    error: CanzonaError | None = None
    optimizers, options = [s.optimizer for s in sessions], [s.options for s in sessions]
    order = {name: i for i, name in enumerate(params)}
    try:
        with shown("canzona, zero1", patience=SOON, quiet=own_rank() != 0):
            found = plan_model(
                optimizers, [s.capture for s in sessions], options, order, shard, ranks, own_rank(), bucket_bytes
            )
    except CanzonaError as problem:
        error = problem
    if agreement is not None:
        agreement.agree("" if error is not None else found.text, error)
    elif error is not None:
        raise error
    return found


def own_rank() -> int:
    """The global rank of this process; 0 without a default process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
