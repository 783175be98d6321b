"""What is compared: the same optimizer, distributed in different ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.ir.options import StrategyOption
from latency_optimizers import OPTIMIZERS

OURS = "ours"
REPLICATED = "replicated"
STOCK = "stock"
LOCAL = "local"


@dataclass(slots=True)
class Variant:
    """One optimizer with its own copy of the parameters.

    Attributes:
        optimizer: None on ranks that stay out.
        every: it takes part in every n-th round; slow ones in fewer.
        failure: why it does not run at all.
    """

    name: str
    about: str
    params: list[Parameter]
    optimizer: Optimizer | None
    every: int = 1
    failure: str = ""

    def set_gradients(self, full: Sequence[Tensor], sharded: Sequence[Tensor]) -> None:
        for param, whole, part in zip(self.params, full, sharded, strict=False):
            param.grad = part if isinstance(param, DTensor) else whole

    def step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()


def shard(full: Iterable[Tensor], mesh: DeviceMesh) -> list[DTensor]:
    """Lay whole tensors, equal on all ranks, out as `fully_shard` does; no communication."""
    return [distribute_tensor(t.clone(), mesh, [Shard(0)], src_data_rank=None) for t in full]


def make_variants(full: Sequence[Tensor], mesh: DeviceMesh, strategy: StrategyOption, optimizer: str) -> list[Variant]:
    """All variants, from equal whole parameters."""
    make = OPTIMIZERS[optimizer]

    def sharded() -> list[Parameter]:
        return [Parameter(t) for t in shard(full, mesh)]

    def wrapped(params: list[Parameter], how: StrategyOption) -> Optimizer:
        return canzona_compile.wrap(make(params), strategy=how)

    ours, replicated, stock = sharded(), sharded(), sharded()
    local = [Parameter(t.clone()) for t in full] if dist.get_rank() == 0 else []
    return [
        Variant(OURS, f"wrap({optimizer}, strategy={strategy!r})", ours, wrapped(ours, strategy)),
        Variant(
            REPLICATED,
            f"wrap({optimizer}, strategy='replicated')",
            replicated,
            wrapped(replicated, "replicated"),
        ),
        Variant(STOCK, f"{optimizer} itself on DTensors", stock, make(stock)),
        Variant(
            LOCAL,
            f"{optimizer} on whole tensors, one rank",
            local,
            make(local) if local else None,
        ),
    ]


def same_bits(variant: Variant, local: Variant) -> bool:
    """Are a variant's parameters equal to those of the plain optimizer on one rank? A collective."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in variant.params]
    equal = all(torch.equal(a, b) for a, b in zip(whole, local.params, strict=False))
    verdict = torch.tensor(int(equal))
    dist.broadcast(verdict, 0)  # the rank that has the local ones
    return bool(verdict)
