"""DDP whose ranks share the optimizer's work: torchrun --nproc-per-node 2 docs/scripts/ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import canzona_compile

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU()) for _ in range(3)])
model = nn.Sequential(nn.Embedding(256, 32), hidden, nn.Linear(32, 256))
forward = DistributedDataParallel(model)

optimizer = canzona_compile.muon_adamw(model, lr=1e-2, replicate=mesh)  # or a process group

torch.manual_seed(dist.get_rank())
for step in range(10):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(forward(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
