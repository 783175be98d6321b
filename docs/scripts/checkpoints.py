"""Save in mid-training and go on, on any number of ranks: torchrun --nproc-per-node 2 docs/scripts/checkpoints.py"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False))
    fully_shard(model, mesh=mesh)
    return model, canzona_compile.wrap(torch.optim.Muon(model.named_parameters(), lr=2e-2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(16, 32)
        nn.functional.mse_loss(model(x), x.roll(1, dims=1)).backward()
        optimizer.step()
        optimizer.zero_grad()


folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(folders)
folder = folders[0]

model, optimizer = build()
train(model, optimizer, range(5))
# --8<-- [start:save]
model_state, optimizer_state = get_state_dict(model, optimizer)
dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
# --8<-- [end:save]
train(model, optimizer, range(5, 10))

resumed, its_optimizer = build()
# --8<-- [start:load]
model_state, optimizer_state = get_state_dict(resumed, its_optimizer)
dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
set_state_dict(resumed, its_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
# --8<-- [end:load]
train(resumed, its_optimizer, range(5, 10))

# --8<-- [start:one]
optimizer.canzona.consolidate(to=0)  # on all ranks; then rank 0 can save alone
if dist.get_rank() == 0:
    torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
# --8<-- [end:one]

for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
    assert torch.equal(one.full_tensor(), other.full_tensor())
if dist.get_rank() == 0:
    print("ten steps, and five and five with a checkpoint between them: equal bits")
dist.destroy_process_group()
