"""What a model says about its parameters: where they are, what is around them, and which are embeddings or heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import nn

from canzona_compile.ir.canonical_names import canonical_name, common_prefix

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
EMBEDDING_CLASS = re.compile(r"embedding|embeds?$", re.IGNORECASE)
EMBEDDING_NAME = re.compile(r"embed|(^|_)(wte|wpe)$", re.IGNORECASE)
PATCHES = re.compile(r"patch_?embed", re.IGNORECASE)  # also where it is a linear module: it reads pixels
POSITIONS = re.compile(r"(^|[._])(pos|position|positions|positional|wpe|token_type|segment)([._]|$)", re.IGNORECASE)
TABLE = re.compile(
    r"embed|(^|_)(wte|wpe|pos|position|positional|tokens?|table|latents?|queries|registers?)(_|$)", re.IGNORECASE
)
NO_WEIGHT = re.compile(r"(^|_)(bias|norm|scale|gamma|mask)(_|$)", re.IGNORECASE)
WEIGHT = re.compile(
    r"(^|_)(weights?\d*|kernel|proj|projection|lora|fc\d*|w\d*|w_?[qkvo]|qkvo?)(_|$)|^(wqkv|qkvo?_?w)$", re.IGNORECASE
)
HEAD = re.compile(
    r"(\w+_)?(heads?|classifiers?|logits)|outputs?|output_(layer|proj|projection)|unembed\w*|score|proj_out|embed_out"
    r"|qa_outputs|fc_out|seq_relationship",
    re.IGNORECASE,
)
HEAD_OF_SEVERAL = re.compile(
    r"(\w+_)?(heads?|classifiers?)|score", re.IGNORECASE
)  # the last of its modules is the head
LAST_HEAD = re.compile(r"fc", re.IGNORECASE)  # a head where it is the last module, as in ResNets
HIDDEN = re.compile(r"attn|attention|mlp|ffn|feed_?forward|block|layer", re.IGNORECASE)
ROUTER = re.compile(r"(^|_)(router|gate)$", re.IGNORECASE)
# Names that peft adds below an adapted layer.
ADAPTERS = re.compile(r"base_layer|modules_to_save|original_module|lora_\w+")


@dataclass(frozen=True, slots=True)
class Site:
    """A place of a parameter in a model. A tied parameter has several.

    Attributes:
        path: the module that it belongs to; for a part of an adapter, the layer that is adapted.
    """

    name: str
    path: str
    leaf: str


class Survey:
    """What a model says about its parameters: where they are, what is around them, which modules are repeated."""

    def __init__(self, model: nn.Module) -> None:
        prefix = common_prefix(canonical_name(name) for name, _ in model.named_parameters())
        self.modules: dict[str, nn.Module] = {}  # by canonical path: a module replaces the wrapper around it
        self.sites: dict[int, list[Site]] = {}
        self.params: dict[int, nn.Parameter] = {}
        for raw, module in model.named_modules():
            path = f"{canonical_name(raw)}.".removeprefix(prefix).removesuffix(".")
            self.modules[path] = module
            for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
                self.params[id(param)] = param
                self.sites.setdefault(id(param), []).append(site_of(path, leaf, module))

    @cached_property
    def layers(self) -> frozenset[str]:
        """The paths of all repeated layers."""
        return frozenset(path for container in self.modules for path in self._layers_in(container))

    def _layers_in(self, container: str) -> Iterator[str]:
        module = self.modules[container]
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            return
        paths = {name: f"{container}.{name}".removeprefix(".") for name, _ in module.named_children()}
        made = {name: path for name, path in paths.items() if any(self.modules[path].children())}
        classes = [class_name(self.modules[path]) for path in made.values()]
        for name, path in made.items():
            # A Sequential may be a whole model; a ModuleDict with names may be one, too.
            alone = isinstance(module, nn.Sequential) and classes.count(class_name(self.modules[path])) == 1
            if not alone and (name.isdigit() or not isinstance(module, nn.ModuleDict)):
                yield path

    def is_convolution(self, param: nn.Parameter) -> bool:
        """Tell whether a parameter is the weight of a convolution."""
        module = self.modules[self.sites[id(param)][0].path]
        return param.ndim > 2 and (isinstance(module, CONVOLUTIONS) or "conv" in class_name(module).lower())

    def rows_are_inputs(self, param: nn.Parameter) -> bool:
        """Tell whether matrices of a weight are [inputs, outputs], as GPT-2's, and experts' of some models."""
        module = self.modules[self.sites[id(param)][0].path]
        if param.ndim == 2:
            return any(base.__name__ == "Conv1D" for base in type(module).__mro__)
        return param.ndim == 3 and (getattr(module, "is_transposed", False) is True or "Llama4" in class_name(module))

    def is_router(self, site: Site, outputs: int) -> bool:
        """Tell whether a weight named as one scores experts: it has an output for each, and they are next to it.

        A rank may hold a part of them.
        """
        path, above = site.path, [*upwards(site.path), ""]
        if not (ROUTER.search(path.rpartition(".")[2]) or "Router" in class_name(self.modules[path])):
            return False
        near = {own: m for own, m in self.modules.items() if {own, own.rpartition(".")[0]} & {*above[1:3]}}
        lists = [len(m) for own, m in near.items() if isinstance(m, nn.ModuleList) and own not in above]
        inside = [p for m in near.values() for p in m.parameters(recurse=False)]
        stacks = [p.shape[0] for p in inside if p.ndim > 2 and not self.is_convolution(p)]
        return any(experts > 1 and outputs % experts == 0 for experts in (*lists, *stacks))

    def in_layers(self, path: str) -> bool:
        """Tell whether a module is a repeated layer or lies in one."""
        return any(above in self.layers for above in upwards(path))

    @cached_property
    def embeddings(self) -> dict[int, str]:
        """Why parameters belong to an embedding, or are tied to one, by id."""
        found = {}
        for key, sites in self.sites.items():
            whys = [self._embedding(site) for site in sites]
            if any(whys):
                tied = [site.name for site, why in zip(sites, whys, strict=True) if bool(why) is not bool(whys[0])]
                found[key] = ", ".join([*filter(None, whys[:1]), *(f"tied to {name}" for name in tied[:1])])
        return found

    def _embedding(self, site: Site) -> str:
        for path in upwards(site.path):
            module = self.modules[path]
            own = class_name(module)
            if isinstance(module, EMBEDDINGS):
                return "embedding"
            # A class may be named after the task of the whole model; such a module has layers.
            if path and EMBEDDING_CLASS.search(own) and not any(layer.startswith(f"{path}.") for layer in self.layers):
                return "embedding" if path == site.path else f"part of {own}"
        last = site.path.rpartition(".")[2]
        if PATCHES.search(last):
            return "patch embedding, by its name"
        linear = is_linear(self.modules[site.path])
        if not linear and (EMBEDDING_NAME.search(last) or TABLE.search(site.leaf)):
            return "embedding or table, by its name"
        return ""

    @cached_property
    def heads(self) -> dict[int, str]:
        """Why parameters belong to an output head, by id."""
        weights = [
            (key, site)
            for key, sites in self.sites.items()
            for site in sites
            if is_wide(self.params[key].shape) and WEIGHT.search(site.leaf) and not self._embedding(site)
        ]
        groups: dict[str, str] = {}  # by the path that is named as a head: the path of its last module with a weight
        for _, site in weights:
            if head := self._named_head(site.path):
                groups[head] = site.path
        found = {path: f"output head, named {head.rpartition('.')[2]}" for head, path in groups.items()}
        if last := self._last_head([site.path for _, site in weights]):
            found.setdefault(weights[-1][1].path, f"output head: last module, named {last}")
        sized = [site.path for key, site in weights if self._has_vocabulary(key) and not self.in_layers(site.path)]
        if sized and not any(key in self.embeddings for key, _ in weights):  # a tied head is the head
            found.setdefault(sized[-1], f"output head: last linear, {self.vocabulary} rows as the embedding")
        return {key: found[site.path] for key, site in weights if site.path in found}

    def _named_head(self, path: str) -> str:
        """The part of a path, outside of repeated layers, that is named as an output head; empty if none is."""
        parts = path.split(".")
        for i, part in enumerate(parts):
            head, last = ".".join(parts[: i + 1]), i == len(parts) - 1
            if head in self.layers:
                return ""
            if HEAD.fullmatch(part) and (last or HEAD_OF_SEVERAL.fullmatch(part)):
                several = isinstance(self.modules[head], nn.ModuleList | nn.ModuleDict)
                return ".".join(parts[: i + 2]) if several else head
            if HIDDEN.search(part):
                return ""
        return ""

    def _last_head(self, paths: Sequence[str]) -> str:
        """The name by which the last of these modules is a head; empty if it is none, or lies in a repeated layer."""
        parts = paths[-1].split(".") if paths and not self.in_layers(paths[-1]) else []
        for part in parts:
            if LAST_HEAD.fullmatch(part):
                return part
            if HIDDEN.search(part):
                break
        return ""

    @cached_property
    def vocabulary(self) -> int:
        """The rows of the largest embedding that is not one of positions; 0 if there is none."""
        found = [
            self.params[key].shape[0]
            for key in self.embeddings
            for site in self.sites[key]
            if isinstance(self.modules[site.path], EMBEDDINGS) and not POSITIONS.search(site.path)
        ]
        return max(found, default=0)

    def _has_vocabulary(self, key: int) -> bool:
        return self.vocabulary > 1 and self.vocabulary in self.params[key].shape


def site_of(path: str, leaf: str, module: nn.Module) -> Site:
    """Find the module to which a parameter belongs in the eyes of a reader: not an adapter or a parametrization."""
    name = f"{path}.{leaf}".removeprefix(".")
    parts = path.split(".")
    if isinstance(module, nn.ParameterDict | nn.ParameterList):
        leaf = parts.pop()
    for i, (part, below) in enumerate(pairwise([*parts, ""])):
        if part == "parametrizations":
            return Site(name, ".".join(parts[:i]), below)
        if ADAPTERS.fullmatch(part):
            return Site(name, ".".join(parts[:i]), leaf)
    return Site(name, ".".join(parts), leaf)


def upwards(path: str) -> Iterator[str]:
    """The path of a module and those of the modules around it, without the model itself."""
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def class_name(module: nn.Module) -> str:
    """The name of a module's class as it was before `fully_shard`."""
    return type(module).__name__.removeprefix("FSDP")


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module multiplies by its weight; Conv1D is the linear module of GPT-2 in transformers."""
    return isinstance(module, nn.Linear) or "Linear" in class_name(module) or class_name(module) == "Conv1D"


def is_wide(shape: Sequence[int]) -> bool:
    """Tell whether at least two dims are larger than one."""
    return sum(size > 1 for size in shape) > 1
