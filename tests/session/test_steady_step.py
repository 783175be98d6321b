"""What a steady step costs the host, counted and not timed."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import canzona_compile
from tests.harness.optimizers import share_captures

SHAPES = ((32, 48), (32, 32), (48, 32), (80, 32))
MOST_CALLS = 9.0  # of Python functions, for each further matrix
MODULES = """
import sys, torch, canzona_compile
param = torch.nn.Parameter(torch.randn(8, 4))
optimizer = canzona_compile.wrap(torch.optim.Muon([param], lr=1e-3))
param.grad = torch.ones_like(param)
optimizer.step()
print(*sys.modules)
"""


@functools.cache
def trained(matrices: int) -> Any:
    """Some small matrices after three steps, with gradients for another one."""
    params = [nn.Parameter(torch.randn(SHAPES[i % len(SHAPES)])) for i in range(matrices)]
    optimizer: Any = canzona_compile.wrap(torch.optim.Muon(params, lr=1e-3))
    share_captures(optimizer)
    for param in params:
        param.grad = torch.randn_like(param)
    for _ in range(3):
        optimizer.step()
    return optimizer


def calls_of_a_step(matrices: int) -> int:
    """Count the Python functions that a steady step calls."""
    optimizer, count = trained(matrices), 0

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # what other tests left behind may run code when it is collected
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


# On more threads a stacked product may round differently; then none is stacked, and each matrix costs more calls.
@pytest.mark.usefixtures("one_thread")
def test_a_matrix_more_costs_few_calls() -> None:
    few, many = calls_of_a_step(32), calls_of_a_step(64)
    assert (many - few) / 32 <= MOST_CALLS


@pytest.mark.usefixtures("one_thread")
def test_small_matrices_that_nobody_sends_are_one_micro_group() -> None:
    """Those alike share their launches then, and the memory of several would be next to nothing."""
    assert len(trained(64).canzona.report().to_dict()["micro_groups"]) == 1


def test_a_step_imports_no_compiler() -> None:
    """Dynamo imports them for hints, logs and debuggers, which takes longer than to capture a small model."""
    ran = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert "torch._dynamo.symbolic_convert" in loaded
    compilers = ("torch._inductor.codecache", "torch._functorch.aot_autograd", "torch.export._trace")
    assert not loaded & {"torch._inductor.compile_fx", "torch._dynamo.testing", "networkx", *compilers}
