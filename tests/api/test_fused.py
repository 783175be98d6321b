"""Fused weights whose parts are known: each form is proved with the module's own forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from canzona_compile import Split, hidden_matrices
from canzona_compile.api.fused import UNKNOWN
from tests.api.choice_models import ARCHITECTURES
from tests.api.fused_models import (
    ATTENTIONS,
    GATES,
    MLP,
    QKV,
    Fused,
    Probe,
    called_as_experts,
    stacks_of_transformers,
)
from tests.harness.marks import full
from tests.harness.ranks import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers


def said(model: nn.Module) -> dict[str, str]:
    """What is said of fused weights, by name."""
    rows = hidden_matrices(model, batch_dims=True).rows
    found = {row.name: row.why.rpartition("; ")[2] for row in rows if row.kind == "matrix"}
    bare = "hidden matrix", "stack of", "rows are inputs"
    return {name: words for name, words in found.items() if not words.startswith(bare)}


# -- forms ---------------------------------------------------------------------------------------


def probe(fused: Fused) -> Probe:
    """The first module with the weight, after what is said of the weight is what it should be."""
    model = fused.make()
    name, words = next(item for item in said(model).items() if item[0].endswith(fused.weight.replace("/", ".")))
    assert words == fused.words
    return Probe.of(fused, model, name, hidden_matrices(model, batch_dims=True).splits[name])


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


def gated(own: Probe) -> bool:
    """Tell whether the output is zero without gate, and odd in up; or, where 1 is added to up, only zero without gate.

    No other half of the weight has this property: the activation of the gate is not odd.
    """
    before = own.output()
    with own.scaled("gate", 0.0):
        closed = not own.output().any()
    with own.scaled("up", -1.0):
        odd = torch.equal(own.output(), -before)
    with own.scaled("up", 0.0):
        needed = not own.output().any()
    return bool(before.any()) and closed and odd == needed


@pytest.mark.parametrize("name", GATES)
def test_gate_and_up(name: str) -> None:
    assert gated(probe(GATES[name]))


@pytest.mark.full
def test_gate_and_up_of_all_experts_of_transformers() -> None:
    """Whatever their class says of the stack is true. Some say nothing and stay whole, or have a row of their own."""
    silent, wrong, count = set(), [], 0
    for name, module in stacks_of_transformers():
        count += 1
        if not hasattr(module, "is_concatenated"):
            silent.add(name)
        elif not gated(called_as_experts(module)):
            wrong.append(name)
    assert (wrong, count > 60) == ([], True)
    assert "llama4.Llama4TextExperts" in silent


# -- which modules ---------------------------------------------------------------------------------


class Own(nn.MultiheadAttention):
    """A user's attention."""


class GPT2Attention(nn.Module):
    """A module that only has the name of a known one."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(32, 96)
        self.o = nn.Linear(32, 32)
        self.embed_dim, self.is_cross_attention = 96, False


def marked() -> nn.Module:
    own = Own(32, 4)
    own.in_proj_weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    return nn.Sequential(own)


def of_other_size() -> nn.Module:
    model = ARCHITECTURES["gpt2"].make()
    model.get_submodule("transformer.h.0.attn").embed_dim = 31  # type: ignore[assignment]
    return model


FIRST = "transformer.h.0.attn.c_attn.weight"
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "a subclass": (lambda: nn.Sequential(Own(32, 4)), {"0.in_proj_weight": QKV + "thirds of rows"}),
    "the module itself": (lambda: Own(32, 4), {"in_proj_weight": QKV + "thirds of rows"}),
    "separate weights": (lambda: nn.Sequential(nn.MultiheadAttention(32, 4, kdim=16)), {}),
    "a namesake": (lambda: nn.Sequential(GPT2Attention()), {"0.c_attn.weight": UNKNOWN}),
    "parametrized": (lambda: nn.Sequential(weight_norm(nn.Linear(8, 16), "weight")), {}),
    "marked": (marked, {"0.in_proj_weight": "whole: tensor parallelism cuts it, and may have packed its parts"}),
    "another release": (
        of_other_size,
        {FIRST: UNKNOWN, FIRST.replace("0", "1"): QKV + "thirds of columns"},
    ),
    "mamba": (
        ARCHITECTURES["mamba"].make,
        {f"backbone.layers.{i}.mixer.in_proj.weight": UNKNOWN for i in range(2)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_which_modules(case: str) -> None:
    make, expected = CASES[case]
    assert said(make()) == expected


def test_reasons_of_stacks_and_of_what_users_choose() -> None:
    rows = hidden_matrices(ARCHITECTURES["mixtral"].make(), batch_dims=True).rows
    assert "stack of 4 experts, each a hidden matrix; gate and up in halves of rows" in {row.why for row in rows}
    choice = hidden_matrices(nn.Sequential(Own(32, 4)), matrices="0.in_proj_weight", others="*.out_proj.weight")
    assert choice.rows[0].why == "chosen by pattern '0.in_proj_weight'; q, k and v in thirds of rows"
    assert hidden_matrices(nn.Sequential(Own(32, 4)), others="0.in_proj_weight").splits == {}


def in_layout(layout: str) -> dict[str, str]:
    """What is said of the weights of a sharded model."""
    model: Any = GATES["phi3"].make()
    mesh = init_device_mesh(
        "cpu", (1, 2) if "+" in layout else (2,), mesh_dim_names=("dp", "tp")[-len(layout.split("+")) :]
    )
    for layer in model.layers:
        if "tp" in layout:
            parallelize_module(layer, mesh["tp"], {"mlp.gate_up_proj": ColwiseParallel()})
        if "fsdp" in layout:
            fully_shard(layer, mesh=mesh["dp"] if "+" in layout else mesh)
    return {name: words for name, words in said(model).items() if name.startswith("layers.0")}


@pytest.mark.parametrize("layout", ["fsdp", full("tp"), "fsdp+tp"])
def test_tensor_parallel_weights_stay_whole(layout: str) -> None:
    pytest.importorskip("transformers")  # here, as ranks cannot skip
    whole = "whole: tensor parallelism cuts it, and may have packed its parts"
    expected = {
        "layers.0.self_attn.qkv_proj.weight": QKV + "32, 16 and 16 rows",
        "layers.0.mlp.gate_up_proj.weight": whole if "tp" in layout else MLP,
    }
    assert run(2, in_layout, layout) == [expected] * 2


# -- split="auto" ----------------------------------------------------------------------------------


def splits(made: Any) -> dict[str, Split]:
    """The splits of all optimizers of a wrapped chain, by pattern."""
    return {pattern: split for session in made.canzona.sessions for pattern, split in session.options.split}


def attention() -> nn.Module:
    """A model with a fused weight."""
    torch.manual_seed(0)
    return nn.Sequential(nn.MultiheadAttention(16, 2))


AUTO = {"0.in_proj_weight": Split({"q": 16, "k": 16, "v": 16})}
NAMELESS: Callable[[Any], Optimizer] = lambda named: Muon([p for _, p in named])  # noqa: E731


def copied(named: Any) -> Optimizer:
    """An optimizer of master weights."""
    return Muon([nn.Parameter(param.detach().clone()) for _, param in named])


def renamed(named: Any) -> Optimizer:
    return Muon([(f"my.{name}", param) for name, param in named])


@pytest.mark.parametrize("line", ["muon_adamw", "soap_adamw", "kl_soap_adamw"])
def test_auto_is_the_default(line: str) -> None:
    make = getattr(canzona_compile, line)
    assert splits(make(attention())) == splits(make(attention(), split="auto")) == AUTO
    assert splits(make(attention(), split=None)) == splits(make(attention(), split={})) == {}
    own = {"*.in_proj_weight": Split({"qk": 32, "v": 16})}
    assert splits(make(attention(), split=own)) == own
    assert splits(make(attention(), layout={"0.out_proj.weight": None})) == {}


@pytest.mark.parametrize(
    ("make", "expected"), [(Muon, AUTO), (NAMELESS, AUTO), (copied, {}), (renamed, {})], ids=lambda own: str(own)[:12]
)
def test_optimizers_without_the_names_of_the_model(make: Any, expected: dict[str, Split]) -> None:
    """What the optimizer does not hold by its name stays whole; nothing is refused."""
    model = attention()
    made = canzona_compile.optimizer_for(model, make)
    assert splits(made) == expected


def test_names_that_look_like_patterns() -> None:
    model = nn.ModuleDict({"a[b]": nn.MultiheadAttention(16, 2), "a?": nn.MultiheadAttention(16, 2)})
    assert set(splits(canzona_compile.muon_adamw(model))) == {"a[[]b].in_proj_weight", "a[?].in_proj_weight"}


def test_other_names_are_refused() -> None:
    with pytest.raises(canzona_compile.CanzonaError, match="split='automatic' is not"):
        canzona_compile.muon_adamw(attention(), split="automatic")
    with pytest.raises(canzona_compile.CanzonaError, match="split='auto' is not"):
        canzona_compile.wrap(AdamW(attention().parameters()), split="auto")  # type: ignore[arg-type]


@pytest.mark.usefixtures("captures_shared")
def test_a_plan_decides_what_is_split() -> None:
    """A run that follows a plan has its tasks, whether that plan had parts or not."""
    for split, expected in (("auto", AUTO), (None, {})):
        made: Any = canzona_compile.muon_adamw(attention(), split=split)
        for param in made.optimizers[0].param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        made.step()
        plan = copy.deepcopy(made.canzona.plan())
        assert splits(canzona_compile.muon_adamw(attention(), plan=plan)) == expected
