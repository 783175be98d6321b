"""A distributed optimizer to check: python -m canzona_compile verify docs.scripts.their_optimizer:build --as-is"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def build(mesh=None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Without a mesh the plain optimizer of the whole model, on each rank of a mesh the distributed one."""
    model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.Muon(model.parameters(), lr=2e-2)  # your distributed class here, if there is a mesh
