"""Models of Hugging Face configurations, as transformers builds them on the meta device: names and shapes of a run."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import read_json

PRESETS = Path(__file__).parents[2] / "data" / "models.json"
MOST_LAYERS = 4096  # their modules are built one by one
# What a hub's config may have of how its own run ran: code of its own, which is never run, and stored weights.
LEFT_OUT = ("auto_map", "quantization_config", "torch_dtype", "dtype")


@cache
def presets() -> Mapping[str, dict[str, Any]]:
    """Return the configs of models that come with the package, by name."""
    found = json.loads(PRESETS.read_text(encoding="utf-8"))
    return {name: own for name, own in found.items() if not name.startswith("_")}


@cache
def preset_module(name: str) -> nn.Module:
    """Build one of `presets` without memory; raise CanzonaError for other names."""
    if name not in presets():
        raise CanzonaError(
            f"there is no model {name!r}",
            at="model",
            hint=f"use one of {', '.join(presets())}, or describe another model with --hf-config or --params",
        )
    return module_of(presets()[name], name)


def configured_module(path: Path) -> nn.Module:
    """Build the model of a config.json, or of the folder that has one, without memory."""
    file = path / "config.json" if path.is_dir() else path
    return module_of(read_object(file), str(file))


def module_of(config: Mapping[str, Any], at: str) -> nn.Module:
    """Let transformers build the causal language model of a config on the meta device.

    Args:
        at: names the config in errors.

    Raises:
        CanzonaError: transformers is not installed, has no such kind of model, or refuses the config.
    """
    with quiet():
        try:
            from transformers import CONFIG_MAPPING, AutoModelForCausalLM
        except ImportError as error:
            raise CanzonaError(
                f"transformers builds the model, and cannot be imported: {error}",
                at=at,
                hint='run `pip install "canzona-compile[plan]"`, or list the shapes in a file and pass it as --params',
            ) from error
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise CanzonaError(f"transformers has no model_type {kind!r}", at=at, hint=other_kind(config))
        layers = config.get("num_hidden_layers")
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise CanzonaError(
                f"num_hidden_layers is {layers}, more than {MOST_LAYERS}",
                at=at,
                hint="copy it from the model's config.json",
            )
        try:
            made = CONFIG_MAPPING[kind].from_dict({k: v for k, v in config.items() if k not in LEFT_OUT})
            with torch.device("meta"):
                auto: Any = AutoModelForCausalLM
                model: nn.Module = auto.from_config(made, trust_remote_code=False)
        except Exception as error:  # models raise whatever they like
            raise CanzonaError(
                f"transformers cannot build the model: {type(error).__name__}: {str(error).strip()[:300]}",
                at=at,
                hint="is it the config of a causal language model, as on the hub?",
            ) from error
    return model


def other_kind(config: Mapping[str, Any]) -> str:
    """Say what to do with a config whose model_type is unknown: its architecture may be that of a known one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    wanted = config.get("architectures") or [None]
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name == wanted[0]:
            return f'its code is never run; {name}, which it names, is "model_type": "{kind}" of transformers'
    return "code that comes with a config is never run: list the shapes in a file and pass it as --params"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what is said about packages and weights off the page: no weight is used."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; raise CanzonaError if it does not."""
    found = read_json(path, "write a JSON object")
    if not isinstance(found, dict):
        raise CanzonaError("the file is not a JSON object", at=str(path), hint="as in {...}")
    return found
