"""Tiny mixtures of experts: models of transformers from their configurations, and torchtitan's experts."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
HALF = {"head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SMALL, **HALF, "moe_intermediate_size": 32, "num_experts": 4},
    "qwen3_next": {
        **SMALL,
        **HALF,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "mixtral": {**SMALL, "num_local_experts": 4},
    "gpt_oss": {**SMALL, **HALF, "num_local_experts": 4, "sliding_window": 16},
    "deepseek_v3": {
        **SMALL,
        **ROUTED,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "llama4_text": {**SMALL, **HALF, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4},
    "glm4_moe": {**SMALL, **HALF, **ROUTED, "n_routed_experts": 4, "n_shared_experts": 1},
}
TITAN = "torchtitan"  # `make test-clients` installs it
MODELS = (*CONFIGS, TITAN)


class Titan(nn.Module):
    """An embedding, two layers of a linear map and torchtitan's experts, and a head."""

    def __init__(self) -> None:
        from torchtitan.models.common.moe import GroupedExperts

        super().__init__()
        self.tok_embeddings = nn.Embedding(128, 64)
        config = GroupedExperts.Config(dim=64, hidden_dim=32, num_experts=4)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"wo": nn.Linear(64, 64, bias=False), "experts": GroupedExperts(config)}) for _ in range(2)
        )
        self.output = nn.Linear(64, 128, bias=False)


def moe_model(name: str, seed: int = 0) -> nn.Module:
    """The model of this name, with random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == TITAN:
            model: nn.Module = Titan()
        else:
            from transformers import AutoConfig, AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **CONFIGS[name]))
    random = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=random) * 0.1)
    return model
