"""`muon_adamw`: one optimizer for a whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Muon, Optimizer

from canzona_compile.api.chain import Chain, chain
from canzona_compile.api.choice import hidden_matrices
from canzona_compile.api.wrap import wrap
from canzona_compile.api.zero1 import zero1 as under_zero1
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.options import StepOptions, WrapOptions

OPTIONS = WrapOptions.__optional_keys__ | {"model"}
OPTIONS_OF_ZERO1 = StepOptions.__optional_keys__ | {"bucket_bytes", "reduce_dtype", "gather"}


def muon_adamw(
    model: nn.Module,
    lr: float | Tensor = 3e-4,
    *,
    weight_decay: float = 0.1,
    matrices: str | Sequence[str] = (),
    others: str | Sequence[str] = (),
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    zero1: DeviceMesh | ProcessGroup | None = None,
    **options: Any,
) -> Chain:
    """Build one wrapped optimizer for a whole model: Muon for hidden matrices, AdamW for all other parameters.

    This is `hidden_matrices`, `chain` and `wrap` in one call. Muon's updates are scaled to the size of AdamW's
    (`adjust_lr_fn="match_rms_adamw"`: by 0.2 times the root of the larger dim, from "Muon is Scalable for LLM
    Training", arXiv 2502.16982), so a learning rate and a weight decay that were tuned for AdamW serve both.

    Args:
        model: the model as it is trained: whole, or sharded by `fully_shard` or `parallelize_module`.
        lr: the learning rate of both optimizers.
        weight_decay: that of both.
        matrices: patterns of names that Muon trains, whatever the rules of `hidden_matrices` say.
        others: patterns of names that AdamW trains.
        muon: further arguments of `torch.optim.Muon`, such as {"momentum": 0.9}. They win over `lr` and `weight_decay`.
        adamw: further arguments of `torch.optim.AdamW`, such as {"betas": (0.9, 0.95)}. They win likewise.
        zero1: the data-parallel ranks, for ZeRO-1 in place of DDP; see `canzona_compile.zero1`.
        options: those of `wrap`, such as `replicate=` under DDP; with `zero1=`, those of `canzona_compile.zero1`.

    Returns:
        The wrapped chain: one `torch.optim.Optimizer` with one `.canzona`. `chain.optimizers` are Muon and AdamW.

    Raises:
        CanzonaError: the model has no hidden matrix, a pattern matches no parameter or one that is not a matrix, or
            `wrap` or `zero1` refuses the call.
        TypeError: there is no such option.
    """
    if unknown := [name for name in options if name not in (OPTIONS if zero1 is None else OPTIONS_OF_ZERO1)]:
        advice = 'Pass arguments of one optimizer as adamw={"betas": (0.9, 0.95)} or muon={"momentum": 0.9}'
        if unknown[0] in OPTIONS_OF_ZERO1:
            advice = "It is an option of zero1: pass zero1= as well"
        raise TypeError(f"muon_adamw() got an unexpected keyword argument {unknown[0]!r}. {advice}")
    choice = hidden_matrices(model, matrices, others)
    if not choice.matrices:
        raise CanzonaError(
            "the model has no hidden matrix for Muon to train",
            at="muon_adamw(model)",
            hint="print(canzona_compile.hidden_matrices(model)) shows why; pass matrices= to choose matrices by name, "
            "or use torch.optim.AdamW for this model (a pipeline stage may have no hidden matrix)",
        )
    for name, param in choice.matrices:
        if param.ndim != 2:
            raise CanzonaError(
                f"torch.optim.Muon takes 2-D matrices, but this parameter has {param.ndim} dims",
                at=name,
                hint="narrow the patterns of matrices= to leave it to AdamW",
            )
    made = plain_muon_adamw(choice.matrices, choice.others, lr, weight_decay, muon, adamw)
    return wrap(made, **options) if zero1 is None else under_zero1(model, made, mesh=zero1, **options)


def plain_muon_adamw(
    matrices: Sequence[Any],
    others: Sequence[Any],
    lr: float | Tensor = 3e-4,
    weight_decay: float = 0.1,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> Chain:
    """Make the chain that `muon_adamw` wraps."""
    common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    parts: list[Optimizer] = [Muon(list(matrices), **{**common, "adjust_lr_fn": "match_rms_adamw", **(muon or {})})]
    if others:
        parts.append(AdamW(list(others), **{**common, **(adamw or {})}))
    return chain(*parts)
