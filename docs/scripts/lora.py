"""LoRA with PEFT on FSDP2, its factors trained by Muon: torchrun --nproc-per-node 2 docs/scripts/lora.py"""

import tempfile

import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import canzona_compile

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on every rank


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.up_proj, self.down_proj = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        self.lm_head = nn.Linear(64, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        logits: torch.Tensor = self.lm_head(x + self.down_proj(nn.functional.gelu(self.up_proj(x))))
        return logits


# --8<-- [start:line]
config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["up_proj", "down_proj"], modules_to_save=["lm_head"])
model = fully_shard(peft.get_peft_model(Decoder(), config))
optimizer = canzona_compile.muon_adamw(model, lr=1e-2, weight_decay=0.0, others="*.lora_A.*")  # Muon trains B
# --8<-- [end:line]
if dist.get_rank() == 0:
    print(canzona_compile.hidden_matrices(model, others="*.lora_A.*"))

torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(20):
    tokens = torch.randint(256, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")

folder = tempfile.mkdtemp()
# --8<-- [start:save]
# Whole tensors, on rank 0 only; frozen weights stay where they are.
options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
weights = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    model.save_pretrained(folder, state_dict=weights)  # adapter_model.safetensors and adapter_config.json
    # --8<-- [end:save]
    loaded = peft.PeftModel.from_pretrained(Decoder(), folder)
    own = {name: param for name, param in loaded.named_parameters() if name in weights}
    assert len(own) == len(weights)
    assert all(torch.equal(param, weights[name]) for name, param in own.items())
    print(f"loaded {len(own)} tensors, equal to the bit")
dist.destroy_process_group()
