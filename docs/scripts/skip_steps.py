"""Leave out steps that would spoil a training: torchrun --nproc-per-node 2 docs/scripts/skip_steps.py"""

import math
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile


# --8<-- [start:outliers]
class Outliers:
    """Finds values that are six standard deviations above the mean of the last 128."""

    def __init__(self, window: int = 128, deviations: float = 6.0) -> None:
        self.known, self.deviations = deque[float](maxlen=window), deviations

    def has(self, value: float) -> bool:
        if not math.isfinite(value):  # skip_nonfinite= finds it, and nothing is to be learned from it
            return False
        known = torch.tensor(self.known)
        odd = len(known) >= 8 and value > float(known.mean() + self.deviations * known.std())
        if not odd:
            self.known.append(value)
        return odd


# --8<-- [end:outliers]

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 256))
fully_shard(model, mesh=mesh)

# --8<-- [start:line]
optimizer = canzona_compile.muon_adamw(model, lr=1e-3, skip_nonfinite=True)
# --8<-- [end:line]

losses, norms = Outliers(), Outliers()
torch.manual_seed(rank)  # other data on every rank
for step in range(20):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    if step == 12 and rank == 1:
        loss = loss * 100  # a bad batch on one rank
    if step == 16 and rank == 1:
        loss = loss / 0.0
    # --8<-- [start:loop]
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    # Equal numbers on all ranks, so equal decisions. Both are asked, so that both go on learning.
    odd = [losses.has(mean.item()), norms.has(norm)]
    if not any(odd):
        optimizer.step()
    optimizer.zero_grad()
    # --8<-- [end:loop]
    if rank == 0:
        count = optimizer.param_groups[0]["skipped_steps"]
        print(
            f"step {step}: loss {mean.item():.2f}, {'left out' if any(odd) else 'stepped'}, {count} not finite so far"
        )
dist.destroy_process_group()
