"""The Trainer of transformers under DDP: torchrun --nproc-per-node 2 docs/scripts/trainer.py"""

import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import canzona_compile


class MuonOfMatrices(torch.optim.Muon):
    """The Trainer gives all parameters; Muon takes matrices, so the rest stays as it is here."""

    def __init__(self, params, lr: float) -> None:
        given = [param for group in params for param in group["params"]]
        super().__init__([param for param in given if param.ndim == 2], lr=lr)


arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    max_steps=10,
    per_device_train_batch_size=4,
    learning_rate=2e-2,
    logging_steps=1,
    use_cpu=True,
    ddp_backend="gloo",
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
arguments.device  # noqa: B018  (makes the process group, which `replicate=` needs)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
tokens = [(torch.arange(16) + i) % 32 for i in range(64)]

# The Trainer builds the optimizer, so it gets a class.
kind = canzona_compile.wrap_cls(MuonOfMatrices, replicate=dist.group.WORLD)
trainer = Trainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=[{"input_ids": t, "labels": t} for t in tokens],
    optimizer_cls_and_kwargs=(kind, {"lr": 2e-2}),
)
trainer.train()
dist.destroy_process_group()
