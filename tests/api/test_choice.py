"""`hidden_matrices` tells hidden matrices from all other parameters, in any model, sharded and wrapped in any way."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from canzona_compile import CanzonaError, Choice, UnsupportedLayout, hidden_matrices
from tests.api.choice_models import ARCHITECTURES, Architecture
from tests.harness.ranks import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers


def kinds(model: nn.Module, **options: Any) -> dict[str, str]:
    return {row.name: row.kind for row in hidden_matrices(model, **options).rows}


def matrices(model: nn.Module, **options: Any) -> set[str]:
    return {name for name, _ in hidden_matrices(model, **options).matrices}


def routers(choice: Choice) -> set[str]:
    return {row.name for row in choice.rows if row.why == "hidden matrix: router"}


# -- architectures ---------------------------------------------------------------------------------


def truth(architecture: Architecture, names: list[str]) -> dict[str, str]:
    """What is written by hand, for each name; every name has to fit patterns of one kind, and every pattern a name."""
    patterns = [*((p, "matrix") for p in architecture.matrices), *((p, "other") for p in architecture.others)]
    found = {name: {kind for pattern, kind in patterns if fnmatchcase(name, pattern)} for name in names}
    assert [name for name, own in found.items() if len(own) != 1] == []
    assert [p for p, _ in patterns if not any(fnmatchcase(name, p) for name in names)] == []
    return {name: own.pop() for name, own in found.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.make()
    choice = hidden_matrices(model)
    names = [own for own, _ in model.named_parameters()]
    assert {row.name: row.kind for row in choice.rows} == truth(architecture, names)
    assert [row.name for row in choice.rows] == names
    assert routers(choice) == {
        name for name in names if fnmatchcase(name, "*.mlp.gate.*") or name.endswith(".router.weight")
    }
    with torch.device("meta"):
        assert hidden_matrices(architecture.make()) == choice


def test_stacks_of_experts_for_an_optimizer_with_batch_dims() -> None:
    model = ARCHITECTURES["mixtral"].make()
    stacks = {name for name, param in model.named_parameters() if param.ndim == 3}
    assert stacks
    assert matrices(model, batch_dims=True) == matrices(model) | stacks
    vectors = Parts(experts=Parts(up_weight=(4, 1, 8), down_weight=(4, 8, 8)))
    assert matrices(vectors, batch_dims=True) == {"experts.down_weight"}
    assert matrices(ARCHITECTURES["vit"].make(), batch_dims=True) == matrices(ARCHITECTURES["vit"].make())


# -- small models ----------------------------------------------------------------------------------


class Parts(nn.Module):
    """A module of given parts: modules, and parameters of given shapes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.ones(part)) if isinstance(part, tuple) else part)


class TextEmbedding(Parts):
    """Named after what it computes, as a model may be."""


class GatedRMSNorm(Parts):
    """A norm with a weight per head."""


def linear(rows: int = 8, columns: int = 8) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


def layer() -> Parts:
    return Parts(attn=Parts(qkv=linear(24), output=linear()), head=linear())


def tied_before() -> Parts:
    model = Parts(proj=linear(16), embed=nn.Embedding(16, 8))
    model.embed.weight = model.proj.weight
    return model


def tied_after() -> Parts:
    """With as many hidden features as tokens: a head that is there already keeps others from being one."""
    model = Parts(embed=nn.Embedding(8, 8), mix=linear(), decoder=linear(), last=linear())
    model.decoder.weight = model.embed.weight
    return model


def adapted(base: nn.Linear) -> Parts:
    """A layer as peft's LoRA makes it."""
    base.requires_grad_(False)
    down, up = linear(2, base.in_features), linear(base.out_features, 2)
    return Parts(base_layer=base, lora_A=nn.ModuleDict({"default": down}), lora_B=nn.ModuleDict({"default": up}))


def with_adapters() -> Parts:
    embed = nn.Embedding(16, 8).requires_grad_(False)
    return Parts(embed=embed, layers=nn.ModuleList([Parts(q=adapted(linear()))]), decoder=adapted(linear(16)))


Q_FACTORS = {"layers.0.q.lora_A.default.weight", "layers.0.q.lora_B.default.weight"}
SMALL: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "heads in layers are hidden": (
        lambda: Parts(layers=nn.ModuleList([layer(), layer()]), head=linear()),
        {f"layers.{i}.{name}.weight" for i in range(2) for name in ("attn.qkv", "attn.output", "head")},
    ),
    "layers by another name": (
        lambda: Parts(stages=nn.ModuleList([Parts(output=linear())]), trunk=nn.Sequential(layer(), layer())),
        {
            "stages.0.output.weight",
            *(f"trunk.{i}.{n}.weight" for i in range(2) for n in ("attn.qkv", "attn.output", "head")),
        },
    ),
    "a head in a part of a sequence": (
        lambda: nn.Sequential(nn.Embedding(16, 8), linear(), Parts(norm=nn.LayerNorm(8), decode=linear(16))),
        {"1.weight"},
    ),
    "a block alone": (lambda: Parts(attn=Parts(output=linear())), {"attn.output.weight"}),
    "a head by its size": (
        lambda: Parts(embed=nn.Embedding(16, 8), pos=nn.Embedding(32, 8), one=linear(32), two=linear(16)),
        {"one.weight"},
    ),
    "only the last one is": (
        lambda: nn.Sequential(nn.Embedding(16, 8), linear(16), linear(8, 16), linear(16)),
        {"1.weight", "2.weight"},
    ),
    "no embedding, no head": (lambda: nn.Sequential(linear(), nn.GELU(), linear(4)), {"0.weight", "2.weight"}),
    "fc is a head where it is last, as in ResNets": (
        lambda: Parts(stem=nn.Conv2d(4, 8, 3), fc=linear(5)),
        set(),
    ),
    "fc of several modules": (
        lambda: Parts(body=linear(), fc=nn.Sequential(linear(), nn.GELU(), linear(4))),
        {"body.weight", "fc.0.weight"},
    ),
    "fc before another module": (lambda: Parts(fc=linear(), proj=linear(4)), {"fc.weight", "proj.weight"}),
    "fc in layers": (
        lambda: Parts(layers=nn.ModuleList([Parts(fc=linear()), Parts(fc=linear())])),
        {"layers.0.fc.weight", "layers.1.fc.weight"},
    ),
    "fc in a block alone": (lambda: Parts(mlp=Parts(proj=linear(), fc=linear())), {"mlp.proj.weight", "mlp.fc.weight"}),
    "fc before a head": (
        lambda: Parts(embed=nn.Embedding(16, 8), fc=linear(), head=linear(16)),
        {"fc.weight"},
    ),
    "several heads": (lambda: Parts(body=linear(), heads=nn.ModuleList([linear(4), linear(3)])), {"body.weight"}),
    "a head of two": (lambda: Parts(mlp_head=nn.Sequential(linear(), nn.GELU(), linear(4))), {"mlp_head.0.weight"}),
    "tied, and named first": (tied_before, set()),
    "tied, and named last": (tied_after, {"mix.weight", "last.weight"}),
    "a bag": (lambda: Parts(table=nn.EmbeddingBag(16, 8), body=linear()), {"body.weight"}),
    "a model named after embeddings": (
        lambda: Parts(model=TextEmbedding(layers=nn.ModuleList([layer()]), body=linear())),
        {"model.body.weight", *(f"model.layers.0.{name}.weight" for name in ("attn.qkv", "attn.output", "head"))},
    ),
    "a projection in an embedding": (lambda: Parts(embed=TextEmbedding(body=linear()), body=linear()), {"body.weight"}),
    "a linear patch embedding": (lambda: Parts(patch_embed=linear(), body=linear()), {"body.weight"}),
    "tables": (lambda: Parts(pos_embed=(4, 8), wpe=(4, 8), query_tokens=(1, 4, 8), scale_shift_table=(6, 8)), set()),
    "weights on other modules": (
        lambda: Parts(in_proj_weight=(24, 8), w1=(8, 8), wq=(8, 8), A_log=(8, 4), bias=(4, 8)),
        {"in_proj_weight", "w1", "wq"},
    ),
    "attention of torch": (
        lambda: Parts(attention=nn.MultiheadAttention(8, 2)),
        {"attention.in_proj_weight", "attention.out_proj.weight"},
    ),
    "recurrence": (lambda: nn.LSTM(8, 4), {"weight_ih_l0", "weight_hh_l0"}),
    "norms of two dims": (lambda: Parts(a=nn.LayerNorm((4, 8)), b=GatedRMSNorm(weight=(4, 8))), set()),
    "one row": (lambda: Parts(gate=linear(1), up=linear(8, 1)), set()),
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(4, 8, 3)), set()),
    "weight norm": (lambda: Parts(body=weight_norm(linear())), {"body.parametrizations.weight.original1"}),
    "adapters": (with_adapters, Q_FACTORS),
    "adapters by hand": (
        lambda: Parts(base=linear().requires_grad_(False), lora_A=(2, 8), lora_B=(8, 2)),
        {"lora_A", "lora_B"},
    ),
}


def test_routers_have_an_output_per_expert() -> None:
    """A gate of attention heads is none, as nanochat's `ve_gate`: nothing next to it has as many entries."""
    dense = Parts(attn=Parts(ve_gate=linear(2, 12)), mlp=Parts(gate=linear(), up=linear()))
    stack, own = Parts(up_proj=(4, 8, 8)), nn.ModuleList([Parts(gate=linear(3), up=linear()) for _ in range(3)])
    experts = [Parts(gate=linear(4), experts=stack), Parts(router=Parts(gate=linear(3)), gate=linear(5), experts=own)]
    part = Parts(gate=linear(4), experts=Parts(up_proj=(2, 8, 8)))  # a rank with half of the experts
    choice = hidden_matrices(Parts(layers=nn.ModuleList([dense, *experts, part])))
    assert routers(choice) == {"layers.1.gate.weight", "layers.2.router.gate.weight", "layers.3.gate.weight"}
    assert "layers.0.attn.ve_gate.weight" in dict(choice.matrices)


@pytest.mark.parametrize("case", SMALL)
def test_small_models(case: str) -> None:
    make, expected = SMALL[case]
    assert matrices(make()) == expected


def test_frozen_parameters_are_in_neither_list() -> None:
    choice = hidden_matrices(with_adapters())
    frozen = {row.name for row in choice.rows if row.kind == "frozen"}
    assert frozen == {"embed.weight", "layers.0.q.base_layer.weight", "decoder.base_layer.weight"}
    assert not frozen & {name for name, _ in [*choice.matrices, *choice.others]}


# -- what the lists are for ------------------------------------------------------------------------


def test_optimizers_take_the_lists() -> None:
    model = ARCHITECTURES["gpt2"].make()
    choice = hidden_matrices(model)
    given = {id(param) for _, param in [*choice.matrices, *choice.others]}
    assert given == {id(param) for param in model.parameters()}
    muon, adamw = torch.optim.Muon(choice.matrices), torch.optim.AdamW(choice.others)
    assert muon.param_groups[0]["param_names"] == [name for name, _ in choice.matrices]
    assert len(adamw.param_groups[0]["params"]) == len(choice.others)


def test_the_text_groups_layers_and_has_totals() -> None:
    choice = hidden_matrices(ARCHITECTURES["demo"].make())
    text = str(choice)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert ["blocks.*.attention.q_proj.weight", "x 2", "256x256", "131.1 k", "matrix", "hidden matrix"] in rows
    assert "matrices: 14 parameters, 1.475 M elements" in text
    assert "frozen" not in text
    assert choice.to_dict()["rows"][0]["name"] == "embedding.weight"
    assert "frozen: 3 parameters" in str(hidden_matrices(with_adapters()))


def test_a_reason_names_a_parameter_without_a_module() -> None:
    """A list of parameters alone: none of them has a module, or a name of its own in it."""
    rows = hidden_matrices(nn.ParameterList([nn.Parameter(torch.ones(4, 4))])).rows
    assert [(row.name, row.why) for row in rows] == [("0", "0 of ParameterList is not named as a weight")]


def test_the_reason_of_a_last_fc() -> None:
    assert hidden_matrices(Parts(body=linear(), fc=linear())).rows[-1].why == "output head: last module, named fc"


# -- wrapped and sharded ---------------------------------------------------------------------------


def wrapped_in_checkpoints() -> nn.Module:
    model = ARCHITECTURES["demo-untied"].make()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.embedding, model.head = checkpoint_wrapper(model.embedding), checkpoint_wrapper(model.head)
    return model


def layers_compiled() -> nn.Module:
    model = ARCHITECTURES["demo-untied"].make()
    model.blocks[0] = torch.compile(model.blocks[0])
    return torch.compile(model)  # type: ignore[return-value]


@pytest.mark.parametrize("make", [wrapped_in_checkpoints, layers_compiled])
def test_wrappers_change_nothing(make: Callable[[], nn.Module]) -> None:
    assert hidden_matrices(make()) == hidden_matrices(ARCHITECTURES["demo-untied"].make())


def parallel(model: Any, layout: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    if layout == "ddp":
        return torch.compile(DistributedDataParallel(model))  # type: ignore[return-value]
    if layout == "tp":
        for block in model.blocks:
            plan = {"attention.q_proj": ColwiseParallel(), "attention.o_proj": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
        return parallelize_module(model, mesh, {"embedding": RowwiseParallel(), "head": ColwiseParallel()})
    for block in model.blocks:
        fully_shard(block.attention.q_proj, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model.embedding, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded(name: str, layout: str) -> tuple[Choice, bool]:
    """The rows, and whether there are DTensors. Parameters are left out: they cannot be pickled."""
    choice = hidden_matrices(parallel(ARCHITECTURES[name].make(), layout))
    return Choice(choice.rows, [], []), any(isinstance(param, DTensor) for _, param in choice.matrices)


@pytest.mark.parametrize("layout", ["fsdp", "tp", "ddp"])
def test_layouts_change_nothing(layout: str) -> None:
    expected = hidden_matrices(ARCHITECTURES["demo-untied"].make())
    assert run(2, sharded, "demo-untied", layout) == [(expected, layout != "ddp")] * 2


def sharded_and_tied(name: str, ddp: bool) -> Choice:
    model: Any = ARCHITECTURES[name].make()
    for module in reversed(list(model.modules())) if not ddp else ():  # inner ones first
        if type(module).__name__ in ("Conv1D", "MambaMixer", "MambaBlock", "GPT2Block"):
            fully_shard(module)
    return Choice(hidden_matrices(DistributedDataParallel(model) if ddp else fully_shard(model)).rows, [], [])


@pytest.mark.parametrize(("name", "ddp"), [("gpt2", False), ("mamba", False), ("gpt2", True)])
def test_tied_models_in_layouts(name: str, ddp: bool) -> None:
    """The reasons are the same as well: they name other parameters and classes of modules."""
    expected = hidden_matrices(ARCHITECTURES[name].make())
    assert run(2, sharded_and_tied, name, ddp) == [expected] * 2


def flattened() -> str:
    model = FullyShardedDataParallel(ARCHITECTURES["demo"].make(), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(UnsupportedLayout) as caught:
        hidden_matrices(model)
    return str(caught.value.at)


def test_fsdp1() -> None:
    assert run(2, flattened, fresh=True) == ["embedding.weight"] * 2


# -- patterns --------------------------------------------------------------------------------------


def test_patterns_override_both_ways() -> None:
    model = ARCHITECTURES["mixtral"].make()
    choice = hidden_matrices(model, ["lm_head.*", "*.experts.down_proj"], others="*.mlp.gate.weight")
    found, rules = {row.name: row.kind for row in choice.rows}, kinds(model)
    changed = {name: kind for name, kind in found.items() if rules[name] != kind}
    stacks = {f"model.layers.{i}.mlp.experts.down_proj": "matrix" for i in range(2)}
    routers = {f"model.layers.{i}.mlp.gate.weight": "other" for i in range(2)}
    assert changed == {"lm_head.weight": "matrix", **stacks, **routers}


def test_patterns_may_have_the_names_of_wrappers() -> None:
    assert matrices(layers_compiled(), others="blocks.0._orig_mod.*") == set()


def test_patterns_leave_frozen_parameters() -> None:
    assert matrices(with_adapters(), matrices="layers.*") == Q_FACTORS
    assert matrices(with_adapters(), matrices="decoder.*") > Q_FACTORS


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LazyLinear(4)


def body() -> nn.Module:
    return Parts(body=nn.Linear(8, 8), frozen=linear().requires_grad_(False))


def tensor() -> Tensor:
    return torch.ones(2, 2)


MATRICES, OTHERS, MODEL = (
    "hidden_matrices(model, matrices=)",
    "hidden_matrices(model, others=)",
    "hidden_matrices(model)",
)
WRONG: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {  # with where it is
    "fits nothing": (body, {"matrices": "boby.*"}, MATRICES),
    "fits nothing, others": (body, {"others": ["body.*", "boby.*"]}, OTHERS),
    "fits frozen ones": (body, {"matrices": ["frozen.*"]}, MATRICES),
    "is no text": (body, {"others": [3]}, OTHERS),
    "claimed by both": (body, {"matrices": "body.weight", "others": "*"}, "body.weight"),
    "a vector": (body, {"matrices": "body.*"}, "body.bias"),
    "no parameters": (nn.GELU, {}, MODEL),
    "no module": (tensor, {}, MODEL),
    "no shape": (Lazy, {}, "body.weight"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case: str) -> None:
    make, options, where = WRONG[case]
    with pytest.raises(CanzonaError) as caught:
        hidden_matrices(make(), **options)
    assert caught.value.at == where
    assert caught.value.problem


def test_nothing_is_a_matrix() -> None:
    choice = hidden_matrices(nn.LayerNorm(4))
    assert choice.matrices == []
    assert len(choice.others) == 2
