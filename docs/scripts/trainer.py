"""The Trainer of transformers under DDP or FSDP2: torchrun --nproc-per-node 2 docs/scripts/trainer.py [--fsdp2]"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from canzona_compile.integrations.transformers import GatherStateCallback, MuonAdamW

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp2", action="store_true", help="on GPUs")
parser.add_argument("--output", default=f"{tempfile.gettempdir()}/canzona_trainer")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of step 5")
options = parser.parse_args()

arguments = TrainingArguments(
    output_dir=options.output,
    max_steps=10,
    save_steps=5,
    logging_steps=1,
    per_device_train_batch_size=4,
    fsdp=options.fsdp2,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
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
trainer = Trainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=[{"input_ids": t, "labels": t} for t in tokens],
    # The Trainer calls MuonAdamW()(model, lr=1e-2): the hidden matrices get Muon, all other parameters AdamW.
    optimizer_cls_and_kwargs=(MuonAdamW, {"lr": 1e-2}),
    callbacks=[GatherStateCallback()],  # for checkpoints under DDP, which rank 0 saves alone
)
trainer.train(resume_from_checkpoint=f"{options.output}/checkpoint-5" if options.resume else None)
dist.destroy_process_group()
