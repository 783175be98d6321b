"""Pipeline stages, each with an optimizer of its own: torchrun --nproc-per-node 2 docs/scripts/pipeline.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import canzona_compile

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)  # every stage has layers of its own
model = nn.Sequential(nn.Linear(32, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False))
stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

optimizer = canzona_compile.wrap(torch.optim.Muon(model.named_parameters(), lr=2e-2))

torch.manual_seed(0)
for step in range(10):
    x = torch.randn(32, 32)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.roll(1, dims=1), losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if rank == ranks - 1:
        print(f"step {step}: loss {sum(losses).item() / 4:.3f}")
dist.destroy_process_group()
