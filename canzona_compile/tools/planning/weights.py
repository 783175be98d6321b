"""Lists the parameters of a model: from a module, such as a config describes, or from a list of shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.canonical_names import canonical_params

SPLITS = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate-up": ("gate_proj", "up_proj")}  # what is fused without them
PACKED = ("gate", "up")  # the halves of a packed weight
MOST_ELEMENTS = 1 << 48  # of a matrix


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A parameter: mostly a matrix, or a stack of experts' matrices, that the matrix optimizer updates.

    Attributes:
        layer: the number of the layer, which decides the pipeline stage.
        tensor_dim: the dim that tensor parallelism shards; None if tensor parallelism replicates the weight.
        experts: whether its first dim counts experts.
        elementwise: whether another optimizer updates it, elementwise: embeddings, head, norms, biases.
        group, member: the index of the parameter group whose hyperparameters it has, and of its optimizer in a chain.
        packed: whether it is gate and up, one after the other in `tensor_dim`.
    """

    name: str
    shape: tuple[int, ...]
    layer: int = 0
    tensor_dim: int | None = None
    experts: bool = False
    elementwise: bool = False
    group: int = 0
    member: int = 0
    packed: bool = False

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
        routed: the fraction of the experts that a token meets; 1 if unknown.
        parameters: all parameters in the order of the model, those that are updated elementwise included; empty if
            there are no others than `weights`.
    """

    name: str
    weights: tuple[ModelWeight, ...]
    layers: int
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    routed: float = 1.0
    parameters: tuple[ModelWeight, ...] = ()

    @property
    def elements(self) -> int:
        return sum(w.elements for w in self.weights)

    @property
    def everything(self) -> tuple[ModelWeight, ...]:
        """All parameters in the order of the model."""
        return self.parameters or self.weights

    @property
    def active(self) -> float:
        """Elements of the weights that a token uses in a product, the head included."""
        return sum(w.elements * self.uses(w) for w in self.everything) + self.tied

    def uses(self, weight: ModelWeight) -> float:
        """How often a token uses each element of a weight in a product, on average."""
        if weight.lookup or len(weight.shape) < 2:
            return 0.0
        return self.routed if weight.experts else 1.0

    @property
    def tied(self) -> int:
        """Elements of an embedding that is the head as well; 0 if there is a head of its own."""
        table = next((w for w in self.everything if w.lookup), None)
        heads = {w.shape for w in self.everything if not w.lookup}
        return 0 if table is None or table.shape in heads else table.elements


def from_shapes(found: Mapping[str, Any], name: str, at: str) -> Model:
    """Read named shapes: {"layers.0.q": [5120, 5120], "layers.0.o": {"shape": [...], "tp": 1, "experts": true}}.

    A parameter that another optimizer updates has {"shape": [...], "elementwise": true}, in any number of dims.
    """
    return model_of_weights(name, [weight_of(key, value, at) for key, value in found.items()], at)


def model_of_weights(name: str, everything: Sequence[ModelWeight], at: str) -> Model:
    """Make a model of all its parameters; raise CanzonaError if none is a matrix."""
    weights = tuple(w for w in everything if not w.elementwise)
    if not weights:
        raise CanzonaError("there are no matrices to plan", at=at, hint='as in {"layers.0.q": [4096, 4096]}')
    return Model(
        name,
        weights,
        1 + max(w.layer for w in weights),
        experts=math.gcd(*(w.shape[0] for w in everything if w.experts)),
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
    return ModelWeight(key, tuple(shape), layer, cut, stack, apart)


def from_module(module: nn.Module, matrices: Collection[str]) -> Model:
    """Make a model of a module on any device.

    A model of transformers says how tensor parallelism lays its weights out, and has a config.
    """
    plan = getattr(module, "tp_plan", None) or {}
    named = canonical_params(module)
    stacks = {n.rpartition(".")[0]: p.shape[0] for n, p in named.items() if p.ndim > 2 and "expert" in n.lower()}
    everything: list[ModelWeight] = []
    for name, param in named.items():
        chosen, shape = param.ndim > 1 and name in matrices, tuple(param.shape)
        if not chosen and not (param.requires_grad and param.numel()):
            continue
        last = everything[-1].layer if everything else 0  # what comes after the last layer lies with it
        style = style_of(name, plan)
        everything.append(
            ModelWeight(
                name,
                shape,
                layer_of(name, last),
                tensor_dim(style, shape),
                experts=len(shape) > 1 + chosen and stacks.get(name.rpartition(".")[0]) == shape[0],
                elementwise=not chosen,
                packed=style.startswith("packed"),
            )
        )
    model = model_of_weights(type(module).__name__, everything, "the module")
    return model if getattr(module, "config", None) is None else with_config(model, module.config)


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """How a plan of transformers, by module or parameter, lays a parameter out; empty if it does not say."""
    anyone = ".".join("*" if part.isdecimal() else part for part in name.split("."))
    return plan.get(anyone) or plan.get(anyone.rpartition(".")[0]) or ""


def tensor_dim(style: str, shape: Sequence[int]) -> int | None:
    """The dim that tensor parallelism shards by a style of transformers; None if each rank has all of it."""
    first, last = max(0, len(shape) - 2), len(shape) - 1
    if style.startswith("embedding"):
        return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)
    if "colwise" in style:
        return first
    return last if "rowwise" in style and last > 0 else None


def with_config(model: Model, config: Any) -> Model:
    """Add what a config of transformers says of heads that tensor parallelism divides, and of experts."""
    own = config.get_text_config() if hasattr(config, "get_text_config") else config

    def count(*names: str) -> int:
        return next((n for n in (getattr(own, name, None) for name in names) if isinstance(n, int)), 0)

    cut = {part for w in model.everything if w.tensor_dim is not None for part in w.name.split(".")}
    met = count("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
    most = max((w.shape[0] for w in model.everything if w.experts), default=0)
    return replace(
        model,
        heads=count("num_attention_heads") if "q_proj" in cut else 0,
        kv_heads=count("num_key_value_heads") if "k_proj" in cut else 0,
        routed=min(1.0, met / most) if met and most else 1.0,
    )


def arranged(model: Model, split: Collection[str]) -> Model:
    """Split packed weights into matrices, or fuse others as Megatron has them: q, k, v and gate, up.

    Args:
        split: the kinds of `SPLITS` whose matrices are apart.
    """
    everything = tuple(fused(apart(model.everything, split), split))
    weights = tuple(w for w in everything if not w.elementwise)
    return replace(model, weights=weights, parameters=() if len(weights) == len(everything) else everything)


def apart(weights: Iterable[ModelWeight], split: Collection[str]) -> Iterable[ModelWeight]:
    """Give packed weights as pieces, which have the names that `wrap(split=)` gives them."""
    for own in weights:
        dim = own.tensor_dim
        if own.packed and dim is not None and "gate-up" in split:
            half = (*own.shape[:dim], own.shape[dim] // 2, *own.shape[dim + 1 :])
            yield from (replace(own, name=f"{own.name}[{part}]", shape=half, packed=False) for part in PACKED)
        else:
            yield own


def fused(weights: Iterable[ModelWeight], split: Collection[str]) -> list[ModelWeight]:
    """Join the rows of weights that lie next to one another in a module, if `split` does not keep them apart."""
    kinds = {part: kind for kind, parts in SPLITS.items() if kind not in split for part in parts}
    found: dict[tuple[str, str, str], list[ModelWeight]] = {}
    for own in weights:
        *_, place, leaf, last = ("", "", *own.name.rsplit(".", 2))
        found.setdefault((place, kinds.get(leaf, leaf), last), []).append(own)
    joined = []
    for (place, kind, last), parts in found.items():
        if len(parts) < 2 or len(parts) < len(SPLITS.get(kind, ())):
            joined += parts
            continue
        name = "qkv_proj" if kind == "qkv" else "gate_up_proj"
        shape = (sum(w.shape[0] for w in parts), *parts[0].shape[1:])
        joined.append(replace(parts[0], name=f"{place}.{name}.{last}", shape=shape))
    return joined


def layer_of(name: str, otherwise: int = 0) -> int:
    """Return the first number in a name: layers.12.attn.q belongs to layer 12."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), otherwise)


def whole(value: Any) -> bool:
    """Tell whether a value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
