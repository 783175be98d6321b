"""DeepSpeed's engine at ZeRO stage 0: torchrun --nproc-per-node 2 docs/scripts/deepspeed_engine.py"""

# --8<-- [start:engine]
import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import canzona_compile

deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
hidden = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU()) for _ in range(3)])
model = nn.Sequential(nn.Embedding(256, 32), hidden, nn.Linear(32, 256))

optimizer = canzona_compile.muon_adamw(model, lr=1e-2, replicate=dist.group.WORLD)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
# --8<-- [end:engine]

torch.manual_seed(dist.get_rank())
for step in range(10):
    tokens = torch.randint(256, (256,), device=engine.device)
    loss = nn.functional.cross_entropy(engine(tokens), (tokens + 1) % 256)
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
