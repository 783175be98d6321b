"""Accelerate: FSDP2 on GPUs, DDP on CPUs: torchrun --nproc-per-node 2 docs/scripts/accelerate_loop.py"""

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import canzona_compile

on_gpus = torch.cuda.is_available()  # without a GPU, Accelerate knows DDP alone
plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if on_gpus else None
accelerator = Accelerator(cpu=not on_gpus, fsdp_plugin=plugin, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False))

# Under FSDP2 the layout is read off the parameters that `prepare` makes. Under DDP say which ranks have copies.
optimizer = torch.optim.Muon(model.named_parameters(), lr=2e-2)
optimizer = canzona_compile.wrap(optimizer, replicate=None if on_gpus else dist.group.WORLD)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)

torch.manual_seed(accelerator.process_index)
for step in range(20):
    with accelerator.accumulate(model):
        x = torch.randn(16, 32, device=accelerator.device)
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        prepared.step()
        schedule.step()
        prepared.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.3f}")
accelerator.end_training()
