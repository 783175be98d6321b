"""Pretrain a small GPT with Megatron-core, its matrices with Muon or SOAP: one function in the place of Megatron's.

    torchrun --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --save checkpoints
    torchrun --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --save checkpoints --steps 40  # goes on
    torchrun --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --optimizer canzona_soap
    torchrun --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --zero1
    torchrun --nproc-per-node 1 examples/megatron_gpt.py  # the same losses

The function is `get_megatron_optimizer` in `main`; everything around it is Megatron-core. The text is the source of
Python's standard library. Ranks that `--tp` leaves are data-parallel. Needs the packages megatron-core,
emerging-optimizers, absl-py and psutil, and Python 3.12. Without GPUs it runs on CPUs, by the shim of our tests.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

warnings.simplefilter("ignore")  # Megatron names what is not installed
sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from canzona_compile.integrations.megatron import get_megatron_optimizer  # noqa: E402
from canzona_compile.integrations.megatron_layout import param_layouts  # noqa: E402
from lm_data import Batches, standard_library  # noqa: E402

BATCH, CONTEXT, BYTES = 4, 64, 256  # of a micro-batch; of text, in bytes; different ones
MICRO_BATCHES = 4  # of a step, on all data-parallel ranks together


def model_of(given: argparse.Namespace, optimizer: OptimizerConfig) -> DistributedDataParallel:
    """A decoder whose weights are the same for any number of tensor-parallel ranks."""
    bf16 = optimizer.bf16
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=given.tp,
        use_cpu_initialization=True,
        bf16=bf16,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1) if torch.cuda.is_available() else torch.manual_seed(1)
    model: Any = GPTModel(config, get_gpt_layer_local_spec(), BYTES, CONTEXT, position_embedding_type="rope")
    model = Float16Module(config, model) if bf16 else model
    model = model.cuda() if torch.cuda.is_available() else model
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=given.zero1)
    layout = param_layouts(optimizer, [model], ddp)[0] if given.zero1 else None
    return DistributedDataParallel(config, ddp, model, full_param_layout=layout)


def micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of a step's micro-batches."""
    part, parts = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for number in range(part, MICRO_BATCHES, parts):
        yield Batches(TEXT, batch=BATCH, context=CONTEXT, seed=step, part=number).draw()


def forward(batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
    """What Megatron's schedules call for a micro-batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, labels = (part.to(device) for part in next(batches))
    places = torch.arange(CONTEXT, device=device).expand_as(tokens)
    hidden = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool, device=device).triu(1)[None, None]

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}  # Megatron divides the other one in place

    return model(tokens, places, hidden, labels=labels), loss


def bare(model: Any) -> Any:
    """The model without what Megatron puts around it."""
    return bare(model.module) if hasattr(model, "module") else model


def state_of(model: Any, optimizer: Any, schedule: Any, step: int, is_loading: bool = False) -> dict[str, Any]:
    """What a checkpoint holds."""
    weights = bare(model).sharded_state_dict()
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading),
        "schedule": schedule.state_dict(),
        "step": step,
    }


def train_step(model: DistributedDataParallel, optimizer: Any, step: int) -> float:
    """Train on the micro-batches of a step; return their mean loss, over all ranks."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    batches = list(micro_batches(step))
    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=CONTEXT,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    optimizer.step()
    mean: Tensor = torch.stack([one["loss"] for one in found]).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM, group=parallel_state.get_data_parallel_group())
    return mean.item() / len(dist.get_process_group_ranks(parallel_state.get_data_parallel_group()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--optimizer", default="canzona_muon", help="canzona_muon, canzona_soap, soap, ...")
    parser.add_argument("--steps", type=int, default=20, help="steps in all, those before a checkpoint included")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--zero1", action="store_true", help="bfloat16 weights, in Megatron's ZeRO-1 for matrices")
    parser.add_argument("--save", type=Path, help="a folder of checkpoints; the last one is loaded")
    given = parser.parse_args()
    if MICRO_BATCHES * given.tp % int(os.environ.get("WORLD_SIZE", "1")):
        parser.error(f"data-parallel ranks share {MICRO_BATCHES} micro-batches of each step: start as many ranks")
    if given.zero1 and given.save:
        parser.error(
            "--zero1 has no --save here: Megatron saves its Adam then only if Apex or Transformer Engine made it"
        )
    return given


def main() -> None:
    given = arguments()
    logging.disable(logging.WARNING)
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from tests.harness import megatron_cpu

        megatron_cpu.install()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    parallel_state.initialize_model_parallel(given.tp)
    config = OptimizerConfig(
        optimizer=given.optimizer,
        lr=given.lr,
        min_lr=given.lr / 10,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=given.zero1,
        params_dtype=torch.bfloat16 if given.zero1 else torch.float32,
        use_layer_wise_distributed_optimizer=given.zero1,
    )
    model = model_of(given, config)
    optimizer = get_megatron_optimizer(config, [model])
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=given.lr,
        min_lr=given.lr / 10,
        lr_warmup_steps=5,
        lr_decay_steps=100,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
    first = 0
    saved = sorted(given.save.glob("step*")) if given.save else []
    if saved:
        found = dist_checkpointing.load(state_of(model, optimizer, schedule, 0, is_loading=True), str(saved[-1]))
        bare(model).load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        first = found["step"]
    for step in range(first, given.steps):
        schedule.step(1)
        loss = train_step(model, optimizer, step)
        if dist.get_rank() == 0:
            print(f"step {step + 1:3}   loss {loss:.4f}", flush=True)
    if given.save and first < given.steps:
        folder = given.save / f"step{given.steps:06}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state_of(model, optimizer, schedule, given.steps), str(folder))
    dist.destroy_process_group()


TEXT = standard_library()

if __name__ == "__main__":
    main()
