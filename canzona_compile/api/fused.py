"""Fused weights whose parts are known: the matrices that modules of torch and transformers keep in one parameter.

A form is known by the class of a module, which may be a base of it: `fully_shard` and users make subclasses. Nothing of
transformers is imported. tests/api/test_fused.py proves each row of the table with the module's own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from canzona_compile.api.survey import Site, Survey, upwards
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.sharding import shard_dim
from canzona_compile.ir.split import Split, looks_fused

UNKNOWN = "whole: its parts are not known"
FRACTIONS = {2: "halves", 3: "thirds"}
MANY = 5  # parts, whose names would be too long a list


@dataclass(frozen=True, slots=True)
class FusedWeight:
    """A fused weight whose parts are known.

    Attributes:
        classes: patterns of the classes of modules that have it, with their modules.
        weight: a pattern of its name in such a module.
        split: its parts, from the module and the words of the name for which the pattern has a star. What the weight's
            shape contradicts is not taken.
    """

    classes: tuple[str, ...]
    weight: str
    split: Callable[..., Split]


def hf(*names: str) -> tuple[str, ...]:
    """Patterns of classes of transformers, from "folder.Class"."""
    return tuple(f"transformers.models.{folder}.*.{own}" for folder, _, own in (name.partition(".") for name in names))


def experts(module: Any) -> Split:
    """Gate and up of a stack whose class says how they lie, as kernels of transformers ask it."""
    half = module.down_proj.shape[1 if module.is_transposed else 2]
    dim = 2 if module.is_transposed else 1
    return Split({"gate": half, "up": half}, dim=dim, interleaved=1 if module.is_concatenated else half)


def gate_up(module: Any) -> Split:
    """Gate and up in halves of the rows of a linear layer."""
    half = module.down_proj.weight.shape[1]
    return Split({"gate": half, "up": half})


def equal(names: str, size: int, dim: int = 0) -> Split:
    """Parts of one size, one after the other."""
    return Split(dict.fromkeys(names.split(), size), dim=dim)


def by_head(names: str, heads: int, size: int) -> Split:
    """Rows of each part for the first head, then for the second one, and so on."""
    return Split(dict.fromkeys(names.split(), heads * size), interleaved=heads)


def qkv(heads: int, groups: int, size: int, blocks: int = 1) -> Split:
    """Rows of q for some heads, and of k and v for groups of them."""
    return Split({"q": heads * size, "k": groups * size, "v": groups * size}, interleaved=blocks)


def adapted_experts(module: Any, adapter: str, dim: int) -> Split:
    """The factors of all experts that an adapter of PEFT has: A's rows by expert, B's columns by index and expert."""
    rank = module.r[adapter]
    return Split({f"expert{i}": rank for i in range(module.num_experts)}, dim=dim, interleaved=rank if dim else 1)


FORMS = (
    FusedWeight(("transformers.models.*",), "gate_up_proj", experts),
    FusedWeight(hf("llama4.Llama4TextExperts"), "gate_up_proj", lambda m: equal("gate up", m.expert_dim, 2)),
    FusedWeight(hf("phi3.Phi3MLP", "glm.GlmMLP", "glm4.Glm4MLP"), "gate_up_proj.weight", gate_up),
    FusedWeight(
        hf("phi3.Phi3Attention"),
        "qkv_proj.weight",
        lambda m: qkv(m.config.num_attention_heads, m.num_key_value_heads, m.head_dim),
    ),
    FusedWeight(
        hf("gpt2.GPT2Attention"),
        "c_attn.weight",
        lambda m: equal("k v" if m.is_cross_attention else "q k v", m.embed_dim, 1),
    ),
    FusedWeight(
        hf("gpt_bigcode.GPTBigCodeAttention"),
        "c_attn.weight",
        lambda m: qkv(m.num_heads, m.kv_heads, m.head_dim, blocks=m.kv_heads),
    ),
    FusedWeight(
        hf("gpt_neox.GPTNeoXAttention"),
        "query_key_value.weight",
        lambda m: by_head("q k v", m.config.num_attention_heads, m.head_size),
    ),
    FusedWeight(
        hf("bloom.BloomAttention"), "query_key_value.weight", lambda m: by_head("q k v", m.num_heads, m.head_dim)
    ),
    FusedWeight(
        hf("falcon.FalconAttention"),
        "query_key_value.weight",
        lambda m: qkv(m.num_heads, m.num_kv_heads, m.head_dim, blocks=m.num_kv_heads),
    ),
    FusedWeight(
        hf("qwen3_next.Qwen3NextAttention", "qwen3_5.Qwen3_5Attention", "qwen3_5_moe.Qwen3_5MoeAttention"),
        "q_proj.weight",
        lambda m: by_head("q gate", m.config.num_attention_heads, m.head_dim),
    ),
    FusedWeight(
        hf("qwen3_next.Qwen3NextGatedDeltaNet"),
        "in_proj_qkvz.weight",
        lambda m: Split(
            {"q": m.key_dim, "k": m.key_dim, "v": m.value_dim, "z": m.value_dim}, interleaved=m.num_k_heads
        ),
    ),
    FusedWeight(
        hf("qwen3_next.Qwen3NextGatedDeltaNet"),
        "in_proj_ba.weight",
        lambda m: by_head("b a", m.num_k_heads, m.num_v_heads // m.num_k_heads),
    ),
    FusedWeight(
        hf("qwen3_5.Qwen3_5GatedDeltaNet", "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet"),
        "in_proj_qkv.weight",
        lambda m: Split({"q": m.key_dim, "k": m.key_dim, "v": m.value_dim}),
    ),
    FusedWeight(("torch.nn.*.MultiheadAttention",), "in_proj_weight", lambda m: equal("q k v", m.embed_dim)),
    FusedWeight(("peft.*.ParamWrapper",), "lora_A.*.weight", lambda m, adapter: adapted_experts(m, adapter, 0)),
    FusedWeight(("peft.*.ParamWrapper",), "lora_B.*.weight", lambda m, adapter: adapted_experts(m, adapter, 1)),
)


def parts_of(survey: Survey, param: nn.Parameter) -> tuple[Split | None, str]:
    """Find the parts of a weight.

    Args:
        param: a parameter of the surveyed model; its shape is that of the whole weight.

    Returns:
        Its split, or None if it is one matrix or its parts are not known; and what to say of it, if anything.
    """
    sites = survey.sites[id(param)]
    found = {known(survey, site, tuple(param.shape)) for site in sites}
    split = found.pop() if len(found) == 1 else None  # layers that share a weight may use it differently
    if split is None:
        if any(site.name != f"{site.path}.{site.leaf}".removeprefix(".") for site in sites):
            return None, ""  # a factor of an adapter, or what a parametrization keeps
        return None, UNKNOWN if looks_fused(f"{sites[0].path}.{sites[0].leaf}") else ""
    if getattr(param, "tensor_model_parallel", False) or cut_beside_fsdp(survey, sites[0], param, split.dim):
        return None, "whole: tensor parallelism cuts it, and may have packed its parts"
    return split, described(split, param.ndim)


def known(survey: Survey, site: Site, shape: Shape) -> Split | None:
    """The parts of the weight at a place, if there is a row for it."""
    for form in FORMS:
        words, pattern = site.name.split("."), form.weight.split(".")
        own = words[-len(pattern) :]
        if not fnmatchcase(".".join(own), form.weight):
            continue
        module = survey.modules.get(".".join(words[: -len(pattern)]))
        if module is None or not any(fnmatchcase(name, p) for name in classes_of(module) for p in form.classes):
            continue
        try:
            split = form.split(module, *(word for word, p in zip(own, pattern, strict=True) if p == "*"))
        except (AttributeError, TypeError, LookupError, CanzonaError):
            continue  # another release of transformers
        if len(split.parts) > 1 and split.dim < len(shape) and shape[split.dim] == split.length:
            return split
    return None


def classes_of(module: nn.Module) -> Iterator[str]:
    """The full names of a module's class and of its bases."""
    return (f"{own.__module__}.{own.__qualname__}" for own in type(module).__mro__)


def cut_beside_fsdp(survey: Survey, site: Site, param: nn.Parameter, dim: int) -> bool:
    """Tell whether anything but FSDP2 cuts a dim. How it packed the parts, placements do not show."""
    if not isinstance(param, DTensor):
        return False
    mesh = param.device_mesh
    cuts = [(own, mesh.size(i)) for i, own in enumerate(map(shard_dim, param.placements)) if own is not None]
    fsdp = any(isinstance(survey.modules.get(path), FSDPModule) for path in (*upwards(site.path), ""))
    return any(own == dim and ranks > 1 for own, ranks in cuts[1 if fsdp else 0 :])  # FSDP2's mesh dim comes first


def described(split: Split, ndim: int) -> str:
    """Say how the parts lie: "gate and up in halves of rows"."""
    names, sizes = zip(*split.parts, strict=True)
    parts = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) < MANY else f"{len(names)} parts"
    lines = "rows" if split.dim == ndim - 2 else "columns"
    if split.interleaved == sizes[0] == sizes[-1]:
        return f"{parts} in alternating {lines}"
    if split.interleaved > 1:
        return f"{parts} in each of {split.interleaved} blocks of {lines}"
    if len(set(sizes)) == 1:
        return f"{parts} in {FRACTIONS.get(len(sizes), 'equal blocks')} of {lines}"
    return f"{parts} in {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} {lines}"
