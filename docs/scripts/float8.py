"""Products in float8 by torchao, on FSDP2: torchrun --nproc-per-node 2 docs/scripts/float8.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import canzona_compile

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(4)])
model = nn.Sequential(nn.Embedding(256, 64), hidden, nn.Linear(64, 256))

# --8<-- [start:line]
config = Float8LinearConfig(emulate=True)  # CPUs have no products in float8; leave it out on GPUs
convert_to_float8_training(hidden, config=config)
for layer in hidden:
    fully_shard(layer)
fully_shard(model)
optimizer = canzona_compile.muon_adamw(model, lr=1e-2)
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
dist.destroy_process_group()
