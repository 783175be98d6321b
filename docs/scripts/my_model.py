"""A model to check: python -m canzona_compile verify docs.scripts.my_model:build --ranks 2 --layout fsdp"""

import torch
from torch import nn


def build() -> tuple[nn.Module, torch.optim.Optimizer]:  # plain: not sharded, not wrapped, on the CPU
    model = nn.Sequential(nn.Linear(24, 33, bias=False), nn.GELU(), nn.Linear(33, 16, bias=False))
    return model, torch.optim.Muon(model.named_parameters(), lr=2e-2)
