"""ZeRO-1 in place of DDP: torchrun --nproc-per-node 2 docs/scripts/zero1.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import canzona_compile

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU()) for _ in range(3)])
model = nn.Sequential(nn.Embedding(256, 32), hidden, nn.Linear(32, 256))

# --8<-- [start:zero1]
optimizer = canzona_compile.muon_adamw(model, lr=1e-2, zero1=mesh["dp"])  # no DDP(model)
# --8<-- [end:zero1]

torch.manual_seed(dist.get_rank())
for step in range(10):
    tokens = torch.randint(256, (2, 128))
    with optimizer.canzona.no_sync():  # accumulates; nothing is sent
        nn.functional.cross_entropy(model(tokens[0]), (tokens[0] + 1) % 256).div(2).backward()
    loss = nn.functional.cross_entropy(model(tokens[1]), (tokens[1] + 1) % 256)
    loss.div(2).backward()  # gradients are reduced to their owners meanwhile
    optimizer.canzona.clip_grad_norm_(1.0)  # of the whole model
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
