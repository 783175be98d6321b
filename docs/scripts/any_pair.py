"""NorMuon and AdamW as one optimizer on FSDP2: torchrun --nproc-per-node 2 docs/scripts/any_pair.py"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import canzona_compile
from canzona_compile.optimizers import NorMuon

dist.init_process_group("gloo")
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(2)])
model = fully_shard(nn.Sequential(nn.Embedding(256, 64), hidden, nn.Linear(64, 256)))

# --8<-- [start:pair]
optimizer = canzona_compile.optimizer_for(model, partial(NorMuon, lr=3e-3), partial(torch.optim.AdamW, lr=3e-3))
# --8<-- [end:pair]

torch.manual_seed(dist.get_rank())
for step in range(5):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
