"""Lists the parameters of a model: from a preset, a Hugging Face config, a list of shapes, or a module."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.machine.hardware import read_json

PRESETS = Path(__file__).parents[2] / "data" / "qwen3.json"
SPLITS = ("qkv", "gate-up")
MOST_ELEMENTS = 1 << 48  # of a matrix
MOST_MATRICES = 1 << 20
# Fields of a config and their usual values. With another value, layers differ or have other matrices than `Decoder`.
USUAL: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (None, 1),
    "first_k_dense_replace": (None, 0),
    "kv_lora_rank": (None,),
    "mlp_only_layers": (None, []),
    "moe_layer_freq": (None, 1),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
}


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A parameter: mostly a matrix, or a stack of experts' matrices, that the matrix optimizer updates.

    Attributes:
        layer: the number of the layer, which decides the pipeline stage.
        tensor_dim: the dim that tensor parallelism shards; None if tensor parallelism replicates the weight.
        expert: the expert that the matrix belongs to, which decides its coordinate of expert parallelism.
        experts: whether its first dim counts experts.
        elementwise: whether another optimizer updates it, elementwise: embeddings, head, norms, biases.
        group, member: the index of the parameter group whose hyperparameters it has, and of its optimizer in a chain.
    """

    name: str
    shape: tuple[int, ...]
    layer: int = 0
    tensor_dim: int | None = None
    expert: int | None = None
    experts: bool = False
    elementwise: bool = False
    group: int = 0
    member: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def lookup(self) -> bool:
        """Whether, by its name, a token only looks up a row of it."""
        return self.elementwise and any(p in ("wte", "wpe") or "embed" in p for p in self.name.lower().split("."))


@dataclass(frozen=True, slots=True)
class Model:
    """The facts of a model that a plan needs.

    Attributes:
        weights: the matrices that the matrix optimizer updates.
        heads, kv_heads: numbers that the size of tensor parallelism must divide; 0 if unknown.
        experts: a number that the size of expert parallelism must divide; 0 if there are none.
        active: elements of the weights that a token uses, the head included; 0 if unknown.
        parameters: all parameters in the order of the model, those that are updated elementwise included; empty if
            there are no others than `weights`.
    """

    name: str
    weights: tuple[ModelWeight, ...]
    layers: int
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    active: int = 0
    parameters: tuple[ModelWeight, ...] = ()

    @property
    def elements(self) -> int:
        return sum(w.elements for w in self.weights)

    @property
    def everything(self) -> tuple[ModelWeight, ...]:
        """All parameters in the order of the model."""
        return self.parameters or self.weights


@dataclass(frozen=True, slots=True)
class Decoder:
    """The dims of a decoder with grouped-query attention and SwiGLU. If it has experts, it has no other MLPs.

    Each expert has its own matrices, as in Hugging Face's models, because `torch.optim.Muon` takes no stacks.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    top_k: int = 0

    def model(self, name: str, split: tuple[str, ...]) -> Model:
        """Return its model. q, k, v and gate, up are separate weights if `split` says so, else fused as in Megatron.

        Queries and keys are normalized, as in Qwen3.
        """
        inner = tuple(
            replace(w, layer=i, name=f"layers.{i}.{w.name}") for i in range(self.layers) for w in self.layer(split)
        )
        weights = tuple(w for w in inner if not w.elementwise)
        table, last = (self.vocab, self.hidden), self.layers - 1
        everything = [ModelWeight("embed_tokens.weight", table, 0, 0, elementwise=True), *inner]
        everything.append(ModelWeight("norm.weight", (self.hidden,), last, elementwise=True))
        if not self.tied:
            everything.append(ModelWeight("lm_head.weight", table, last, 0, elementwise=True))
        dense = sum(w.elements for w in weights if w.expert is None)
        routed = sum(w.elements for w in weights if w.expert is not None)
        active = dense + (routed * self.top_k // self.experts if self.experts else 0) + everything[0].elements
        counts = (self.layers, self.heads, self.kv_heads, self.experts, active)
        return Model(name, weights, *counts, tuple(everything))

    def layer(self, split: tuple[str, ...]) -> Iterator[ModelWeight]:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if "qkv" in split:
            for name, rows in (("q", query), ("k", key), ("v", key)):
                yield ModelWeight(f"self_attn.{name}_proj.weight", (rows, self.hidden), tensor_dim=0)
        else:
            yield ModelWeight("self_attn.qkv_proj.weight", (query + 2 * key, self.hidden), tensor_dim=0)
        yield ModelWeight("self_attn.o_proj.weight", (self.hidden, query), tensor_dim=1)
        for name in ("q_norm", "k_norm"):
            yield ModelWeight(f"self_attn.{name}.weight", (self.head_dim,), elementwise=True)
        if self.experts:
            yield ModelWeight("mlp.gate.weight", (self.experts, self.hidden), elementwise=True)
        apart = "gate-up" in split
        first = ("gate_proj", "up_proj") if apart else ("gate_up_proj",)
        rows = self.intermediate * (1 if apart else 2)
        for expert in range(self.experts) if self.experts else [None]:
            place = "mlp" if expert is None else f"mlp.experts.{expert}"
            for name in first:
                yield ModelWeight(f"{place}.{name}.weight", (rows, self.hidden), 0, 0, expert)
            yield ModelWeight(f"{place}.down_proj.weight", (self.hidden, self.intermediate), 0, 1, expert)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield ModelWeight(f"{name}.weight", (self.hidden,), elementwise=True)


@cache
def presets() -> Mapping[str, Decoder]:
    """Return Qwen3's models by name."""
    found = json.loads(PRESETS.read_text(encoding="utf-8"))
    return {name: Decoder(**found["_common"], **own) for name, own in found.items() if not name.startswith("_")}


def preset(name: str, split: tuple[str, ...]) -> Model:
    """Return one of `presets`; raise CanzonaError for other names."""
    if name not in presets():
        raise CanzonaError(
            f"there is no model {name!r}",
            at="model",
            hint=f"use one of {', '.join(presets())}, or describe another model with --hf-config or --params",
        )
    return presets()[name].model(name, split)


def from_config(path: Path, split: tuple[str, ...]) -> Model:
    """Make the model of a decoder from its Hugging Face config.json."""
    config = read_object(path)
    at = str(path)
    count, wrong = partial(count_in, config, at), partial(CanzonaError, at=at)
    heads, hidden = count("num_attention_heads"), count("hidden_size")
    head_dim = count("head_dim", default=0)
    if not head_dim:
        if hidden % heads:
            raise wrong(f"hidden_size {hidden} is not a multiple of {heads} heads", hint="add head_dim")
        head_dim = hidden // heads
    kv_heads = count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise wrong(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
            hint="omit num_key_value_heads if every head has its own keys and values",
        )
    experts = count("num_experts", "num_local_experts", "n_routed_experts", default=0)
    wide = ("moe_intermediate_size", "intermediate_size") if experts else ("intermediate_size",)
    top_k = count("num_experts_per_tok", default=1) if experts else 0
    if top_k > experts:
        raise wrong(
            f"num_experts_per_tok {top_k} is more than the {experts} experts",
            hint="num_experts_per_tok is the number of experts that process each token",
        )
    if strange := [name for name, usual in USUAL.items() if config.get(name) not in usual]:
        raise wrong(
            f"{strange[0]} is {config[strange[0]]!r}, so the matrices of each layer are unknown",
            hint="list the matrices and their shapes in a file and pass it as --params",
        )
    decoder = Decoder(
        layers=count("num_hidden_layers"),
        hidden=hidden,
        intermediate=count(*wide),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=count("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        top_k=top_k,
    )
    matrices = decoder.layers * (4 + 3 * max(1, experts))
    largest = hidden * max(2 * decoder.intermediate, 3 * heads * head_dim)
    if matrices > MOST_MATRICES or largest > MOST_ELEMENTS:
        raise wrong(
            f"{matrices} matrices of up to {largest} elements are too many for a model",
            hint="look at num_hidden_layers, hidden_size, intermediate_size, head_dim and the number of experts",
        )
    return decoder.model(str(config.get("model_type", path.stem)), split)


def count_in(config: Mapping[str, Any], at: str, *names: str, default: int | None = None) -> int:
    """Read a positive integer of a config, under the first of some names that it has.

    Args:
        default: what it is where no name is there; None if there must be one.
    """
    name = next((n for n in names if config.get(n) is not None), None)
    if name is None:
        if default is None:
            raise CanzonaError(f"the field {names[0]!r} is missing", at=at, hint="is it the config of a decoder?")
        return default
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise CanzonaError(
            f"{name} is {value!r}, not a positive integer", at=at, hint="copy it from the model's config.json"
        )
    return value


def from_shapes(found: Mapping[str, Any], name: str, at: str) -> Model:
    """Read named shapes: {"layers.0.q": [5120, 5120], "layers.0.o": {"shape": [...], "tp": 1, "experts": true}}.

    A parameter that another optimizer updates has {"shape": [...], "elementwise": true}, in any number of dims.
    """
    everything = [weight_of(key, value, at) for key, value in found.items()]
    weights = tuple(w for w in everything if not w.elementwise)
    if not weights:
        raise CanzonaError("there are no matrices to plan", at=at, hint='as in {"layers.0.q": [4096, 4096]}')
    return Model(
        name,
        weights,
        1 + max(w.layer for w in weights),
        experts=math.gcd(*(w.shape[0] for w in weights if w.experts)),
        parameters=() if len(weights) == len(everything) else tuple(everything),
    )


def weight_of(key: Any, value: Any, at: str) -> ModelWeight:
    """Read one entry of `from_shapes`."""
    if not isinstance(key, str) or not key.isprintable() or not key:
        raise CanzonaError(f"{key!r} is not a parameter name", at=at, hint="use printable characters")
    wrong = partial(CanzonaError, at=f"{at}: {key}")
    entry = value if isinstance(value, Mapping) else {"shape": value}
    shape, apart = entry.get("shape"), entry.get("elementwise", False)
    if not isinstance(apart, bool):
        raise wrong(f"elementwise is {apart!r}, neither true nor false")
    if (
        not isinstance(shape, list | tuple)
        or (len(shape) < 2 and not apart)
        or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape)
    ):
        raise wrong(
            f"its shape is {shape!r}, not two or more positive integers",
            hint='[rows, columns], or {"shape": [rows, columns], "tp": 0}',
        )
    if math.prod(shape) > MOST_ELEMENTS:
        raise wrong(
            f"its shape {list(shape)} has more than 2^48 elements",
            hint="a size is a number of elements",
        )
    if unknown := sorted(set(entry) - {"shape", "tp", "experts", "layer", "elementwise"}):
        raise wrong(
            f"the field {unknown[0]!r} is unknown",
            hint="the fields are shape, tp, experts, layer and elementwise",
        )
    cut = entry.get("tp")
    if cut is not None and (not whole(cut) or cut >= len(shape)):
        raise wrong(
            f"tp is {cut!r}, which is not a dim of {list(shape)}",
            hint="set tp to the dim that tensor parallelism shards, or omit it",
        )
    if entry.get("experts") is True and cut == 0:
        raise wrong("tp is 0, the dim of experts", hint="omit tp: the mesh dim ep distributes experts")
    layer = entry.get("layer", layer_of(key))
    if not whole(layer):
        raise wrong(f"layer is {layer!r}, which is not a layer number", hint="count layers from 0")
    stack = entry.get("experts", False)
    if not isinstance(stack, bool) or (stack and len(shape) < 3):
        raise wrong(
            f"experts is {stack!r} for a shape of {len(shape)} dims",
            hint="set experts to true only if the first of three or more dims counts experts",
        )
    return ModelWeight(key, tuple(shape), layer, cut, None, stack, apart)


def from_module(module: nn.Module, matrices: Collection[str]) -> Model:
    """Make a model of a module on any device."""
    named = canonical_params(module)
    shapes: dict[str, Any] = {n: tuple(p.shape) for n, p in named.items() if p.ndim >= 2 and n in matrices}
    shapes = {
        n: shapes.get(n) or {"shape": tuple(p.shape), "elementwise": True}
        for n, p in named.items()
        if n in shapes or (p.requires_grad and p.numel())
    }
    return from_shapes(shapes, type(module).__name__, "the module")


def layer_of(name: str) -> int:
    """Return the first number in a name: layers.12.attn.q belongs to layer 12."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


def whole(value: Any) -> bool:
    """Tell whether a value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; raise CanzonaError if it does not."""
    found = read_json(path, "write a JSON object")
    if not isinstance(found, dict):
        raise CanzonaError("the file is not a JSON object", at=str(path), hint="as in {...}")
    return found


def parse_split(text: str) -> tuple[str, ...]:
    """Parse the option `split`: "qkv,gate-up", "qkv", "none"."""
    if text == "none":
        return ()
    parts = tuple(text.split(","))
    if unknown := [part for part in parts if part not in SPLITS]:
        raise CanzonaError(
            f"there is no split {unknown[0]!r}", at="split", hint=f"{', '.join(SPLITS)}, both with a comma, or none"
        )
    return parts
