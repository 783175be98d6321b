"""An average of the weights beside the training, on FSDP2: torchrun --nproc-per-node 2 docs/scripts/averages.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_multi_avg_fn

import canzona_compile

dist.init_process_group("gloo")


def build() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 256))


# --8<-- [start:line]
model = fully_shard(build())
average = fully_shard(build(), reshard_after_forward=True)  # else evaluations reuse what the first one gathered
optimizer = canzona_compile.muon_adamw(model, lr=1e-2)
pairs = list(average.parameters()), list(model.parameters())  # each rank's shards
update = get_ema_multi_avg_fn(0.9)
optimizer.register_step_post_hook(lambda *_: update(*pairs, 0))  # nothing is sent
# --8<-- [end:line]

torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(20):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        averaged = nn.functional.cross_entropy(average(tokens), (tokens + 1) % 256)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, of the average {averaged.item():.3f}")
dist.destroy_process_group()
