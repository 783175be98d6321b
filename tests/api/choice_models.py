"""Small models of many architectures. Which of their parameters are hidden matrices is written by hand, by pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from examples.lm_model import Decoder, ModelConfig

BERT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
DECODER = {**BERT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model and the truth about it.

    Attributes:
        make: builds it.
        matrices: patterns of the hidden matrices.
        others: patterns of all other parameters.
    """

    make: Callable[[], nn.Module]
    matrices: tuple[str, ...]
    others: tuple[str, ...]


def made(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers with random weights. Where that is not installed, a test that asks for one is skipped."""

    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
        return model

    return make


def sequential() -> nn.Module:
    """The model of the README."""
    hidden = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(4)])
    return nn.Sequential(nn.Embedding(256, 64), hidden, nn.Linear(64, 256))


SELF_ATTENTION = tuple(f"model.layers.?.self_attn.{name}_proj.weight" for name in "qkvo")
MLP = tuple(f"model.layers.?.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
NORMS = ("model.layers.?.*norm.weight", "model.norm.weight")
TABLE = ("model.embed_tokens.weight",)
HEAD = ("lm_head.weight",)
STACKS = ("model.layers.?.mlp.experts.gate_up_proj", "model.layers.?.mlp.experts.down_proj")
ROUTER = ("model.layers.?.mlp.gate.weight",)
DENSE = ("*.attention.self.query.weight", "*.attention.self.key.weight", "*.attention.self.value.weight")
BERT_MATRICES = (*DENSE, "*.attention.output.dense.weight", "*.intermediate.dense.weight", "*.?.output.dense.weight")
BERT_OTHERS = ("bert.embeddings.*", "bert.encoder.*.bias", "bert.encoder.*.LayerNorm.weight", "bert.pooler.dense.bias")
DEMO = ("blocks.?.attention.?_proj.weight", *(f"blocks.?.feed_forward.{n}_proj.weight" for n in ("gate", "up", "down")))
DEMO_OTHERS = ("embedding.weight", "blocks.?.*norm.weight", "norm.weight")

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        made("LlamaForCausalLM", "LlamaConfig", **DECODER), (*SELF_ATTENTION, *MLP), (*TABLE, *NORMS, *HEAD)
    ),
    "llama-tied": Architecture(
        made("LlamaForCausalLM", "LlamaConfig", **DECODER, tie_word_embeddings=True),
        (*SELF_ATTENTION, *MLP),
        (*TABLE, *NORMS),
    ),
    "qwen3": Architecture(
        made("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=8), (*SELF_ATTENTION, *MLP), (*TABLE, *NORMS, *HEAD)
    ),
    "qwen3-moe": Architecture(
        made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **DECODER, **MOE, head_dim=8, decoder_sparse_step=1),
        (*SELF_ATTENTION, *ROUTER),
        (*TABLE, *NORMS, *HEAD, *STACKS),
    ),
    "gemma": Architecture(
        made("GemmaForCausalLM", "GemmaConfig", **DECODER, head_dim=8), (*SELF_ATTENTION, *MLP), (*TABLE, *NORMS)
    ),
    "gemma3": Architecture(
        made("Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER, head_dim=8), (*SELF_ATTENTION, *MLP), (*TABLE, *NORMS)
    ),
    "gpt2": Architecture(
        made("GPT2LMHeadModel", "GPT2Config", vocab_size=96, n_positions=128, n_embd=32, n_layer=2, n_head=4),
        ("*.attn.c_attn.weight", "*.attn.c_proj.weight", "*.mlp.c_fc.weight", "*.mlp.c_proj.weight"),
        ("transformer.wte.weight", "transformer.wpe.weight", "*.ln_?.*", "transformer.ln_f.*", "*.c_*.bias"),
    ),
    "mixtral": Architecture(
        made("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4),
        (*SELF_ATTENTION, *ROUTER),
        (*TABLE, *NORMS, *HEAD, *STACKS),
    ),
    "deepseek-v3": Architecture(
        made("DeepseekV3ForCausalLM", "DeepseekV3Config", **{**DECODER, "num_key_value_heads": 4}, **LATENT),
        (
            *(f"*.self_attn.{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
            "*.self_attn.o_proj.weight",
            "model.layers.0.mlp.*_proj.weight",
            "model.layers.1.mlp.shared_experts.*_proj.weight",
            "model.layers.1.mlp.gate.weight",
        ),
        (*TABLE, *NORMS, *HEAD, *STACKS),
    ),
    "mamba": Architecture(
        made("MambaForCausalLM", "MambaConfig", vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=2),
        tuple(f"backbone.layers.?.mixer.{name}_proj.weight" for name in ("in", "x", "dt", "out")),
        ("backbone.embeddings.weight", "*.A_log", "*.D", "*.conv1d.*", "*.dt_proj.bias", "*norm*.weight"),
    ),
    "gpt-oss": Architecture(
        made("GptOssForCausalLM", "GptOssConfig", **DECODER, head_dim=8, num_local_experts=4),
        (*SELF_ATTENTION, "model.layers.?.mlp.router.weight"),
        (
            *TABLE,
            *NORMS,
            *HEAD,
            *STACKS,
            "*.experts.*_proj_bias",
            "*.sinks",
            "*.self_attn.?_proj.bias",
            "*.router.bias",
        ),
    ),
    "t5": Architecture(
        made("T5ForConditionalGeneration", "T5Config", vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2),
        ("*.SelfAttention.[qkvo].weight", "*.EncDecAttention.[qkvo].weight", "*.DenseReluDense.w?.weight"),
        ("shared.weight", "*.relative_attention_bias.weight", "*layer_norm.weight"),
    ),
    "bert": Architecture(
        made("BertForPreTraining", "BertConfig", **BERT),
        (*BERT_MATRICES, "bert.pooler.dense.weight", "cls.predictions.transform.dense.weight"),
        (*BERT_OTHERS, "cls.*.bias", "cls.*.LayerNorm.weight", "cls.seq_relationship.weight"),
    ),
    "bert-classifier": Architecture(
        made("BertForSequenceClassification", "BertConfig", **BERT),
        (*BERT_MATRICES, "bert.pooler.dense.weight"),
        (*BERT_OTHERS, "classifier.*"),
    ),
    "roberta-classifier": Architecture(  # whose head has a hidden matrix before its last one
        made("RobertaForSequenceClassification", "RobertaConfig", **BERT),
        (*BERT_MATRICES, "classifier.dense.weight"),
        ("roberta.embeddings.*", "*.bias", "roberta.encoder.*.LayerNorm.weight", "classifier.out_proj.weight"),
    ),
    "vit": Architecture(
        made("ViTForImageClassification", "ViTConfig", **VISION, image_size=16, patch_size=4, num_labels=10),
        ("vit.layers.?.attention.?_proj.weight", "vit.layers.?.mlp.fc?.weight"),
        ("vit.embeddings.*", "vit.layers.*.bias", "*layernorm*.weight", "vit.layernorm.bias", "classifier.*"),
    ),
    "demo": Architecture(lambda: Decoder(ModelConfig(num_layers=2)), DEMO, DEMO_OTHERS),
    "demo-untied": Architecture(
        lambda: Decoder(ModelConfig(num_layers=1, tied=False)), DEMO, (*DEMO_OTHERS, "head.weight")
    ),
    "readme": Architecture(sequential, ("1.?.0.weight",), ("0.weight", "2.weight", "2.bias")),
}
