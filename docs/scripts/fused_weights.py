"""Several matrices in one parameter: torchrun --nproc-per-node 2 docs/scripts/fused_weights.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile
from canzona_compile import Split


class Layer(nn.Module):
    """Has q, k, v in one weight [128, 64] and gate, up in another one [192, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 64 + 32 + 32, bias=False)
        self.gate_up = nn.Linear(64, 96 + 96, bias=False)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split([64, 32, 32], dim=-1)
        x = x + q * torch.cat([k, v], dim=-1)
        gate, up = self.gate_up(x).unflatten(-1, (4, 2, 24)).unbind(-2)  # four blocks, each with a share of both
        return x + self.down((nn.functional.silu(gate) * up).flatten(-2))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(Layer(), Layer())
fully_shard(model, mesh=mesh)

# --8<-- [start:split]
matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]  # norms go to another optimizer
optimizer = canzona_compile.wrap(
    torch.optim.Muon(matrices, lr=2e-2),  # or name the parameters by wrap(..., model=model)
    split={
        "*.qkv.weight": {"q": 64, "k": 32, "v": 32},
        "*.gate_up.weight": Split({"gate": 96, "up": 96}, interleaved=4),
    },
)
# --8<-- [end:split]

torch.manual_seed(dist.get_rank())
for step in range(10):
    x = torch.randn(16, 64)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    model.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(canzona_compile.explain(optimizer))  # names every piece
dist.destroy_process_group()
