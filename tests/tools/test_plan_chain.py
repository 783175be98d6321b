"""A plan of Muon and AdamW together: the same matrices and owners as in a run of `muon_adamw`, and what AdamW does."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.planning.figures import LocalForecast
from tests.harness.marks import full
from tests.harness.optimizers import share_captures
from tests.harness.ranks import run
from tests.session.test_planned_runs import give_gradients

SHAPES: dict[str, Any] = {"embed.weight": {"shape": [64, 32], "elementwise": True}}
for layer in range(2):
    SHAPES[f"layers.{layer}.up.weight"] = [48, 32]
    SHAPES[f"layers.{layer}.down.weight"] = [32, 48]
    SHAPES[f"layers.{layer}.norm.weight"] = {"shape": [32], "elementwise": True}
BUCKETS = 8000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)
        self.norm = nn.RMSNorm(32)


class Decoder(nn.Module):
    """Its embedding and its head have no usual name: types and sizes tell."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = nn.Linear(32, 64, bias=False)


def on_meta() -> Decoder:
    with torch.device("meta"):
        return Decoder()


def planned(model: Any, mesh: str = "fsdp=2", optimizer: Any = "muon+adamw", **options: Any) -> Any:
    return canzona_compile.plan(
        model, mesh=mesh, optimizer=optimizer, hardware="cpu", alternatives=False, **{"split": "none", **options}
    )


def three(model: nn.Module) -> canzona_compile.Chain:
    """Two optimizers with matrices, in another order than the model's, and AdamW with two groups."""
    choice = canzona_compile.hidden_matrices(model)
    ups, downs = ([pair for pair in choice.matrices if word in pair[0]] for word in ("up", "down"))
    return canzona_compile.chain(
        Muon(downs[::-1], lr=0.02),
        Muon(ups, lr=0.01, nesterov=False, weight_decay=0.0),
        AdamW([{"params": choice.others[:1]}, {"params": choice.others[1:], "weight_decay": 0.0}], lr=1e-3),
    )


# -- runs ----------------------------------------------------------------------------------------------


def sharded_run(kind: str) -> dict[str, str]:
    """The fingerprint of a run under FSDP2, and on rank 0 those of the plans that its user can make of it."""
    torch.manual_seed(0)
    model: Any = Decoder()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = stepped(model, kind)
    ran = optimizer.canzona.plan().fingerprint  # type: ignore[attr-defined]
    if dist.get_rank() > 0:
        return {"run": ran}
    meta = on_meta()
    found = {
        "run": ran,
        "its model": planned(model, optimizer=optimizer).fingerprint,
        "its optimizer, by names": planned(meta, optimizer=optimizer).fingerprint,
    }
    return found if kind == "three" else {**found, "its name": planned(meta).fingerprint}


def stepped(model: nn.Module, kind: str) -> Any:
    """A wrapped chain after two steps."""
    if kind == "three":
        optimizer = canzona_compile.wrap(three(model), hardware="cpu")
    else:
        optimizer = canzona_compile.muon_adamw(model, hardware="cpu")
    share_captures(optimizer)
    for _ in range(2):
        give_gradients(list(model.parameters()))
        optimizer.step()
    return optimizer


def sharded_alone(kind: str) -> None:
    """What a rank would capture twice: for its run, and for its plans."""
    model = Decoder()
    planned(model, optimizer=stepped(model, kind))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["muon+adamw", full("three")])
def test_the_plan_of_a_chain_is_that_of_its_run(kind: str) -> None:
    for found in run(2, sharded_run, kind, after=partial(sharded_alone, kind)):
        assert set(found.values()) == {found["run"]}


def zero1_run(kind: str) -> dict[str, str]:
    """The same under ZeRO-1."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Decoder()
    options: dict[str, Any] = {"hardware": "cpu", "bucket_bytes": BUCKETS}
    if kind == "three":
        optimizer = canzona_compile.zero1(model, three(model), mesh=mesh, **options)
    else:
        optimizer = canzona_compile.muon_adamw(model, zero1=mesh, **options)
    give_gradients_of_zero1(model)
    optimizer.step()
    offline = partial(planned, mesh="dp=2", updates="zero1", bucket_bytes=BUCKETS)
    found = {
        "run": optimizer.canzona.plan().fingerprint,  # type: ignore[attr-defined]
        "its optimizer": offline(on_meta(), optimizer=three(on_meta()) if kind == "three" else optimizer).fingerprint,
    }
    return found if kind == "three" else {**found, "its name": offline(on_meta()).fingerprint}


def give_gradients_of_zero1(model: Any) -> None:
    hidden = model.tok(torch.arange(8))
    for layer in model.layers:
        hidden = hidden + layer.down(layer.up(layer.norm(hidden)))
    model.last(hidden).square().mean().backward()


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["muon+adamw", "three"])
def test_under_zero1_too(kind: str) -> None:
    for found in run(2, zero1_run, kind):
        assert set(found.values()) == {found["run"]}


# -- figures -------------------------------------------------------------------------------------------


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
    made = planned(on_meta())
    assert {task.name for task in made.file.tasks} == {
        name for name in SHAPES if name.endswith(("up.weight", "down.weight"))
    }
    assert made.forecast.elementwise == 4


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
        planned(SHAPES, optimizer=three(Decoder()))
