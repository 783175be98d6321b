"""Train the head first, then layer by layer, on FSDP2: torchrun --nproc-per-node 2 docs/scripts/unfreeze.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(2)])
model = fully_shard(nn.Sequential(nn.Embedding(256, 64), hidden, nn.Linear(64, 256)))

# --8<-- [start:line]
optimizer = canzona_compile.muon_adamw(model, lr=1e-2)  # of all parameters, also of those that are frozen next
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step % 10 + 1) / 5))  # of each stage
model.requires_grad_(False)
stages = {0: model[2], 10: hidden[1], 20: model}  # from which step on something is trained
# --8<-- [end:line]

torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(30):
    if step in stages:
        stages[step].requires_grad_(True)
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    warmup.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, {len(optimizer.state)} parameters with state")
dist.destroy_process_group()
