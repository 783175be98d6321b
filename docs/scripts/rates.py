"""Learning rates of their own, by patterns and by a rule for all shapes: python docs/scripts/rates.py"""

import math
from collections.abc import Callable

import torch
from torch import nn

import canzona_compile

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 256))

# --8<-- [start:patterns]
groups = {
    "*.bias": {"weight_decay": 0.0},
    "3.*": {"lr": 1e-3},  # of patterns that fit, later ones win
}
optimizer = canzona_compile.muon_adamw(model, lr=3e-4, groups=groups)
print(canzona_compile.hidden_matrices(model, groups=groups))
# --8<-- [end:patterns]


# --8<-- [start:mup]
def mup(name: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Matrices of more columns than rows get sqrt(rows / columns) of the rate, and as much decay as before."""
    if len(shape) < 2 or name.startswith(("0.", "4.")):  # vectors, the embedding and the head are AdamW's
        return {}
    factor = min(1.0, shape[-2] / shape[-1]) ** 0.5
    return {"lr": 0.02 * factor, "weight_decay": 0.0015 / factor}


optimizer = canzona_compile.muon_adamw(model, groups=mup, muon={"adjust_lr_fn": "original"})
# --8<-- [end:mup]

STEPS = 10
# --8<-- [start:warmup]
muon, adamw = optimizer.optimizers


def warmed(steps: int) -> Callable[[int], float]:
    """A linear warmup of so many steps, then a cosine to a tenth."""
    return lambda step: min(1.0, (step + 1) / steps) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


warmups = [warmed(2) for _ in muon.param_groups] + [warmed(5) for _ in adamw.param_groups]
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmups)
# --8<-- [end:warmup]

for step in range(STEPS):
    tokens = torch.randint(256, (8, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}, rates {[round(group['lr'], 5) for group in optimizer.param_groups]}")
    schedule.step()
