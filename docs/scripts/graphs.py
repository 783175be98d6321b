"""What was compiled, in text: torchrun --nproc-per-node 2 docs/scripts/graphs.py"""

import tempfile

import rich
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
model = nn.Sequential(*[nn.Linear(48, 48, bias=False) for _ in range(4)])
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = canzona_compile.wrap(torch.optim.Muon(model.named_parameters(), lr=2e-2))
for _ in range(2):
    model(torch.randn(16, 48)).square().mean().backward()
    optimizer.step()

folder = tempfile.mkdtemp()
if dist.get_rank() == 0:
    # --8<-- [start:graphs]
    optimizer.canzona.graph("captured").print_readable()  # one template, as if on one device
    optimizer.canzona.graph("placed").print_readable()  # cut: prepare, compute, apply
    optimizer.canzona.graph("program").print_readable()  # what this rank executes
    rich.print(optimizer.canzona.passes())  # time, nodes and operators that each pass changed
    optimizer.canzona.dump(folder)  # all of it as text, in rank0, rank1, ... of the folder
    # --8<-- [end:graphs]
dist.destroy_process_group()
