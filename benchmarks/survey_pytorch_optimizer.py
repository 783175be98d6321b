"""Which optimizers of `pytorch-optimizer` are surveyed, and how each is built from a list of matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_optimizer.optimizer as package
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from survey_catalog import Catalog, Params

Build = Callable[[Any, Params], Optimizer]


def hidden(kind: Any, params: Params) -> Optimizer:
    """The Muon family: a group says which of its two algorithms it wants."""
    made: Optimizer = kind([{"params": list(params), "use_muon": True}])
    return made


def around(kind: Any, params: Params) -> Optimizer:
    """Optimizers around another one."""
    made: Optimizer = kind(AdamW(params, lr=1e-3))
    return made


def on_base(kind: Any, params: Params) -> Optimizer:
    """Sharpness-aware ones: they make their base optimizer themselves."""
    made: Optimizer = kind(list(params), base_optimizer=SGD, lr=1e-2)
    return made


def on_model(kind: Any, params: Params) -> Optimizer:
    """Those that ask for a module instead of parameters."""
    made: Optimizer = kind(nn.ParameterList(params))
    return made


def weighted_sharpness(kind: Any, params: Params) -> Optimizer:
    made: Optimizer = kind(nn.ParameterList(params), list(params), base_optimizer=SGD, lr=1e-2)
    return made


def gap_guided(kind: Any, params: Params) -> Optimizer:
    rate = package.SGD(params, lr=1e-2)
    schedule = torch.optim.lr_scheduler.ConstantLR(rate)
    made: Optimizer = kind(list(params), rate, nn.ParameterList(params), schedule)
    return made


def counted(option: str) -> Build:
    """Those that need to know how long the training is, or how much data there is."""

    def build(kind: Any, params: Params) -> Optimizer:
        made: Optimizer = kind(list(params), **{option: 100})
        return made

    return build


BUILDS: Mapping[str, Build] = {
    **dict.fromkeys(("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"), hidden),
    **dict.fromkeys(("Lookahead", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC"), around),
    **dict.fromkeys(("FriendlySAM", "LookSAM", "SAM"), on_base),
    **dict.fromkeys(("AdaLOMO", "AdamMini", "LOMO"), on_model),
    "BSAM": counted("num_data"),
    "GSAM": gap_guided,
    "Ranger21": counted("num_iterations"),
    "WSAM": weighted_sharpness,
}

ABSTRACT = ("BaseOptimizer", "Optimizer")  # bases, no optimizers


def names() -> list[str]:
    """All optimizer classes of the package, those of torch that it hands on among them."""
    found = []
    for name, value in vars(package).items():
        if isinstance(value, type) and issubclass(value, Optimizer) and name not in ABSTRACT:
            found.append(name)
    return sorted(found)


def build(name: str, params: Params) -> Optimizer:
    """One of `names()` with its defaults, or with what it needs at least."""
    kind: Any = getattr(package, name)
    if name in BUILDS:
        return BUILDS[name](kind, params)
    made: Optimizer = kind(list(params))
    return made


CATALOG = Catalog("pytorch-optimizer", names, build)
