"""Lightning Fabric: torchrun --nproc-per-node 2 docs/scripts/fabric_loop.py"""

import os

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import canzona_compile


def parallelize(model: nn.Module, mesh) -> nn.Module:
    for layer in model.children():
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


ranks = int(os.environ["WORLD_SIZE"])
strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
fabric.launch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False))

model = fabric.setup_module(model)
optimizer = canzona_compile.wrap(torch.optim.Muon(model.parameters(), lr=2e-2))
prepared = fabric.setup_optimizers(optimizer)

torch.manual_seed(fabric.global_rank)
for step in range(10):
    x = torch.randn(16, 32)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    fabric.backward(loss)
    prepared.step()
    prepared.zero_grad()
    fabric.print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
