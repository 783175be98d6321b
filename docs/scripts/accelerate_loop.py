"""Accelerate under DDP or FSDP2: torchrun --nproc-per-node 2 docs/scripts/accelerate_loop.py [--fsdp2]"""

import argparse
import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import canzona_compile

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp2", action="store_true", help="on GPUs")
parser.add_argument("--output", default=f"{tempfile.gettempdir()}/canzona_accelerate")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of step 9")
options = parser.parse_args()

plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if options.fsdp2 else None
cpu = not torch.cuda.is_available()
accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin, gradient_accumulation_steps=2)
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
model = nn.Sequential(OrderedDict(embedding=nn.Embedding(64, 32), hidden=hidden, head=nn.Linear(32, 64)))

# Under FSDP2 the layout is read off the parameters that `prepare` makes. Under DDP say which ranks have copies.
optimizer = canzona_compile.muon_adamw(model, lr=1e-2, replicate=None if plugin else dist.group.WORLD)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
if options.resume:
    accelerator.load_state(options.output)

for step in range(10 if options.resume else 0, 20):
    torch.manual_seed(step * accelerator.num_processes + accelerator.process_index)  # other data on every rank
    with accelerator.accumulate(model):
        tokens = torch.randint(64, (64,), device=accelerator.device)
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 64)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        prepared.step()
        schedule.step()
        prepared.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.3f}")
    if step == 9:
        accelerator.save_state(options.output)
accelerator.end_training()
