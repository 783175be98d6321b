"""KellerJordan's Muon as it is, wrapped, on FSDP2: torchrun --nproc-per-node 2 docs/scripts/own_muon.py"""

import torch
import torch.distributed as dist
from muon import SingleDeviceMuonWithAuxAdam
from torch import nn
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank
layers = [nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 256)]
model = fully_shard(nn.Sequential(*layers))


def build() -> torch.optim.Optimizer:
    # --8<-- [start:line]
    choice = canzona_compile.hidden_matrices(model)  # or choose by a rule of yours
    matrices, others = [param for _, param in choice.matrices], [param for _, param in choice.others]
    optimizer = SingleDeviceMuonWithAuxAdam(
        [{"params": matrices, "use_muon": True, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 1e-3}]
    )
    canzona_compile.wrap(optimizer, model=model)  # whose names reports then show
    # --8<-- [end:line]
    return optimizer


optimizer = build()
torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(20):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(optimizer.canzona.explain())
saved, optimizer = optimizer.state_dict(), build()
# --8<-- [start:load]
optimizer.load_state_dict(saved)  # of this class, wrapped or not
# --8<-- [end:load]
dist.destroy_process_group()
