"""Optimizers of published packages on ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.marks import only
from tests.harness.published import CASE, DRAWN, Found, Published, check, imported, verdict
from tests.harness.ranks import run

BLOCKS = ((66, 128),)  # whole blocks, others keep 32 bits; one shape, because Inductor compiles each
LARGE = ((65, 64), (64, 130))  # smaller ones keep 32 bits
UNLIKE = ((31, 17), (7, 12), (17, 31))  # equal shapes are stacked, and products of a stack may round otherwise

MANY = ((31, 17), (7, 12), *((32, 16),) * 4)  # of one shape an owner has several, which are stacked

TOGETHER = "updates parameters together"
BY_ITSELF = "the optimizer communicates by itself"


def in_group(kind: Any, params: list[Any], **hypers: Any) -> Any:
    """Those that train both kinds of parameters ask each group which of them it has."""
    return kind([{"params": params, "use_muon": True, **hypers}])


def moonlights(kind: Any, params: list[Any], **hypers: Any) -> Any:
    return kind(muon_params=params, **hypers)


def nanochats(kind: Any, params: list[Any], **hypers: Any) -> Any:
    own = {"kind": "muon", "momentum": 0.95, "ns_steps": 5, "beta2": 0.95, "weight_decay": 0.1}
    return kind([{"params": params, **own, **hypers}])


OPTIMIZERS = {
    "bitsandbytes.optim": (
        Published("AdamW8bit", {"lr": 0.01}, shapes=LARGE),
        Published("AdamW", {"lr": 0.01}),
        Published("Lion8bit", {"lr": 0.01}, shapes=LARGE),
    ),
    "heavyball": (
        Published("AdamW", {"lr": 0.01}, by_line=True),
        Published("Muon", {"lr": 0.01}, DRAWN, by_line=True),
        Published("SOAP", {"lr": 0.01}, shapes=UNLIKE, by_line=True),
        Published("PSGDKron", {"lr": 0.01}, DRAWN, shapes=((16, 24), (24, 8)), by_line=True),
    ),
    "optimuon": (Published("Muon", {"lr": 0.01}, shapes=UNLIKE),),
    "adv_optm": (
        Published("Muon_adv", {"lr": 0.01, "state_precision": "int8_sr"}, "draws random numbers from one generator"),
    ),
    "muon": (
        Published("SingleDeviceMuon", {"lr": 0.01}, shapes=MANY),
        Published("SingleDeviceMuonWithAuxAdam", {"lr": 0.01}, shapes=MANY, build=in_group),
        Published("Muon", {"lr": 0.01}, BY_ITSELF),
        Published("MuonWithAuxAdam", {"lr": 0.01}, BY_ITSELF, build=in_group),
    ),
    "pytorch_optimizer.optimizer": (
        *(
            Published(name, {"lr": 0.01}, shapes=MANY, build=in_group)
            for name in ("Muon", "NorMuon", "AdaMuon", "AdaGO", "MuonClip")
        ),
        *(Published(name, {"lr": 0.01}, TOGETHER) for name in ("AdaGC", "Adai", "AdamS", "ASGD", "AvaGrad")),
        *(Published(name, {"lr": 1.0}, TOGETHER) for name in ("DAdaptAdam", "DAdaptSGD", "Prodigy")),
        Published("Ranger21", {"lr": 0.01, "num_iterations": 100}, TOGETHER),
    ),
    "schedulefree": (
        Published("AdamWScheduleFree", {"lr": 0.01, "foreach": False}),
        Published("SGDScheduleFree", {"lr": 0.01, "foreach": False}),
        Published("RAdamScheduleFree", {"lr": 0.01, "foreach": False}),
    ),
    "timm.optim": (Published("Muon", {"lr": 0.01}, shapes=MANY),),
    "torchao.optim": (
        Published("AdamW8bit", {"lr": 0.01}, shapes=BLOCKS),
        Published("AdamW4bit", {"lr": 0.01}, shapes=BLOCKS),
    ),
    # Files of Moonlight (examples/) and nanochat, if their folders are on PYTHONPATH.
    "toy_train": (Published("Muon", {"lr": 0.01}, shapes=MANY, build=moonlights),),
    "nanochat.optim": (Published("MuonAdamW", {"lr": 0.01}, BY_ITSELF, shapes=MANY[2:], build=nanochats),),
}
NAMED = {f"{package}-{one}": (package, one) for package, several in OPTIMIZERS.items() for one in several}


def loaded(package: str) -> Any:
    """Import a package; without it, skip the test."""
    module = imported(package)
    if package == "heavyball":
        module.utils.compile_mode = None  # Inductor would take a minute for each optimizer
    return module


def on_rank(name: str) -> Found:
    package, one = NAMED[name]
    return verdict(one, loaded(package))


@pytest.mark.parametrize("name", only([("schedulefree-AdamWScheduleFree",)], list(NAMED)))
def test_optimizer(name: str) -> None:
    package, one = NAMED[name]
    loaded(package)
    check(run(CASE.world, on_rank, name), one, f"{name} {CASE}")
