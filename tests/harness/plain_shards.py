"""Tensor parallelism by hand, as in Megatron: plain parameters that are fragments, and autograd functions.

Beside it: the whole matrices, for a plain optimizer that takes the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Muon, Optimizer
from torch.utils import _pytree as pytree

from examples.optimizers.soap import SOAP
from tests.harness.pairs import params_of, same_bits, unlike
from tests.harness.traps.grammar import toy

WIDTH, HIDDEN = 16, 32  # a fragment of half the hidden dim has the shape of a preconditioner
EVEN, UNEVEN = (16, 16), (13, 19)
Named = Sequence[tuple[str, nn.Parameter]]


class CopyIn(torch.autograd.Function):
    """The identity, whose gradient is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceOut(torch.autograd.Function):
    """The sum over the tensor-parallel ranks, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def values(seed: int = 0) -> dict[str, Tensor]:
    """The whole parameters of two blocks."""
    random = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for i in range(2):
        found[f"blocks.{i}.norm.weight"] = torch.ones(WIDTH)
        found[f"blocks.{i}.up.weight"] = torch.randn(HIDDEN, WIDTH, generator=random) / 4
        found[f"blocks.{i}.up.bias"] = torch.randn(HIDDEN, generator=random) / 4
        found[f"blocks.{i}.down.weight"] = torch.randn(WIDTH, HIDDEN, generator=random) / 4
    return found


def cut_dim(name: str) -> int | None:
    """The dim of a parameter that tensor parallelism cuts."""
    return {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name.split(".", 2)[2])


def own_part(name: str, whole: Tensor, cuts: Sequence[int], rank: int) -> Tensor:
    """What one tensor-parallel rank holds of a tensor shaped like a parameter."""
    dim = cut_dim(name)
    return whole if dim is None else whole.split(list(cuts), dim)[rank]


class ShardedModel(nn.Module):
    """The blocks on one rank of a tensor-parallel group."""

    def __init__(self, mesh: DeviceMesh | None, cuts: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        self.group = None if mesh is None else mesh.get_group()
        rank = 0 if mesh is None else mesh.get_local_rank()
        self.blocks = nn.ModuleList()
        whole = values(seed)
        for i in range(2):
            block = nn.ModuleDict({"norm": nn.Module(), "up": nn.Module(), "down": nn.Module()})
            for layer, kind in (("norm", "weight"), ("up", "weight"), ("up", "bias"), ("down", "weight")):
                name = f"blocks.{i}.{layer}.{kind}"
                own = own_part(name, whole[name], cuts, rank) if mesh is not None else whole[name]
                block[layer].register_parameter(kind, nn.Parameter(own.clone(memory_format=torch.contiguous_format)))
            self.blocks.append(block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            own: Any = block
            y = F.layer_norm(x, (WIDTH,)) * own["norm"].weight
            if self.group is not None:
                y = CopyIn.apply(y, self.group)
            y = F.silu(F.linear(y, own["up"].weight, own["up"].bias))
            y = F.linear(y, own["down"].weight)
            x = x + (y if self.group is None else ReduceOut.apply(y, self.group))
        return x.square().mean()


def mark(model: nn.Module) -> None:
    """Give parameters the attributes that Megatron gives them."""
    for name, param in model.named_parameters():
        own: Any = param
        dim = cut_dim(name)
        own.tensor_model_parallel, own.partition_dim, own.partition_stride = (
            dim is not None,
            -1 if dim is None else dim,
            1,
        )


def layout_by(how: str, mesh: DeviceMesh, model: nn.Module) -> Any:
    """The option `layout=`, said in one of its ways."""
    if how == "attributes":
        mark(model)
        return mesh
    if how == "patterns":
        return {"*.up.*": (mesh, [Shard(0)]), "*.down.weight": (mesh, [Shard(-1)]), "*": None}
    assert how == "function"

    def told(name: str, param: Tensor) -> Any:
        dim = cut_dim(name)
        return None if dim is None else (mesh, [Shard(dim)])

    return told


def matrices(named: Named) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in named if p.ndim == 2]


def vectors(named: Named) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in named if p.ndim < 2]


# No tracer can follow, and one leaf is not laid out like the parameter.
Weighing = toy("weighing")("""
    average = state.setdefault("average", torch.zeros_like(param))
    left = state.setdefault("sides", [torch.zeros(len(param), len(param))])[0]
    average.mul_(0.9).add_(grad)
    left.mul_(0.9).add_(grad @ grad.mT)
    if left.trace().item() > 0:
        param.add_(left @ average, alpha=-group["lr"])
""")


# Steps by the change of the gradient, of which its state holds the last one itself.
HoldingGradients = toy("holding-gradients")("""
    change = grad - state["last"] if state else grad
    param.add_(change, alpha=-group["lr"])
    state["last"] = grad
""")


# Elementwise, at a rate that an attribute of the parameter says, as in modded-nanogpt.
Rated = toy("rated")("""
    average = state.setdefault("average", torch.zeros_like(param))
    average.mul_(0.9).add_(grad)
    param.add_(average, alpha=-group["lr"] * getattr(param, "lr_mul", 1.0))
""")


def rated(named: Named) -> Named:
    """Give parameters a rate each."""
    for i, (_, param) in enumerate(named):
        own: Any = param
        own.lr_mul = 1.0 + i
    return named


MAKERS: dict[str, Callable[[Named], list[Optimizer]]] = {
    "muon": lambda m: [Muon(matrices(m), lr=0.02, weight_decay=0.1), AdamW(vectors(m), lr=1e-2)],
    "soap": lambda m: [SOAP(matrices(m), lr=1e-2, every=3), AdamW(vectors(m), lr=1e-2)],
    "interpreted": lambda m: [Weighing(matrices(m), lr=1e-2), AdamW(vectors(m), lr=1e-2)],
    "adamw": lambda m: [AdamW(m, lr=1e-2)],
    "holds gradients": lambda m: [HoldingGradients(m, lr=1e-2)],
    "rates in attributes": lambda m: [Rated(rated(m), lr=1e-2)],
}


def gathered(values: dict[str, Tensor | None], group: Any) -> dict[str, Tensor | None]:
    """The whole tensors of which each rank has these fragments. This is a collective."""
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, values, group=group)
    found: dict[str, Tensor | None] = {}
    for name in values:
        parts, dim = [own[name] for own in everybody], cut_dim(name)
        found[name] = parts[0] if dim is None or parts[0] is None else torch.cat(parts, dim)
    return found


def different_from_whole(
    named: Named, optimizers: Sequence[Optimizer], whole: Sequence[Optimizer], cuts: Sequence[int], rank: int
) -> list[str]:
    """What of this rank's fragments, and of the state of plain optimizers, is not that of the whole matrices."""
    values = {
        name: param
        for optimizer in whole
        for name, param in zip(optimizer.param_groups[0]["param_names"], params_of(optimizer), strict=True)
    }
    found = [
        n for n, p in named if n in values and not same_bits(p.detach(), own_part(n, values[n].detach(), cuts, rank))
    ]
    for one, two in zip(optimizers, whole, strict=True):
        mine, theirs = one.state_dict()["state"], two.state_dict()["state"]
        for i, name in enumerate(two.param_groups[0]["param_names"]):

            def part(value: Any, name: str = name) -> Any:
                like = isinstance(value, Tensor) and value.shape == values[name].shape
                return own_part(name, value, cuts, rank) if like else value

            found += [f"a DTensor in {name}" for leaf in pytree.tree_leaves(mine[i]) if isinstance(leaf, DTensor)]
            found += unlike(f"state {name}", mine[i], pytree.tree_map(part, theirs[i]))
    return found
