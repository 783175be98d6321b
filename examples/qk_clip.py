"""QK-Clip for sharded models, outside of the optimizer: after a step, heads with too large attention logits shrink.

MuonClip (Kimi K2, arXiv 2507.20534, section 2.1) scales the query and key weights of a head by the square root of
threshold / largest logit. An optimizer that does so in `step()` writes weights of a module that it holds, and no
wrapper can give these to owners. As a hook after the step it needs one all-reduce of a number per head, and scales
fragments in place:

    clip = QkClip(threshold=100.0)
    for block in model.blocks:
        clip.watch(block.attention.q_proj, block.attention.k_proj, head_dim=64)
    optimizer.register_step_post_hook(clip)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(slots=True)
class Watched:
    """The two projections of one attention layer.

    Attributes:
        query, key: `nn.Linear`, with the rows of each head beside one another. With grouped queries, `key` has fewer.
        head_dim: rows of a head.
        outputs: what the projections gave in the forward pass that is under way.
        largest: the largest absolute logit of each query head since the last step, [query heads]; None before the
            first forward pass.
    """

    query: nn.Linear
    key: nn.Linear
    head_dim: int
    outputs: dict[str, Tensor] = field(default_factory=dict)
    largest: Tensor | None = None


class QkClip:
    """Scales query and key weights after a step so that logits come down to a threshold.

    Args:
        threshold: the largest logit that is left alone.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.layers: list[Watched] = []

    def watch(self, query: nn.Linear, key: nn.Linear, head_dim: int) -> None:
        """Measure the logits of a layer in every forward pass that trains. Rotary positions do not change their norm.

        Args:
            query, key: the projections, before or after they are sharded.
            head_dim: the size of a head.
        """
        layer = Watched(query, key, head_dim)
        self.layers.append(layer)
        for name, module in (("query", query), ("key", key)):
            module.register_forward_hook(lambda _m, _i, out, name=name: self._seen(layer, name, out))

    @torch.no_grad()
    def _seen(self, layer: Watched, name: str, out: Tensor) -> None:
        layer.outputs[name] = out.detach()
        if len(layer.outputs) < 2:
            return
        query, key = (heads(layer.outputs.pop(n), layer.head_dim) for n in ("query", "key"))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = (query @ key.mT).abs().amax(dim=(0, 2, 3)) / layer.head_dim**0.5
        layer.largest = logits if layer.largest is None else torch.maximum(layer.largest, logits)

    @torch.no_grad()
    def __call__(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Clip. With a default process group this is a collective of all ranks."""
        seen = [layer for layer in self.layers if layer.largest is not None]
        if not seen:
            return
        logits = [layer.largest for layer in seen if layer.largest is not None]
        largest = torch.cat(logits)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX)  # every rank saw other tokens
        factors = (self.threshold / largest).clamp(max=1.0)
        for layer, own in zip(seen, factors.split(list(map(len, logits))), strict=True):
            layer.largest = None
            shared = layer.key.weight.shape[0] // layer.head_dim  # key heads
            of_key = own.view(shared, -1).amin(dim=1).sqrt()  # the strictest query head of those that share a key head
            scale_rows(layer.key.weight, of_key.repeat_interleave(layer.head_dim))
            of_query = own / of_key.repeat_interleave(len(own) // shared)
            scale_rows(layer.query.weight, of_query.repeat_interleave(layer.head_dim))


def heads(out: Tensor, head_dim: int) -> Tensor:
    """Split the output of a projection, [batch, tokens, heads * head_dim], into [batch, heads, tokens, head_dim]."""
    return out.view(*out.shape[:2], -1, head_dim).transpose(1, 2)


def scale_rows(weight: Tensor, factors: Tensor) -> None:
    """Scale the rows of a weight in place. Every rank scales its own fragment; nothing is communicated."""
    column = factors.to(weight.dtype)[:, None]
    if isinstance(weight, DTensor):
        whole = column.expand(weight.shape).contiguous()
        column = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.mul_(column)
