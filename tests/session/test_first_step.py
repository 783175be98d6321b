"""What a first step does once for many parameters, counted."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import canzona_compile
from canzona_compile.capture.dynamo_recorder import DynamoRecorder
from canzona_compile.capture.templates import Capture
from canzona_compile.rehearsal.scenario import MOST_PARAMETERS
from canzona_compile.replica import miniature
from canzona_compile.session.bind import Binder

MATRICES = 2 * MOST_PARAMETERS
SHAPES = ((8, 4), (4, 8))


class Counted:
    """Counts the calls of a function."""

    def __init__(self, function: Any) -> None:
        self.calls, self._function = 0, function

    def __get__(self, owner: Any, _kind: Any) -> Any:
        return self if owner is None else lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._function(*args, **kwargs)


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(SHAPES[i % len(SHAPES)])) for i in range(MATRICES)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def test_each_kind_is_captured_and_asked_once(parameters: list[nn.Parameter]) -> None:
    kinds, asked, dims = Counted(Capture.kind_of), Counted(DynamoRecorder.ask), Counted(Binder._dims)
    with (
        patch.object(Capture, "kind_of", kinds),
        patch.object(DynamoRecorder, "ask", asked),
        patch.object(Binder, "_dims", dims),
    ):
        optimizer = canzona_compile.wrap(torch.optim.Muon(parameters, lr=1e-3))
        optimizer.step()
    assert optimizer.canzona.report().captures == len(SHAPES)
    assert kinds.calls == len(SHAPES)
    assert asked.calls <= 8 * len(SHAPES)  # the trace, its parity with the eager step, the steps ahead, the step
    assert dims.calls <= 2 * MATRICES


class WithLists(torch.optim.Muon):
    """Holds its parameters once more, as nothing else leads from an object to them."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=1e-3)
        self.listed = {param: i for i, param in enumerate(params)}


@pytest.mark.parametrize(("make", "held"), [(torch.optim.Muon, 1), (WithLists, MATRICES)])
def test_only_parameters_that_take_part_are_made_small(parameters: list[nn.Parameter], make: Any, held: int) -> None:
    small = Counted(miniature.small)
    optimizer = make(parameters)
    with patch.object(miniature, "small", small):
        made = miniature.Miniature(optimizer, [[0]])
    assert small.calls == held
    assert len(made.params) == 1
    if held > 1:
        assert list(made.optimizer.listed.values()) == list(range(MATRICES))  # type: ignore[attr-defined]
        assert not {id(key) for key in made.optimizer.listed} & {id(param) for param in parameters}  # type: ignore[attr-defined]


def test_identities_and_addresses_lead_to_parameters(parameters: list[nn.Parameter]) -> None:
    for value in (id(parameters[5]), [parameters[5].data_ptr()], {"a": (parameters[5],)}, {parameters[5]: 1}, len):
        assert miniature.may_lead_to_tensors({"deep": [value]})
    assert not miniature.may_lead_to_tensors({"lr": 0.1, "betas": (0.9, 0.95), "steps": 10**6, None: torch.float32})
