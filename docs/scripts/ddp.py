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
model = nn.Sequential(nn.Linear(32, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False))
forward = DistributedDataParallel(model)

optimizer = torch.optim.Muon(model.named_parameters(), lr=2e-2)
optimizer = canzona_compile.wrap(optimizer, replicate=mesh)  # or a process group

torch.manual_seed(dist.get_rank())
for step in range(10):
    x = torch.randn(16, 32)
    loss = nn.functional.mse_loss(forward(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
