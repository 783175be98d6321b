"""The same optimizers without any compiler, on whole parameters, in one process: the judge."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_parallel import whole

NamedParameters = list[tuple[str, nn.Parameter]]


class PlainOptimizer:
    """Steps next to the sharded chain, on rank 0 alone, with the gathered gradients.

    Equal weights after every step mean that placement, grouping and communication changed nothing:
    not the last bit of any element, on any rank.

    Args:
        sharded: the chain that trains.
        matrices: what its first optimizer updates.
        others: what its second optimizer updates.
        build: makes the plain chain of copies of both.
    """

    def __init__(
        self,
        sharded: Optimizer,
        matrices: NamedParameters,
        others: NamedParameters,
        build: Callable[[NamedParameters, NamedParameters], Optimizer],
    ) -> None:
        self.sharded = sharded
        self.num_matrices, self.num_others = len(matrices), len(others)
        self.trained = [*matrices, *others]
        self.copies = [(name, nn.Parameter(whole(param.detach()).clone())) for name, param in self.trained]
        halves = self.copies[: len(matrices)], self.copies[len(matrices) :]
        self.plain = build(*halves) if dist.get_rank() == 0 else None

    def step(self) -> None:
        """Gather the gradients (all ranks) and step (rank 0). Call before the sharded step."""
        for (_, copy), (_, param) in zip(self.copies, self.trained, strict=True):
            assert param.grad is not None
            copy.grad = whole(param.grad).clone()
        if self.plain is None:
            return
        # The schedule writes the learning rate of the sharded optimizer only.
        groups = zip(self.plain.param_groups, self.sharded.param_groups, strict=True)
        for mine, theirs in groups:
            mine["lr"] = theirs["lr"]
        self.plain.step()

    def differing(self) -> list[str]:
        """Name the parameters in which any rank differs from rank 0's plain step in any bit.

        Call after the sharded step, on all ranks. Rank 0 sends its result to all, and each compares
        it with what it gathered itself: replicas that drifted apart would show as well.
        """
        differs = torch.zeros(len(self.trained), dtype=torch.int32)
        for index, ((_, copy), (_, param)) in enumerate(zip(self.copies, self.trained, strict=True)):
            dist.broadcast(copy.detach(), src=0)
            differs[index] = not same_bits(copy.detach(), whole(param.detach()))
        dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        return [name for (name, _), d in zip(self.trained, differs.tolist(), strict=True) if d]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Compare bit patterns: a NaN equals itself here, and -0 is not +0."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
