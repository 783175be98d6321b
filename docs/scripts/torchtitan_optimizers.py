"""torchtitan's container of optimizers: torchrun --nproc-per-node 2 docs/scripts/torchtitan_optimizers.py"""

import argparse
import tempfile
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import OptimizersContainer

import canzona_compile

parser = argparse.ArgumentParser()
parser.add_argument("--output", default=f"{tempfile.gettempdir()}/canzona_torchtitan")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of step 5")
options = parser.parse_args()


class MuonAdamW(OptimizersContainer):
    """One optimizer for each part of a model. Set its Config as `optimizer` in a `Trainer.Config`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        lr: float = 3e-4

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [canzona_compile.muon_adamw(part, lr=config.lr) for part in model_parts]
        self._post_init([param for part in model_parts for param in part.parameters() if param.requires_grad])


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
model = nn.Sequential(OrderedDict(embedding=nn.Embedding(64, 32), hidden=hidden, head=nn.Linear(32, 64)))
for part in [*hidden, model]:
    fully_shard(part, mesh=mesh)
optimizers = MuonAdamW(MuonAdamW.Config(lr=1e-2), model_parts=[model])
if options.resume:
    saved = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
    dcp.load(saved, checkpoint_id=options.output)
    optimizers.load_state_dict(saved["optimizer"])

for step in range(5 if options.resume else 0, 10):
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # other data on every rank
    tokens = torch.randint(64, (64,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 64)
    loss.backward()
    optimizers.step()
    optimizers.zero_grad()
    print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}")
    if step == 4:
        dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=options.output)
dist.destroy_process_group()
