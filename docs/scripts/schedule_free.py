"""Muon beside AdamW without a schedule, on FSDP2: torchrun --nproc-per-node 2 docs/scripts/schedule_free.py"""

import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank
layers = [nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 256)]
model = fully_shard(nn.Sequential(*layers))

# --8<-- [start:line]
choice = canzona_compile.hidden_matrices(model)
muon = torch.optim.Muon(choice.matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw")
adamw = AdamWScheduleFree([param for _, param in choice.others], lr=1e-2)
optimizer = canzona_compile.chain(canzona_compile.wrap(muon), adamw)
adamw.train()  # and adamw.eval() before an evaluation or a checkpoint
# --8<-- [end:line]

torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(20):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
adamw.eval()
dist.destroy_process_group()
