"""Resume when another optimizer trains some parameters: torchrun --nproc-per-node 2 docs/scripts/changed_choice.py"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")


def build(**choice: str) -> tuple[nn.Module, canzona_compile.Chain]:
    torch.manual_seed(0)  # the same weights on every rank
    layers = [nn.Embedding(256, 64), nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 256)]
    model = fully_shard(nn.Sequential(*layers))
    return model, canzona_compile.muon_adamw(model, lr=1e-2, **choice)


def train(model: nn.Module, optimizer: canzona_compile.Chain, steps: range) -> None:
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(256, (256,))
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")


folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(folders)
folder = folders[0]

model, optimizer = build()
train(model, optimizer, range(10))
model_state, optimizer_state = get_state_dict(model, optimizer)
dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

# --8<-- [start:load]
model, optimizer = build(others="1.weight")  # from here on AdamW trains it
model_state, optimizer_state = get_state_dict(model, optimizer)
saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
state = {
    name: leaves
    for name, leaves in optimizer_state["state"].items()
    if all(f"optimizer.state.{name}.{leaf}" in saved for leaf in leaves)  # others begin anew
}
dcp.load({"model": model_state, "optimizer": {"state": state}}, checkpoint_id=folder)
options = StateDictOptions(strict=False)  # which lets parameters have no state
set_model_state_dict(model, model_state)
set_optimizer_state_dict(model, optimizer, {**optimizer_state, "state": state}, options=options)
# --8<-- [end:load]
if dist.get_rank() == 0:
    print("begin anew:", sorted(dict(model.named_parameters()).keys() - state.keys()))
train(model, optimizer, range(10, 20))
dist.destroy_process_group()
