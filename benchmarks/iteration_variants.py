"""What is compared: the same model and optimizers under several kinds of data parallelism."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from canzona_compile import hidden_matrices

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from lm_model import Decoder

PLAIN, REPLICATE, REDUNDANCY, FSDP, STEP, FORWARD = (
    "ddp + muon",
    "ddp + wrap(replicate)",
    "ddp + ZeroRedundancyOptimizer",
    "fsdp2 + wrap",
    "zero1, gather=step",
    "zero1, gather=forward",
)
PHASES = ("forward", "backward", "step")


@dataclass(slots=True)
class Variant:
    """A model and its optimizers.

    Attributes:
        name: of the variant.
        forward: what to call for the loss.
        model: whose parameters are trained.
        optimizers: of the hidden matrices, and of all else.
        finish: waits until all parameters are whole, if they are not after a step.
        buffers: bytes of gradients beside `param.grad`.
    """

    name: str
    forward: nn.Module
    model: nn.Module
    optimizers: Sequence[Optimizer]
    finish: Callable[[], None]
    buffers: Callable[[], int]

    @contextlib.contextmanager
    def gradient_peak(self, found: list[int]) -> Iterator[None]:
        """Append to `found`, inside this context, the bytes of gradients whenever one is complete."""
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _: found.append(self.gradient_bytes()))
            for p in self.model.parameters()
        ]
        try:
            yield
            found.append(self.gradient_bytes())
        finally:
            for hook in hooks:
                hook.remove()

    def gradient_bytes(self) -> int:
        """Bytes of gradients that this rank holds now."""
        return sum(bytes_of(p.grad) for p in self.model.parameters() if p.grad is not None) + self.buffers()

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""
        states = [s for optimizer in self.optimizers for s in inner(optimizer).state.values()]
        return sum(bytes_of(v) for state in states for v in state.values() if isinstance(v, Tensor))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        self.model.zero_grad()


def inner(optimizer: Any) -> Optimizer:
    """The optimizer that holds the state on this rank."""
    found: Optimizer = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return found


def bytes_of(tensor: Any) -> int:
    """Bytes that this rank holds of a tensor."""
    if hasattr(tensor, "parts"):
        return sum(part.numel() * part.element_size() for part in tensor.parts)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def muon(model: Decoder) -> Muon:
    return Muon(hidden_matrices(model).matrices, lr=2e-3, adjust_lr_fn="match_rms_adamw")


def adamw(model: Decoder) -> AdamW:
    return AdamW(hidden_matrices(model).others, lr=2e-3)


def make_variants(model: Decoder, mesh: DeviceMesh) -> list[Variant]:
    """All variants, from equal parameters."""
    makers: dict[str, Callable[[Decoder, DeviceMesh], Variant]] = {
        PLAIN: plain,
        REPLICATE: replicated,
        REDUNDANCY: redundancy,
        FSDP: fsdp,
        STEP: lambda own, _: zero1(own, mesh, "step"),
        FORWARD: lambda own, _: zero1(own, mesh, "forward"),
    }
    found = []
    for name, make in makers.items():
        variant = make(copy.deepcopy(model), mesh)
        variant.name = name
        found.append(variant)
    return found


def ddp(model: Decoder, optimizers: Sequence[Optimizer]) -> Variant:
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return Variant("", DistributedDataParallel(model), model, optimizers, lambda: None, lambda: whole)


def plain(model: Decoder, mesh: DeviceMesh) -> Variant:
    return ddp(model, [muon(model), adamw(model)])


def replicated(model: Decoder, mesh: DeviceMesh) -> Variant:
    return ddp(model, [canzona_compile.wrap(muon(model), replicate=mesh), adamw(model)])


def redundancy(model: Decoder, mesh: DeviceMesh) -> Variant:
    choice = hidden_matrices(model)
    hidden, rest = ([p for _, p in named] for named in (choice.matrices, choice.others))
    options: dict[str, Any] = {"lr": 2e-3, "adjust_lr_fn": "match_rms_adamw"}
    shared = ZeroRedundancyOptimizer(hidden, optimizer_class=Muon, **options)
    others = ZeroRedundancyOptimizer(rest, optimizer_class=AdamW, lr=2e-3)
    return ddp(model, [shared, others])


def fsdp(model: Decoder, mesh: DeviceMesh) -> Variant:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [canzona_compile.wrap(muon(model)), adamw(model)]
    return Variant("", model, model, optimizers, lambda: None, lambda: 0)


def zero1(model: Decoder, mesh: DeviceMesh, gather: str) -> Variant:
    both = canzona_compile.zero1(model, [muon(model), adamw(model)], mesh=mesh, gather=gather)  # type: ignore[arg-type]
    engine = both[0].canzona.zero1  # type: ignore[attr-defined]
    return Variant("", model, model, both, engine.synchronize, engine.reduction.held_bytes)


def same_bits(variant: Variant, reference: Variant) -> bool:
    """Whether a variant's parameters equal those of the reference; a collective."""
    variant.finish()
    equal = True
    for one, two in zip(variant.model.parameters(), reference.model.parameters(), strict=True):
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        equal &= torch.equal(whole, two)
    verdict = torch.tensor(int(equal))
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict)
