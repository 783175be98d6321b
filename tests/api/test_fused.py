"""Fused weights whose parts are known: each form is proved with the module's own forward pass."""

from __future__ import annotations

import pytest
import torch

from canzona_compile import hidden_matrices
from tests.api.fused_models import ATTENTIONS, GATES, Fused, Probe

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers


def probe(fused: Fused) -> Probe:
    """The first module with the weight, after what is said of the weight is what it should be."""
    model = fused.make()
    choice = hidden_matrices(model, batch_dims=True)
    row = next(row for row in choice.rows if row.name.endswith(fused.weight))
    assert row.why.partition("; ")[2] == fused.words
    return Probe(fused, row.name, model, choice.splits[row.name])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_parts_of_attention(name: str) -> None:
    """Each part of the weight becomes one argument of the attention, or a gate of its output; all rows are in one."""
    own = probe(ATTENTIONS[name])
    before = own.became()
    parts = [part for part, _ in own.split.parts]
    assert set(parts) - set(before) <= {"gate"}
    for part in parts:
        with own.scaled(part, 0.0):
            after = own.became()
        changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
        assert changed == {part, "output"} & set(before), part


@pytest.mark.parametrize("name", GATES)
def test_gate_and_up(name: str) -> None:
    """Without gate there is no output. It is linear in up; or, where 1 is added to up, nothing else is without it."""
    own = probe(GATES[name])
    before = own.output()
    assert before.any()
    with own.scaled("gate", 0.0):
        assert not own.output().any()
    with own.scaled("up", 2.0):
        linear = torch.equal(own.output(), 2 * before)
    with own.scaled("up", 0.0):
        assert own.output().any() != linear
