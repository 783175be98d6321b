"""A plan of a given optimizer is the plan of its run: its parameters, whatever their names and wrappers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import canzona_compile
from canzona_compile import optimizers
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.canonical_names import canonical_name, canonical_names
from canzona_compile.machine.hardware import Machine, named_hardware
from canzona_compile.session.params import named_params
from canzona_compile.tools.planning.held import held_by
from canzona_compile.tools.planning.offline import optimizer_named
from canzona_compile.tools.planning.plan import model_of
from tests.harness.marks import full
from tests.harness.ranks import run
from tests.tools.decoders import Decoder, sharded_alone, sharded_run, zero1_run

# -- runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["groups", "muon+adamw", full("three")])
def test_the_plan_of_an_optimizer_is_that_of_its_run(kind: str) -> None:
    for found in run(2, sharded_run, kind, after=partial(sharded_alone, kind)):
        assert set(found.values()) == {found["run"]}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["muon+adamw", "three"])
def test_under_zero1_too(kind: str) -> None:
    for found in run(2, zero1_run, kind):
        assert set(found.values()) == {found["run"]}


# -- which parameters ----------------------------------------------------------------------------------


def names(given: nn.Module, optimizer: Any) -> list[str]:
    return [weight.name for weight in model_of(given, "none", optimizer).weights]


def test_the_parameters_of_the_optimizer_decide() -> None:
    model = Decoder()
    hidden = [p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
    expected = ["layers.1.up.weight", "tok.weight", "layers.0.down.weight"]
    own = torch.optim.Muon([hidden[2], model.tok.weight, hidden[1]])
    assert names(model, own) == expected
    named = torch.optim.Muon(
        [("_orig_mod.module." + n, p) for n, p in zip(expected, own.param_groups[0]["params"], strict=True)]
    )
    with torch.device("meta"):
        copy = Decoder()
    assert names(copy, named) == expected


class Classifier(nn.Module):
    """A convolution, a stack, and a head whose name alone does not tell what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 8))
        self.proj = nn.Linear(8, 8, bias=False)
        self.fc = nn.Linear(8, 8, bias=False)


def test_the_rules_of_hidden_matrices_decide_where_no_optimizer_does() -> None:
    """Also whether a chain's own parameters are matrices. Stacks are: a plan may be of an optimizer that takes them."""
    with torch.device("meta"):
        copy, model = Classifier(), Classifier()
    hidden = ["gate_up_proj", "proj.weight"]
    assert names(copy, "muon") == hidden
    assert names(Decoder(), "muon") == [f"layers.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]
    own = dict(model.named_parameters())
    others = torch.optim.AdamW([own["stem.weight"], own["stem.bias"], own["fc.weight"]])
    takes_stacks = torch.optim.SGD([own[name] for name in hidden])
    assert names(model, canzona_compile.chain(takes_stacks, others)) == hidden
    assert names(copy, takes_stacks) == hidden  # by shapes: the head has that of `proj`


def test_without_names_shapes_tell() -> None:
    model = Decoder()
    with torch.device("meta"):
        copy = Decoder()
    downs = [layer.down.weight for layer in model.layers]
    assert names(copy, torch.optim.Muon([*downs, model.pos.weight])) == [
        *("layers.0.down.weight", "layers.1.down.weight", "pos.weight")
    ]
    ups = [layer.up.weight for layer in model.layers]  # the head, which has their shape, is known by its name
    assert names(copy, torch.optim.Muon(ups)) == ["layers.0.up.weight", "layers.1.up.weight"]
    with pytest.raises(CanzonaError, match=r"holds 1 parameters of shape \[48, 32\], the module has 3"):
        held_by(torch.optim.Muon([ups[0], downs[0], downs[1]]), copy)
    assert held_by(torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]), copy) is None


def test_names_without_wrappers() -> None:
    assert canonical_name("_orig_mod.layers.0._checkpoint_wrapped_module.q.weight") == "layers.0.q.weight"
    assert canonical_names(["_forward_module.module.a", "_forward_module.module.b"]) == ["a", "b"]  # Fabric, DDP in it
    assert canonical_names(["module._orig_mod.a", "_orig_mod.module.b"]) == ["a", "b"]
    assert canonical_names(["module.a", "head"]) == ["module.a", "head"]


def test_patterns_reach_parameters_below_wrappers() -> None:
    model = nn.Sequential()
    model.add_module("_orig_mod", checkpoint_wrapper(nn.Sequential(nn.Linear(8, 24, bias=False))))
    optimizer: Any = torch.optim.Muon(model.parameters())
    canzona_compile.wrap(optimizer, model=model, split={"[0-9].weight": {"q": 8, "k": 8, "v": 8}})
    found = [row.name for row in canzona_compile.explain(optimizer).parameters]
    assert found == ["0.weight[q]", "0.weight[k]", "0.weight[v]"]


def test_names_of_groups_and_of_the_model_are_the_same() -> None:
    pairs = [(name, nn.Parameter(torch.zeros(2, 2))) for name in ("module.a", "module._orig_mod.b")]
    optimizer = torch.optim.Muon(pairs)
    assert [name for name, _, _ in named_params(optimizer)] == ["a", "b"]
    assert [name for name, _, _ in named_params(optimizer, [["a", "b"]])] == ["a", "b"]
    assert [name for name, _, _ in named_params(optimizer, [["module.a", "module.b"]])] == ["module.a", "module.b"]


@pytest.mark.parametrize(("device", "name"), [("cpu", "cpu"), ("cuda", "h100")])
def test_rates_that_are_assumed_anyway_are_no_other_machine(device: str, name: str) -> None:
    rates = named_hardware(name)
    assert Machine(device, "gloo", 1, rates) == Machine(device, "gloo", 1)
    assert Machine("cpu", "gloo", 1, named_hardware("h100")).rates is not None


@pytest.mark.parametrize("name", ["NorMuon", "SOAP", "Shampoo"])
def test_optimizers_of_the_package_have_names(name: str) -> None:
    assert type(optimizer_named(name.lower(), {})) is getattr(optimizers, name)
