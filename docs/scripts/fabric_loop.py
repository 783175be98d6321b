"""Lightning Fabric: torchrun --nproc-per-node 2 docs/scripts/fabric_loop.py"""

import argparse
import os
import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import canzona_compile

parser = argparse.ArgumentParser()
parser.add_argument("--output", default=f"{tempfile.gettempdir()}/canzona_fabric")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of step 5")
options = parser.parse_args()


def shard(model: nn.Module, mesh) -> nn.Module:
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


ranks = int(os.environ["WORLD_SIZE"])
strategy = ModelParallelStrategy(shard, data_parallel_size=ranks, tensor_parallel_size=1)
fabric = Fabric(devices=ranks, strategy=strategy)
fabric.launch()
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
model = nn.Sequential(OrderedDict(embedding=nn.Embedding(64, 32), hidden=hidden, head=nn.Linear(32, 64)))

model = fabric.setup_module(model)
optimizer = canzona_compile.muon_adamw(model, lr=1e-2)
prepared = fabric.setup_optimizers(optimizer)
state = {"model": model, "optimizer": prepared, "step": 0}
if options.resume:
    fabric.load(options.output, state)

for step in range(state["step"], 10):
    torch.manual_seed(step * ranks + fabric.global_rank)  # other data on every rank
    tokens = torch.randint(64, (64,), device=fabric.device)
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 64)
    fabric.backward(loss)
    prepared.step()
    prepared.zero_grad()
    fabric.print(f"step {step}: loss {loss.item():.3f}")
    if step == 4:
        fabric.save(options.output, {**state, "step": 5})
dist.destroy_process_group()
