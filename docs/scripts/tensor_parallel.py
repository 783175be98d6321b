"""FSDP2 on top of tensor parallelism: torchrun --nproc-per-node 4 docs/scripts/tensor_parallel.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import canzona_compile


class FeedForward(nn.Module):
    """Two matrices: the first is cut by rows, the second by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 96, bias=False)
        self.down = nn.Linear(96, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(FeedForward(), FeedForward())
for block in model:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])

optimizer = canzona_compile.wrap(torch.optim.Muon(model.named_parameters(), lr=2e-2))

torch.manual_seed(mesh["dp"].get_local_rank())  # ranks of one tensor-parallel group see the same data
for step in range(10):
    x = torch.randn(16, 32)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
