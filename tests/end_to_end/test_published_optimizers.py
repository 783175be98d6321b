"""Optimizers that nobody here wrote, and mixed groups: the plain optimizer's bits over ten steps with a schedule.

Those of torch and of the package pytorch-optimizer. Their calls of `eigh` and `qr` see whole matrices one
at a time, on owners as on one device, so that no bound in ulps is needed anywhere here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import optim
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.harness.layouts import ALONE, Case
from tests.harness.marks import also, only
from tests.harness.ranks import run
from tests.harness.toys import TwoKinds
from tests.harness.training import Training, check, on_ranks, train

STEPS = 10
# Rows and columns that 2 and 3 ranks cannot share evenly, two matrices alike, fewer rows than ranks; then the rest.
# Every shape is captured once per optimizer, which takes most of the time here.
MATRICES = ((31, 17), (31, 17), (2, 20))
REST = ((24, 24),)
VECTORS = ((13,), (2,))


def two_groups(make: Callable[[Any], Optimizer]) -> Callable[[list[Any]], Optimizer]:
    """The first parameters, matrices, in a group with `use_muon`, the rest in one without."""

    def build(params: list[Any]) -> Optimizer:
        count = len(MATRICES)
        groups = ((params[:count], True), (params[count:], False))
        return make([{"params": own, "use_muon": muon} for own, muon in groups if own])

    return build


TORCH_S = (optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam)
TORCH_S += (optim.RMSprop, optim.Rprop)

OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "torch-muon": lambda params: Muon(params[: len(MATRICES)], lr=0.02, weight_decay=0.1),
    "torch-adamw": lambda params: AdamW(params, lr=0.01, weight_decay=0.1),
    "torch-sgd": lambda params: SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    **{f"torch-{kind.__name__.lower()}": partial(kind, lr=0.01) for kind in TORCH_S},
    "mixed": two_groups(TwoKinds),
    "muon": two_groups(lambda groups: pytorch_optimizer.Muon(groups, lr=0.02, weight_decay=0.1)),
    "adamuon": two_groups(lambda groups: pytorch_optimizer.AdaMuon(groups, lr=0.02)),
    "soap": lambda params: pytorch_optimizer.SOAP(params, lr=0.01, precondition_frequency=4),
    "scalable-shampoo": lambda params: pytorch_optimizer.ScalableShampoo(
        params, lr=0.01, start_preconditioning_step=3, preconditioning_compute_steps=4, block_size=16, use_svd=True
    ),
}
OTHERS = [f"torch-{kind.__name__.lower()}" for kind in TORCH_S]
EXACT = [name for name in OPTIMIZERS if name not in OTHERS]


def gentler(optimizer: Optimizer) -> Callable[[int], None]:
    def change(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) / (1 + step / 4)

    return change


TRAININGS = {name: Training(make, (*MATRICES, *REST), STEPS, gentler) for name, make in OPTIMIZERS.items()}
TRAININGS |= {f"{name} with vectors": replace(t, shapes=(*t.shapes, *VECTORS)) for name, t in TRAININGS.items()}
TRAININGS |= {name: replace(TRAININGS[name], shapes=((31, 17), (1, 20))) for name in OTHERS}


INTERPRETED = {"scalable-shampoo"}  # its state holds an object
CASES = [Case("fsdp", (3,)), Case("tp_rows", (2,)), Case("hsdp", (2, 2)), Case("ddp", (2,))]
FAST = [
    (Case("fsdp", (3,)), "torch-muon"),
    (Case("tp_rows", (2,)), "adamuon"),
    (Case("ddp", (2,)), "mixed"),
    (Case("tp_rows", (2,)), "torch-sgd"),
    (Case("ddp", (2,)), "scalable-shampoo"),
]


@pytest.mark.parametrize(("case", "name"), only(FAST, CASES, EXACT), ids=str)
def test_bits(case: Case, name: str) -> None:
    report = check(on_ranks(__name__, name, [case], strategy="owner"), fallbacks=name in INTERPRETED)
    assert bool(report["tasks"]) == (name not in ("torch-adamw", "torch-sgd")), "elementwise work has no owner"


@pytest.mark.parametrize("name", [*also(["mixed", "muon", "adamuon", "soap"]), "torch-adamw"])
def test_bits_with_vectors(name: str) -> None:
    """Biases and norms, sharded as well."""
    check(on_ranks(__name__, f"{name} with vectors", [Case("stack_dim0", (3,))], strategy="owner"))


def train_others(case: Case) -> list[str]:
    """What differs under any of torch's other optimizers."""
    return [what for name in OTHERS for what in train(__name__, name, [case], torch.float32).different]


def test_bits_of_torch_s_other_optimizers() -> None:
    assert run(2, train_others, Case("fsdp", (2,)), after=partial(train_others, ALONE)) == [[], []]
