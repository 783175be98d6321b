"""A small decoder in the manner of Qwen3: what Muon's hidden matrices look like in a real model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder. The default ones let four ranks share two cores."""

    vocabulary: int = 256
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_dim: int = 704
    context: int = 128
    rope_base: float = 10_000.0
    tied: bool = True
    num_experts: int = 0  # in the place of each feed-forward; each is a quarter as wide, and a token sees two of them


class Attention(nn.Module):
    """Grouped-query attention: norms on every query and key head, then rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # -1 heads: under tensor parallelism a rank has some of them only.
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU: one projection gates the other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Experts(nn.Module):
    """SwiGLU by the two experts that a router gives the most weight; matrices of all experts are stacked.

    For as few experts as here, every expert computes every token, and most results count nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        stack = config.num_experts, config.hidden_dim // 4, config.dim
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(stack))
        self.up_proj = nn.Parameter(torch.empty(stack))
        self.down_proj = nn.Parameter(torch.empty(stack).mT.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        shares = x.new_zeros(*x.shape[:2], len(self.gate_proj)).scatter(-1, chosen, weights)
        hidden = F.silu(torch.einsum("bsd,ehd->bseh", x, self.gate_proj))
        hidden = hidden * torch.einsum("bsd,ehd->bseh", x, self.up_proj) * shares.unsqueeze(-1)
        return torch.einsum("bseh,edh->bsd", hidden, self.down_proj)


class Block(nn.Module):
    """Attention and feed-forward, each normalized before and added after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.feed_forward = Experts(config) if config.num_experts else FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """Bytes in, the loss of predicting each next byte out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocabulary, bias=False)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initialize(module: nn.Module) -> None:
    """Draw every matrix from the same narrow normal distribution."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, Experts):
        for stack in (module.gate_proj, module.up_proj, module.down_proj):
            nn.init.normal_(stack, std=0.02)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Tabulate cosine and sine of each position's angles, for both halves of a head."""
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(config.context), config.rope_base**-exponents)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of a head's dims by the angle of its position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
