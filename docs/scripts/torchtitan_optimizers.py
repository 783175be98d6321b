"""torchtitan's container of optimizers with Muon: torchrun --nproc-per-node 2 docs/scripts/torchtitan_optimizers.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import canzona_compile


class WithMuon(OptimizersContainer):
    """Knows one more name; set it as `optimizer` in a `Trainer.Config`."""

    @staticmethod
    def _resolve_optimizer_factory(name: str):
        if name == "Muon":
            return canzona_compile.wrap_cls(torch.optim.Muon)
        return OptimizersContainer._resolve_optimizer_factory(name)


config = WithMuon.Config(
    implementation="for-loop",
    param_groups=[
        ParamGroupConfig(pattern=r"^hidden\..*", optimizer_name="Muon", optimizer_kwargs={"lr": 2e-2}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
    ],
)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU()) for _ in range(3)])
model = nn.Sequential()
for name, part in {"embedding": nn.Embedding(256, 32), "hidden": hidden, "head": nn.Linear(32, 256)}.items():
    model.add_module(name, fully_shard(part, mesh=mesh))
fully_shard(model, mesh=mesh)
optimizers = WithMuon(config, model_parts=[model])

torch.manual_seed(dist.get_rank())
for step in range(10):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizers.step()
    optimizers.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
