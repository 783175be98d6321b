"""Every optimizer of the packages that are installed runs as it did, or is refused as it was.

Each trains a few matrices in one process, beside the plain optimizer. tests/golden/verdicts/survey.txt says what came
of it; optimizers that fail by themselves are not in it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from tests.harness.layouts import ALONE
from tests.harness.marks import first
from tests.harness.published import DRAWN, Published, imported, verdict
from tests.harness.verdicts import SURVEY

PACKAGES: dict[str, dict[str, Any]] = {  # with the arguments of every optimizer
    "torch.optim": {},
    "canzona_compile.optimizers": {},
    "pytorch_optimizer.optimizer": {"lr": 0.01},
    "schedulefree": {"lr": 0.01},
    "bitsandbytes.optim": {"lr": 0.01},
    "torchao.optim": {"lr": 0.01},
    "optimuon": {"lr": 0.01},
    "adv_optm": {"lr": 0.01},
}
SHAPES = ((31, 17), (7, 12), (17, 31))  # equal shapes are stacked, and products of a stack may round otherwise


def surveyed() -> list[str]:
    """The optimizers of the golden file, by package and class."""
    return [name.removesuffix(f" {ALONE}") for name in SURVEY.lines() if name.endswith(f" {ALONE}")]


def reached(name: str) -> str:
    """What becomes of an optimizer, in the words of the golden file."""
    package, _, kind = name.rpartition(".")
    module = imported(package)
    found = verdict(Published(kind, PACKAGES[package], shapes=SHAPES), module, case=ALONE)
    if found.reached.startswith("different"):  # it may draw random numbers
        found = verdict(Published(kind, PACKAGES[package], DRAWN, SHAPES), module, case=ALONE)
    return found.reached


@pytest.mark.parametrize("kind", first(surveyed()))
def test_every_optimizer_runs_as_it_did(kind: str) -> None:
    imported(kind.rpartition(".")[0])
    assert SURVEY.mistakes(f"{kind} {ALONE}", reached(kind)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_surveyed(package: str) -> None:
    if find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    assert import_module(package)
    assert any(name.startswith(f"{package}.") for name in surveyed())
