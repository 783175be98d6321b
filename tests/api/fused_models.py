"""Small models with fused weights, and what shows which rows or columns of a weight belong to which part."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from canzona_compile import Split
from canzona_compile.api.fused import experts
from canzona_compile.ir.split import rows_of
from tests.api.choice_models import ARCHITECTURES, BERT, DECODER, MOE, made

TOKENS = torch.arange(12).view(1, 12)
FALCON = {**BERT, "num_attention_heads": 4, "num_kv_heads": 2}
NEXT = {
    **DECODER,
    **MOE,
    "head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
}
BIGCODE = {"vocab_size": 96, "n_positions": 128, "n_embd": 32, "n_layer": 1, "n_head": 4}
GLM_MOE = {
    **DECODER,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "head_dim": 8,
}
LLAMA4 = {
    **DECODER,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 1,
}


@dataclass(frozen=True, slots=True)
class Fused:
    """A fused weight of a model.

    Attributes:
        weight: how its name ends: what is before the slash is in the path of the module.
        words: what `hidden_matrices` says of it.
        method: of its module, which returns what the parts become, in order.
        function: in the file of its module, which takes that; without either, torch's attention does.
        run: calls the model.
    """

    make: Callable[[], nn.Module]
    weight: str
    words: str
    method: str = ""
    function: str = ""
    run: Callable[[Any], object] = lambda model: model(TOKENS)


class Attention(nn.Module):
    """A model of torch's attention; it stays in training mode, because its fast path shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x, need_weights=False)


def crossing() -> nn.Module:
    options = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 96, "n_positions": 128}
    return made("GPT2Model", "GPT2Config", **options, add_cross_attention=True)()


CACHES = ("past_key_values", "layer_past", "cache_params")
QKV = "q, k and v in "
MLP = "gate and up in halves of rows"
ATTENTIONS = {
    "gpt2": Fused(ARCHITECTURES["gpt2"].make, "attn/c_attn.weight", QKV + "thirds of columns"),
    "gpt2-cross": Fused(
        crossing,
        "crossattention/c_attn.weight",
        "k and v in halves of columns",
        run=lambda m: m(TOKENS, encoder_hidden_states=torch.randn(1, 5, 32)),
    ),
    "phi3": Fused(made("Phi3Model", "Phi3Config", **DECODER), "qkv_proj.weight", QKV + "32, 16 and 16 rows"),
    "gpt-neox": Fused(
        made("GPTNeoXModel", "GPTNeoXConfig", **BERT), "query_key_value.weight", QKV + "each of 4 blocks of rows"
    ),
    "falcon-multi-query": Fused(
        made("FalconModel", "FalconConfig", **FALCON), "query_key_value.weight", QKV + "32, 8 and 8 rows"
    ),
    "falcon-heads": Fused(
        made("FalconModel", "FalconConfig", **BERT, multi_query=False),
        "query_key_value.weight",
        QKV + "each of 4 blocks of rows",
    ),
    "falcon-groups": Fused(
        made("FalconModel", "FalconConfig", **FALCON, new_decoder_architecture=True),
        "query_key_value.weight",
        QKV + "each of 2 blocks of rows",
    ),
    "bloom": Fused(
        made("BloomModel", "BloomConfig", vocab_size=96, hidden_size=32, n_layer=1, n_head=4),
        "query_key_value.weight",
        QKV + "each of 4 blocks of rows",
        "_reshape",
    ),
    "bigcode-multi-query": Fused(
        made("GPTBigCodeModel", "GPTBigCodeConfig", **BIGCODE), "c_attn.weight", QKV + "32, 8 and 8 rows"
    ),
    "bigcode-heads": Fused(
        made("GPTBigCodeModel", "GPTBigCodeConfig", **BIGCODE, multi_query=False),
        "c_attn.weight",
        QKV + "each of 4 blocks of rows",
    ),
    "qwen3-next-qkvz": Fused(
        made("Qwen3NextModel", "Qwen3NextConfig", **NEXT),
        "in_proj_qkvz.weight",
        "q, k, v and z in each of 2 blocks of rows",
        "fix_query_key_value_ordering",
    ),
    "qwen3-next-ba": Fused(
        made("Qwen3NextModel", "Qwen3NextConfig", **NEXT),
        "in_proj_ba.weight",
        "b and a in each of 2 blocks of rows",
        "fix_query_key_value_ordering",
    ),
    "qwen3-next-gated": Fused(
        made("Qwen3NextModel", "Qwen3NextConfig", **NEXT), "q_proj.weight", "q and gate in each of 4 blocks of rows"
    ),
    "qwen3.5-qkv": Fused(
        made("Qwen3_5TextModel", "Qwen3_5TextConfig", **NEXT),
        "in_proj_qkv.weight",
        QKV + "12, 12 and 32 rows",
        function="torch_chunk_gated_delta_rule",
    ),
    "qwen3.5-gated": Fused(
        made("Qwen3_5TextModel", "Qwen3_5TextConfig", **NEXT),
        "q_proj.weight",
        "q and gate in each of 4 blocks of rows",
    ),
    "qwen3.5-moe-qkv": Fused(
        made("Qwen3_5MoeTextModel", "Qwen3_5MoeTextConfig", **NEXT),
        "in_proj_qkv.weight",
        QKV + "12, 12 and 32 rows",
        function="torch_chunk_gated_delta_rule",
    ),
    "qwen3.5-moe-gated": Fused(
        made("Qwen3_5MoeTextModel", "Qwen3_5MoeTextConfig", **NEXT),
        "q_proj.weight",
        "q and gate in each of 4 blocks of rows",
    ),
    "torch": Fused(Attention, "in_proj_weight", QKV + "thirds of rows", run=lambda m: m(torch.randn(2, 5, 32))),
}
GATES = {
    "qwen3-moe": Fused(ARCHITECTURES["qwen3-moe"].make, "experts/gate_up_proj", MLP),
    "qwen3-next": Fused(made("Qwen3NextModel", "Qwen3NextConfig", **NEXT), "experts/gate_up_proj", MLP),
    "mixtral": Fused(ARCHITECTURES["mixtral"].make, "experts/gate_up_proj", MLP),
    "deepseek-v3": Fused(ARCHITECTURES["deepseek-v3"].make, "experts/gate_up_proj", MLP),
    "glm4-moe": Fused(made("Glm4MoeModel", "Glm4MoeConfig", **GLM_MOE), "experts/gate_up_proj", MLP),
    "llama4": Fused(
        made("Llama4ForCausalLM", "Llama4TextConfig", **LLAMA4),
        "experts/gate_up_proj",
        "gate and up in halves of columns",
    ),
    "gpt-oss": Fused(ARCHITECTURES["gpt-oss"].make, "experts/gate_up_proj", "gate and up in alternating columns"),
    "phi3": Fused(made("Phi3Model", "Phi3Config", **DECODER), "gate_up_proj.weight", MLP),
    "glm": Fused(made("GlmModel", "GlmConfig", **DECODER, head_dim=8), "gate_up_proj.weight", MLP),
    "glm4": Fused(made("Glm4Model", "Glm4Config", **DECODER, head_dim=8), "gate_up_proj.weight", MLP),
}


def arguments(fused: Fused, model: nn.Module, module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The arguments with which a model calls a module for the first time, but not its cache."""
    taken: list[Any] = []
    handle = module.register_forward_pre_hook(lambda _, *given: taken.append(given), with_kwargs=True)
    fused.run(model)
    handle.remove()
    args, kwargs = taken[0]
    return args, {key: value for key, value in kwargs.items() if key not in CACHES}


def drawn(model: nn.Module) -> None:
    """Draw all parameters anew. Biases are zero, so that zero weights give zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(std=0.2)
            if name.endswith("bias"):
                param.zero_()


class Probe:
    """A module with a fused weight, and the arguments of a call."""

    def __init__(
        self, module: Any, weight: nn.Parameter, split: Split, called: Any, fused: Fused | None = None
    ) -> None:
        self.module, self.weight, self.split, self.fused = module, weight, split, fused
        self.args, self.kwargs = called

    @classmethod
    def of(cls, fused: Fused, model: nn.Module, name: str, split: Split) -> Probe:
        """The module of a model with the weight of this name, as the model calls it."""
        drawn(model)
        module = model.get_submodule(name.removesuffix(fused.weight.rpartition("/")[2]).removesuffix("."))
        called = arguments(fused, model, module)
        return cls(module, model.get_parameter(name), split, called, fused)

    @contextmanager
    def scaled(self, part: str, factor: float) -> Iterator[None]:
        """Multiply a part of the weight."""
        before = self.weight.detach().clone()
        rows = rows_of(self.split)[part]
        with torch.no_grad():
            self.weight.index_copy_(self.split.dim, rows, factor * before.index_select(self.split.dim, rows))
            yield
            self.weight.copy_(before)

    def output(self) -> Tensor:
        """What the module returns first."""
        found = self.module(*self.args, **self.kwargs)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output.detach()

    def became(self) -> dict[str, Tensor]:
        """What the parts of the weight become: the arguments of the attention function, or what a method returns."""
        assert self.fused is not None
        method = self.fused.method
        seen: dict[str, Tensor] = {}
        home: Any = functional
        name = "scaled_dot_product_attention"
        if self.fused.function:
            home, name = sys.modules[type(self.module).__module__], self.fused.function
        if method:
            home, name = type(self.module), method
        plain = getattr(home, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            out = plain(*args, **kwargs)
            seen.update(zip("qkvzba", out if method else args[:3], strict=False))
            return out

        with mock.patch.object(home, name, watched):
            output = self.output()
        return {**{key: value.detach() for key, value in seen.items()}, "output": output}


class Sizes:
    """A configuration of experts, whichever names its class has for their sizes."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "act" in name:
            return "silu"
        if "limit" in name or "cap" in name:
            return 7.0
        if "eps" in name:
            return 1e-6
        if "zero_expert" in name:
            return 0
        if "expert" in name and not any(word in name for word in ("size", "dim", "intermediate")):
            return 4
        return 6 if "intermediate" in name or "ffn" in name else 8 if "hidden" in name else 1.7


def stacks_of_transformers() -> Iterator[tuple[str, nn.Module]]:
    """Experts of all models of transformers that have `gate_up_proj`, with the names of their classes."""
    transformers = pytest.importorskip("transformers")
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"^class (\w*Experts)\(nn\.Module\)", text, re.MULTILINE):
            body = text.partition(f"class {name}(")[2].partition("\nclass ")[0]
            if "self.gate_up_proj = nn.Parameter" in body:
                module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
                yield f"{file.parent.name}.{name}", getattr(module, name)(Sizes())


def called_as_experts(module: nn.Module) -> Probe:
    """Experts of a stack, called with tokens that are spread over all of them."""
    drawn(module)
    split = experts(module)
    called = torch.randn(8, 8), torch.arange(8).view(8, 1) % 4, torch.rand(8, 1)
    return Probe(module, module.get_parameter("gate_up_proj"), split, (called, {}))
