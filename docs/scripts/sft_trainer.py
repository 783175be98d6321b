"""The SFTTrainer of TRL: torchrun --nproc-per-node 2 docs/scripts/sft_trainer.py [--fsdp2]"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from canzona_compile.integrations.transformers import GatherStateCallback, MuonAdamW

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp2", action="store_true", help="on GPUs")
parser.add_argument("--output", default=f"{tempfile.gettempdir()}/canzona_sft")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of step 5")
options = parser.parse_args()

on_gpus = torch.cuda.is_available()
arguments = SFTConfig(
    output_dir=options.output,
    max_steps=10,
    save_steps=5,
    logging_steps=1,
    per_device_train_batch_size=4,
    fsdp=options.fsdp2,
    use_cpu=not on_gpus,
    bf16=on_gpus,
    gradient_checkpointing=False,
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=on_gpus,
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
words = Tokenizer(WordLevel({str(i): i for i in range(32)}, unk_token="0"))
trainer = SFTTrainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=Dataset.from_list([{"input_ids": [(i + j) % 32 for j in range(16)]} for i in range(64)]),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
    optimizer_cls_and_kwargs=(MuonAdamW, {"lr": 1e-2}),
    callbacks=[GatherStateCallback()],
)
trainer.train(resume_from_checkpoint=f"{options.output}/checkpoint-5" if options.resume else None)
dist.destroy_process_group()
