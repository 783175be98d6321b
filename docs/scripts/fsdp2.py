"""A whole model on FSDP2, one optimizer: torchrun --nproc-per-node 2 docs/scripts/fsdp2.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)  # the same weights on every rank
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(4)])
model = nn.Sequential(nn.Embedding(256, 64), hidden, nn.Linear(64, 256))
for layer in hidden:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

optimizer = canzona_compile.muon_adamw(model, lr=1e-2)  # larger than usual, because it trains for 20 steps

torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(20):
    # --8<-- [start:measure]
    if step == 10:
        optimizer.canzona.measure(steps=5)
    # --8<-- [end:measure]
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(optimizer.canzona.report())
dist.destroy_process_group()
