"""Tensor parallelism by hand, without DTensors: torchrun --nproc-per-node 2 docs/scripts/plain_fragments.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import canzona_compile


class Sum(torch.autograd.Function):
    """Adds what the ranks have; each of them gets the whole gradient."""

    @staticmethod
    def forward(context, part: Tensor) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(context, gradient: Tensor) -> Tensor:
        return gradient


class FeedForward(nn.Module):
    """Its parameters are plain tensors: this rank's rows of `up` [96, 32] and columns of `down` [32, 96]."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        up, down = torch.randn(96, 32) / 32**0.5, torch.randn(32, 96) / 96**0.5
        self.up = nn.Parameter(up.chunk(ranks, dim=0)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, dim=1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + Sum.apply(nn.functional.gelu(x @ self.up.T) @ self.down.T)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)  # all ranks see the same weights and the same data
model = FeedForward(mesh.get_local_rank(), mesh.size())

# --8<-- [start:wrap]
optimizer = canzona_compile.wrap(
    torch.optim.Muon(model.named_parameters(), lr=2e-2),
    layout={"*up": (mesh["tp"], [Shard(0)]), "*down": (mesh["tp"], [Shard(1)])},
)
# --8<-- [end:wrap]

for step in range(10):
    x = torch.randn(16, 32)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
