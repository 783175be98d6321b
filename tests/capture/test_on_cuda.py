"""Captures of parameters on a CUDA device, which need no device: what the step makes lies where the parameter lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Muon, Optimizer

from canzona_compile.capture import templates
from canzona_compile.capture.templates import Capture
from canzona_compile.ir.fx_utils import tensor_value
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from tests.harness.traps.grammar import toy

GPU = torch.device("cuda", 0)


# Makes tensors on the parameter's device by name, and compares devices.
NamesTheDevice = toy("names-the-device")("""
    assert grad.device == param.device
    half = torch.full((), 0.5, device=param.device)
    mask = torch.ones_like(grad) if str(param.device).startswith("cuda") else torch.zeros_like(grad)
    param.add_(grad.to(param.device) * half * mask, alpha=-group["lr"])
""")


# Others ask torch.cuda for the device while they are captured, as AdamW does, or decompose matrices there.
MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": Muon,
    "names the device": NamesTheDevice,
}


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is not compared with an eager step: for that there would have to be a device."""
    monkeypatch.setattr(templates, "has_eager_bits", lambda *_: True)


@pytest.mark.parametrize("name", MAKERS)
def test_every_value_is_on_the_device(name: str) -> None:
    optimizer = MAKERS[name]([torch.nn.Parameter(torch.zeros(2, 2))])
    spec = ParameterSpec((16, 8), torch.float32, torch.float32, GPU)
    kind = Capture(optimizer).kind_of(ParamExample(optimizer.param_groups[0], spec, "weight"))
    assert not kind.template.interpreted, kind.template.interpreted
    for template in kind.templates.values():
        values = [v for node in template.graph.nodes if (v := tensor_value(node)) is not None and v.ndim]
        assert values
        assert {v.device for v in values} == {GPU}
