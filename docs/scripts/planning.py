"""Plan a step on ranks that are not there, and run that plan: torchrun --nproc-per-node 2 docs/scripts/planning.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])


# --8<-- [start:plan]
with torch.device("meta"):  # shapes are enough
    model = build()
optimizer = torch.optim.Muon(model.named_parameters(), lr=2e-2)
plan = canzona_compile.plan(model, mesh={"fsdp": 2}, optimizer=optimizer, hardware="cpu")
# --8<-- [end:plan]

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print(plan)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = build()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Muon(model.named_parameters(), lr=2e-2)

# --8<-- [start:follow]
optimizer = canzona_compile.wrap(optimizer, plan=plan.file)  # or "plan.json"; runs it, or says why it cannot
# --8<-- [end:follow]

model(torch.randn(16, 64)).square().mean().backward()
optimizer.step()
# --8<-- [start:same]
assert optimizer.canzona.plan().fingerprint == plan.fingerprint
# --8<-- [end:same]
dist.destroy_process_group()
