"""A small language model and the training runs that tests of ZeRO-1 compare: DDP with plain optimizers, and zero1."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.layouts import full

VOCABULARY, WIDTH, HIDDEN, LAYERS = 300, 64, 96, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(self.norm(x))))
        return x + out


class Model(nn.Module):
    """Embedding, blocks of two matrices each, and a head."""

    def __init__(self, seed: int = 0, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens % self.embed.num_embeddings
        x = self.blocks(self.embed(tokens))
        loss: Tensor = F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(-1, 1).flatten())
        return loss


def hidden(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of the blocks."""
    return [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    """All other parameters."""
    known = {id(p) for p in hidden(model)}
    return [p for p in model.parameters() if id(p) not in known]


def matrices_alone(model: nn.Module) -> list[nn.Parameter]:
    """All matrices of a model of which nothing else is trained."""
    for param in model.parameters():
        param.requires_grad_(param.ndim == 2)
    return [p for p in model.parameters() if p.requires_grad]


def batch(step: int, rank: int, micro: int = 0) -> Tensor:
    """The tokens that a rank trains on."""
    random = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, 16), generator=random)


MAKERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "muon and adamw": lambda m: [Muon(hidden(m), lr=0.02, weight_decay=0.1), AdamW(others(m), lr=1e-3)],
    "adamw": lambda m: [AdamW(m.parameters(), lr=1e-3)],
    "soap": lambda m: [SOAP(hidden(m), lr=1e-3, every=3), AdamW(others(m), lr=1e-3)],
    "shampoo": lambda m: [Shampoo(hidden(m), lr=1e-3, every=3), AdamW(others(m), lr=1e-3)],
    "muon": lambda m: [Muon(matrices_alone(m), lr=0.02, weight_decay=0.1)],
}

# Captured in a tenth of the time, for tests in which the optimizer does not matter.
CHEAP: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "sgd": lambda m: [SGD(hidden(m), lr=0.1), SGD(others(m), lr=0.1)],
}
ALL_MAKERS = {**MAKERS, **CHEAP}


def same(one: Tensor, two: Tensor) -> bool:
    return bool(torch.equal(one, two)) and one.dtype == two.dtype


def different(model: nn.Module, reference: nn.Module) -> list[str]:
    """The names of the parameters that differ by a bit."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    return [name for (name, one), two in pairs if not same(full(one), two.detach())]
