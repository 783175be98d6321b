"""A plan of Muon and AdamW together: the same matrices and owners as in a run of `muon_adamw`, and what AdamW does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.planning.figures import LocalForecast
from tests.tools.decoders import BUCKETS, decoder, planned, three

SHAPES: dict[str, Any] = {"embed.weight": {"shape": [64, 32], "elementwise": True}}
for layer in range(2):
    SHAPES[f"layers.{layer}.up.weight"] = [48, 32]
    SHAPES[f"layers.{layer}.down.weight"] = [32, 48]
    SHAPES[f"layers.{layer}.norm.weight"] = {"shape": [32], "elementwise": True}


def test_what_adamw_does_is_counted() -> None:
    made = planned(SHAPES)
    assert made.forecast.optimizer == "Muon+AdamW"
    assert (made.forecast.matrices, made.forecast.elementwise) == (4, 3)
    elements, most = 64 * 32 + 2 * 32, 32 * 32 + 2 * 16
    local = made.forecast.local
    assert isinstance(local, LocalForecast)
    assert (local.optimizers, local.parameters, local.elements, local.most) == (("AdamW",), 3, elements, most)
    assert local.state == 2 * 4 * most + 3 * 4  # two moments, and a counter for each parameter
    assert local.seconds > 0
    for text in (made.to_text(), made.to_markdown()):
        assert "AdamW: 3 parameters" in text
    assert "3 parameters updated elementwise, without communication" in made.to_text()
    assert json.loads(made.to_json())["forecast"]["local"]["state"] == local.state
    muon = planned(SHAPES, optimizer="muon")
    assert [t.owner for t in made.file.tasks] == [t.owner for t in muon.file.tasks]
    assert muon.forecast.local is None


def test_under_zero1_owners_of_slices_share_it() -> None:
    shapes = {**SHAPES, "embed.weight": {"shape": [640, 32], "elementwise": True}}  # which no rank owns alone
    made = planned(shapes, "dp=2", updates="zero1", bucket_bytes=BUCKETS)
    local = made.forecast.local
    assert local.elements / 2 <= local.most < local.elements
    assert local.state > 2 * 4 * local.most
    assert "by the owners of their slices" in made.to_text()


def test_a_module_is_divided_by_hidden_matrices() -> None:
    """Names alone would take the embedding and the head for matrices."""
    made = planned(decoder("three", "meta"))
    assert {task.name for task in made.file.tasks} == {
        name for name in SHAPES if name.endswith(("up.weight", "down.weight"))
    }
    assert made.forecast.elementwise == 5


def test_muons_updates_have_the_size_of_adamws() -> None:
    by_name, default = planned(SHAPES), planned(SHAPES, optimizer="muon")
    given = canzona_compile.chain(
        Muon([nn.Parameter(torch.zeros(2, 2))], lr=3e-4, adjust_lr_fn="match_rms_adamw"),
        AdamW([nn.Parameter(torch.zeros(2))], lr=3e-4),
    )
    assert planned(SHAPES, optimizer=given).fingerprint == by_name.fingerprint
    digests = [dict(made.file.digests)["graphs"] for made in (by_name, default)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("optimizer", "arguments", "words"),
    [
        ("muon+sgd", {}, "there is no optimizer 'muon+sgd'"),
        ("muon+adamw", {"momentum": 0.9}, "muon_adamw(model) failed: TypeError"),
        ("muon+adamw", {"muon": {"momentun": 0.9}}, "muon_adamw(model) failed: TypeError"),
    ],
)
def test_what_is_refused(optimizer: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CanzonaError) as caught:
        planned(SHAPES, optimizer=optimizer, arguments=arguments)
    assert words in caught.value.problem


def test_three_optimizers_need_the_module() -> None:
    with pytest.raises(CanzonaError, match="it is unclear which of the 3 optimizers"):
        planned(SHAPES, optimizer=three(decoder("three")))
