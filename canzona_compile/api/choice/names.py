"""How modules and parameters are called in the models that people train."""

from __future__ import annotations

import re

from torch import nn

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
