"""State in 8 bits, and in host memory: torchrun --nproc-per-node 2 docs/scripts/stored_state.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 384, bias=False), nn.Linear(384, 128, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        torch.manual_seed(step)  # the same data on every rank: means of gradients are exact
        tokens = torch.randint(64, (16,))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


sharded = build()
fully_shard(sharded, mesh=mesh)
# --8<-- [start:line]
optimizer = canzona_compile.muon_adamw(sharded, lr=3e-3, state="int8")
# --8<-- [end:line]
train(sharded, optimizer)
if dist.get_rank() == 0:
    for row in optimizer.canzona.report().state:
        print(f"{row.leaf}: {row.stored or row.dtype}, {row.bytes} bytes in place of {row.plain_bytes}")

# --8<-- [start:reference]
whole = build()
plain = canzona_compile.unwrap(canzona_compile.muon_adamw(whole, lr=3e-3))
canzona_compile.round_state(plain, "int8")
# --8<-- [end:reference]
train(whole, plain)
equal = all(torch.equal(a.full_tensor(), b) for a, b in zip(sharded.parameters(), whole.parameters(), strict=True))
if dist.get_rank() == 0:
    print("equal to the bit" if equal else "different")
dist.destroy_process_group()
