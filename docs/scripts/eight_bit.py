"""AdamW with 8-bit state next to Muon, on FSDP2: torchrun --nproc-per-node 2 docs/scripts/eight_bit.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit

import canzona_compile

torch.compiler.set_stance("force_eager")  # torchao compiles its update for each shape; this short run does without
dist.init_process_group("gloo")
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(2)])
model = fully_shard(nn.Sequential(nn.Embedding(4096, 64), hidden, nn.Linear(64, 4096, bias=False)))


# --8<-- [start:chain]
def make(adamw: type[torch.optim.Optimizer]) -> canzona_compile.Chain:
    choice = canzona_compile.hidden_matrices(model)
    muon = torch.optim.Muon(choice.matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw")
    return canzona_compile.chain(canzona_compile.wrap(muon), adamw([p for _, p in choice.others], lr=1e-2))


# --8<-- [end:chain]


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state on this rank."""
    found = 0
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                parts = [local.codes, local.scale, local.qmap] if hasattr(local, "codes") else [local]
                found += sum(part.numel() * part.element_size() for part in parts)
    return found


for adamw in (torch.optim.AdamW, AdamW8bit):
    optimizer = make(adamw)
    for step in range(5):
        tokens = torch.randint(4096, (256,))
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 4096)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"{adamw.__name__}, step {step}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        muon, others = map(bytes_of, optimizer.optimizers)
        print(f"{adamw.__name__}: {others / 2**20:.2f} MiB of state on this rank; Muon: {muon / 2**10:.0f} KiB")
dist.destroy_process_group()
