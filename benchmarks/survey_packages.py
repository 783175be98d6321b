"""Optimizers of HeavyBall, schedulefree, torchao and bitsandbytes, as far as these packages are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch.optim import SGD, Optimizer

from survey_catalog import Catalog, Params

HEAVYBALL_NAMES = (
    *("SOAP", "SOAPNAdam", "SOAPAdEMAMix", "KLSOAP", "KLShampoo", "Muon", "MuonAdamW", "MuonLaProp", "Scion"),
    *("PSGDKron", "PSGDLRA", "AdamW", "NAdam", "ADOPT", "AdEMAMix", "LaProp", "RMSprop", "SGD", "SFAdamW"),
    *("SUDSAdamW", "OrthoLaProp", "LaPropOrtho", "SignLaProp", "HyperBallAdamW", "SOLP", "HeavySOAP"),
    "Chained",
)
SCHEDULEFREE_NAMES = (
    *("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"),
    *("AdamWScheduleFreeReference", "SGDScheduleFreeReference", "AdamWScheduleFreePaper", "ScheduleFreeWrapper"),
)
TORCHAO_NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8")
BITSANDBYTES_NAMES = ("AdamW", "AdamW8bit", "Adam8bit", "Lion", "Lion8bit", "LAMB8bit", "AdEMAMix8bit")


def of(module: str) -> Callable[[str, Params], Optimizer]:
    """Build optimizers of a module by name, with their defaults."""

    def build(name: str, params: Params) -> Optimizer:
        kind: Any = getattr(importlib.import_module(module), name)
        made: Optimizer = kind(list(params), lr=1e-2)
        return made

    return build


def heavyball(name: str, params: Params) -> Optimizer:
    """An optimizer of HeavyBall, or one that chains two of its transforms."""
    if name != "Chained":
        return of("heavyball")(name, params)
    chainable: Any = importlib.import_module("heavyball.chainable")
    hypers = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0}
    made: Optimizer = chainable.BaseOpt(list(params), hypers, fns=(chainable.exp_avg, chainable.orthogonalize_update))
    return made


def schedulefree(name: str, params: Params) -> Optimizer:
    """An optimizer without schedule, or one around SGD."""
    module: Any = importlib.import_module("schedulefree")
    if name == "ScheduleFreeWrapper":
        made: Optimizer = module.ScheduleFreeWrapper(SGD(params, lr=1e-2))
        return made
    return of("schedulefree")(name, params)


def listed(names: tuple[str, ...]) -> Callable[[], list[str]]:
    """Hand on names."""
    return lambda: list(names)


LARGE = ((64, 65), (130, 64), (64, 65))  # of 4096 elements and more: smaller ones keep 32 bits
BLOCKS = ((64, 64), (130, 128), (64, 64))  # of whole blocks of 256: torchao keeps others in 32 bits

HEAVYBALL = Catalog("heavyball", listed(HEAVYBALL_NAMES), heavyball, compiles=True)
SCHEDULEFREE = Catalog("schedulefree", listed(SCHEDULEFREE_NAMES), schedulefree)
TORCHAO = Catalog("torchao", listed(TORCHAO_NAMES), of("torchao.optim"), BLOCKS, compiles=True)
BITSANDBYTES = Catalog("bitsandbytes", listed(BITSANDBYTES_NAMES), of("bitsandbytes.optim"), LARGE)
