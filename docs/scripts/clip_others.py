"""Clipping the gradients of AdamW alone, on FSDP2: torchrun --nproc-per-node 2 docs/scripts/clip_others.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(2)])
model = fully_shard(nn.Sequential(nn.Embedding(256, 64), hidden, nn.Linear(64, 256)))
# --8<-- [start:line]
# in place of torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
optimizer = canzona_compile.muon_adamw(model, lr=3e-4, weight_decay=0.1)
# --8<-- [end:line]

# --8<-- [start:clip]
muon, adamw = optimizer.optimizers
others = [p for group in adamw.param_groups for p in group["params"]]
# --8<-- [end:clip]

torch.manual_seed(dist.get_rank())
for step in range(10):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    # --8<-- [start:step]
    norm = torch.nn.utils.clip_grad_norm_(others, max_norm=0.1)
    optimizer.step()
    # --8<-- [end:step]
    after = torch.nn.utils.get_total_norm([p.grad for p in others])
    assert after.full_tensor() <= 0.1001
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
