"""Stacks of experts under expert parallelism: torchrun --nproc-per-node 2 docs/scripts/experts.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import canzona_compile


class Experts(nn.Module):
    """Eight experts; a rank has some of them, and sees the tokens of these."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(8, 32, 32) / 32**0.5, mesh, [Shard(0)]))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens @ self.weight.to_local().mT


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
torch.manual_seed(0)
model = Experts(mesh)
# --8<-- [start:line]
optimizer = canzona_compile.muon_adamw(model, lr=3e-2)
# --8<-- [end:line]

for step in range(10):
    tokens = torch.randn(8 // mesh.size(), 16, 32)
    loss = nn.functional.mse_loss(model(tokens), tokens.roll(1, dims=2))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(canzona_compile.explain(optimizer))  # compiled, nothing is sent
dist.destroy_process_group()
