"""What the busiest data-parallel rank has to do in Megatron's ZeRO-1 for matrices: Megatron's owners and ours.

    python benchmarks/megatron_owners.py
    python benchmarks/megatron_owners.py --optimizer soap --dp 16 --tp 4

The model is Qwen3-32B, as megatron-core makes it on one of the ranks; nothing is trained. Needs megatron-core and
emerging-optimizers: `make test-megatron` installs them into .venv-megatron.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.simplefilter("ignore")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from canzona_compile.integrations.megatron_layout import costs_of, flops_of_steps, param_layouts  # noqa: E402
from tests.harness import megatron_cpu  # noqa: E402

QWEN3_32B: dict[str, Any] = {
    "num_layers": 64,
    "hidden_size": 5120,
    "ffn_hidden_size": 25600,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "kv_channels": 128,
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "add_bias_linear": False,
    "perform_initialization": False,  # so that no memory is touched
    "params_dtype": torch.bfloat16,
    "bf16": True,
}
VOCABULARY, LENGTH = 151936, 4096
BUCKET = 40_000_000  # elements, Megatron's default


def model_on_one_rank(dp: int, tp: int) -> nn.Module:
    """The model as rank 0 has it."""
    megatron_cpu.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dp * tp)
    parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)
    config = TransformerConfig(tensor_model_parallel_size=tp, **QWEN3_32B)
    made: nn.Module = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="rope")
    return made


def work(layout: Any, costs: Mapping[nn.Parameter, float]) -> list[float]:
    """The FLOPs of each data-parallel rank: of all ranks that share its matrices."""
    (own,) = (one for key, one in layout.layouts.items() if key.is_managed_by_layer_wise_optimizer)
    found = [0.0] * own.num_optimizer_shards
    for param, (first, _, bucket) in own.param_index_map.items():
        start, end = own.bucket_indices[bucket]
        found[(first - start) * len(found) // (end - start)] += costs[param]
    return found


def padding(layout: Any) -> float:
    """How much longer the buffer of matrices is than they are."""
    (own,) = (one for key, one in layout.layouts.items() if key.is_managed_by_layer_wise_optimizer)
    return float(own.bucket_indices[-1][1] / sum(own.per_bucket_numel_unpadded) - 1)


def compared(name: str, model: nn.Module) -> dict[str, tuple[float, float]]:
    """By who chose the owners: the work of the busiest rank, divided by the mean, and the padding."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = OptimizerConfig(optimizer=name, lr=1e-3, bf16=True, use_layer_wise_distributed_optimizer=True)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    (ours,) = param_layouts(config, [model], settings, [BUCKET])
    megatrons = LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(model.parameters()), BUCKET, groups.dp_cp.size(), settings, groups.expt_dp.size()
    )
    costs = costs_of(model, groups, flops_of_steps(config, model, groups))
    loads = {"megatron": work(megatrons, costs), "canzona_compile": work(ours, costs)}
    pads = {"megatron": padding(megatrons), "canzona_compile": padding(ours)}
    return {who: (max(load) * len(load) / sum(load), pads[who]) for who, load in loads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", nargs="+", default=["canzona_muon", "canzona_soap", "soap"])
    parser.add_argument("--dp", type=int, default=32)
    parser.add_argument("--tp", type=int, default=8)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    model = model_on_one_rank(given.dp, given.tp)
    table = Table(title=f"Qwen3-32B, {given.dp} x {given.tp} ranks, matrices in Megatron's ZeRO-1")
    for head in ("optimizer", "owners", "busiest rank / mean", "padding"):
        table.add_column(head)
    for name in given.optimizer:
        for who, (busiest, pad) in compared(name, model).items():
            table.add_row(name, who, f"{busiest:.3f}", f"{pad:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
