"""Plain tensors that are fragments: what cannot be, and who hears of it; and fragments that hold shares of parts."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.optim import AdamW, Muon

import canzona_compile
from canzona_compile import CanzonaError, Split
from tests.harness.layouts import mesh_of
from tests.harness.marks import first
from tests.harness.mistakes import refused
from tests.harness.optimizers import share_captures, shared_captures
from tests.harness.ranks import run


def marked(param: nn.Parameter, dim: Any = 0, stride: int = 1, expert: bool = False) -> nn.Parameter:
    """A parameter with the attributes that Megatron gives to fragments, and to experts, which may be whole."""
    own: Any = param
    own.tensor_model_parallel, own.partition_dim, own.partition_stride = True, dim, stride
    own.allreduce = not expert
    return param


def says(layout: Any, *params: nn.Parameter, **options: Any) -> str:
    """What a step of Muon raises; nothing may be updated then."""
    found = params or (nn.Parameter(torch.ones(4, 6)),)
    for param in found:
        param.grad = torch.ones_like(param)
    optimizer = Muon([(f"layers.{i}", p) for i, p in enumerate(found)], lr=0.1)
    with shared_captures(), refused(unchanged=found) as error:
        canzona_compile.wrap(optimizer, layout=layout, **options).step()
    return str(error.value)


# -- one process -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (lambda name, param: param.nothing, "the function given as layout= raised AttributeError"),
        (lambda name, param: "rows", "layout= gives 'rows' instead of"),
        ({"layers.*": 3}, "layout= gives 3 instead of"),
        ({"other.*": None}, r"'other.\*' matches no parameter; the optimizer has layers.0"),
        (7, "layout= takes patterns of names, a function, a mesh or a process group, not a int"),
    ],
)
def test_refused_in_one_process(layout: Any, what: str) -> None:
    assert re.search(what, says(layout, marked(nn.Parameter(torch.ones(4, 6)))))


def test_a_marked_parameter_is_whole_if_there_are_no_other_ranks() -> None:
    """Megatron marks weights without tensor parallelism as well."""
    plain, param = nn.Parameter(torch.ones(4, 6)), marked(nn.Parameter(torch.ones(4, 6)))
    plain.grad = param.grad = torch.ones_like(param)
    with shared_captures():
        canzona_compile.wrap(Muon([("router", param)], lr=0.1)).step()
    Muon([plain], lr=0.1).step()
    assert torch.equal(param, plain)


def test_a_pattern_may_fit_parameters_of_one_optimizer_of_a_chain_alone() -> None:
    params = {name: nn.Parameter(torch.ones(4, 6)) for name in ("router", "other")}
    for param in params.values():
        param.grad = torch.ones_like(param)
    members = [Muon([("router", params["router"])], lr=0.1), torch.optim.SGD([("other", params["other"])], lr=0.1)]
    canzona_compile.wrap(canzona_compile.chain(*members), layout={"router": None}).step()
    assert not any(torch.equal(param, torch.ones(4, 6)) for param in params.values())


def beside_norms() -> None:
    """An optimizer of a chain has no fragment, as AdamW on a pipeline stage without embeddings."""
    params = {"up": marked(ones(4, 6)), "norm": ones(6)}
    for param in params.values():
        param.grad = torch.ones_like(param)
    members = [Muon([("up", params["up"])], lr=0.1), torch.optim.SGD([("norm", params["norm"])], lr=0.1)]
    with shared_captures():
        canzona_compile.wrap(canzona_compile.chain(*members), layout=mesh_of((2,), ("tp",))).step()
    assert not any(torch.equal(param, torch.ones_like(param)) for param in params.values())


def test_a_mesh_alone_may_concern_some_optimizers_of_a_chain() -> None:
    run(2, beside_norms)


# -- two ranks ---------------------------------------------------------------------------------


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def said(case: str) -> str:
    """What a step says on this rank."""
    mesh, rank = mesh_of((2,), ("tp",)), dist.get_rank()
    match case:
        case "sizes":
            return says({"*": (mesh, [Shard(0)])}, ones(4, 6 - rank))
        case "replicas":
            return says({"*": (mesh, [Replicate()])}, ones(4 + rank, 6))
        case "placements":
            return says({"*": (mesh, [Shard(rank)])}, ones(4, 6))
        case "dtypes":
            return says(mesh, marked(ones(4, 6)) if rank else marked(nn.Parameter(torch.ones(4, 6).bfloat16())))
        case "one alone":
            return says(mesh, marked(ones(4, 6)) if rank else ones(4, 6), strategy="owner")
        case "one fails":
            return says({"*": (mesh, [Shard(0)])} if rank else {"*": (mesh, [Shard(0)] * 2)}, ones(4, 6))
        case "copies":  # they lose their attributes
            return says(mesh, copy.deepcopy(marked(ones(4, 6)))) + "layers.0"
        case "no layout":
            return says(None, marked(ones(4, 6)))
        case "an expert":
            return says(mesh, marked(ones(4, 6), expert=True))
        case "an expert and a group":
            return says(mesh.get_group(), marked(ones(4, 6), expert=True))
        case "an expert in a pattern":
            return says({"*": mesh}, marked(ones(4, 6), expert=True))
        case "an expert on one rank":
            return says(mesh, marked(ones(4, 6), expert=rank == 1))
        case "attributes":
            return says(mesh, marked(ones(4, 6), dim=-1))
        case "partial":
            return says({"*": (mesh, [Partial()])}, ones(4, 6))
        case "dim":
            return says({"*": (mesh, [Shard(2)])}, ones(4, 6))
        case "a DTensor":
            whole = torch.distributed.tensor.distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)], src_data_rank=None)
            return says({"*": (mesh, [Shard(0)])}, nn.Parameter(whole))
        case "parts":
            return says(mesh, marked(ones(4, 6), stride=2))
        case "other blocks":
            return says(mesh, marked(ones(4, 6), stride=2), split={"*": {"gate": 4, "up": 4}})
    raise AssertionError(case)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("sizes", r"do not tile a tensor: of dim 1 ranks hold 6 and 5 entries .* there are \[4, 6\] \[4, 5\]"),
        ("replicas", "of dim 0 ranks hold 4 and 5 entries"),
        ("placements", r"ranks disagree: rank 0 has .*\(S\(0\)\), rank 1 .*\(S\(1\)\)"),
        ("dtypes", "ranks disagree: rank 0 has .*bfloat16"),
        ("one alone", "rank 0 does not hold a fragment of this parameter"),
        ("one fails", "2 placements for a mesh of 1 dims"),
        ("copies", "layout= is only a mesh, but no parameter has the attribute tensor_model_parallel=True"),
        (
            "no layout",
            "tensor_model_parallel says that it is a fragment, but not which ranks(.|\n)*layers.0(.|\n)*layout=mesh",
        ),
        ("an expert", r"(?s)allreduce=False says that it is an expert.*\"\*.experts.\*\": None"),
        ("an expert and a group", "allreduce=False says that it is an expert"),
        ("an expert in a pattern", "allreduce=False says that it is an expert"),
        ("an expert on one rank", "allreduce=False says that it is an expert"),
        ("attributes", "tensor_model_parallel is True, but partition_dim=-1 is not a dim"),
        ("partial", "is neither a shard nor a replica"),
        ("dim", r"layout= says S\(2\), but the fragment has shape \[4, 6\]"),
        ("a DTensor", "the parameter is a DTensor and has its own placements"),
        ("parts", r"a share of 2 parts \(partition_stride\)(.|\n)*interleaved=2"),
        ("other blocks", "a share of 2 parts"),
    ],
)
def test_refused_on_every_rank(case: str, what: str) -> None:
    for text in run(2, said, case):
        assert re.search(what, text), text
        assert "layers.0" in text


EXPERTS: dict[str, Any] = {  # whether ranks hold experts whole, and what layout= says
    "patterns": (True, lambda tp: {"*.experts.*": None, "*": tp}),
    "patterns of groups": (True, lambda tp: {"*.experts.*": None, "*": tp.get_group()}),
    "function": (True, lambda tp: lambda name, param: tp if param.allreduce else None),
    "fragments": (False, lambda tp: {"*.experts.*": (tp, [Shard(0)]), "*": tp}),
    "fragments by function": (False, lambda tp: lambda name, p: (tp.get_group(), [Shard(p.partition_dim)])),
}


def beside_experts(how: str) -> None:
    """A fragment of a matrix and an expert, of the same shape and with the same marks."""
    tp, rank = mesh_of((2,), ("tp",)), dist.get_rank()
    whole, layout = EXPERTS[how]
    random = torch.Generator().manual_seed(0)
    matrix, experts = (torch.randn(8, 6, generator=random) for _ in range(2))
    names = ["up", "mlp.experts.0"]
    own = [
        marked(nn.Parameter(value.chunk(2)[rank].clone()), expert=i == 1) for i, value in enumerate([matrix, experts])
    ]
    plain = [nn.Parameter(matrix), nn.Parameter(experts.chunk(2)[rank].clone() if whole else experts)]
    with shared_captures():
        wrapped = canzona_compile.wrap(Muon([*zip(names, own, strict=True)], lr=0.1), layout=layout(tp))
    expected = Muon(plain, lr=0.1)
    for _ in range(3):
        for i, (mine, theirs) in enumerate(zip(own, plain, strict=True)):
            grad = torch.randn(8, 6, generator=random)
            mine.grad = grad.chunk(2)[rank].clone()
            theirs.grad = mine.grad.clone() if i and whole else grad
        wrapped.step()
        expected.step()
        assert torch.equal(own[0], plain[0].chunk(2)[rank])
        assert torch.equal(own[1], plain[1] if whole else plain[1].chunk(2)[rank])


@pytest.mark.parametrize("how", EXPERTS)
def test_layouts_say_how_experts_lie(how: str) -> None:
    run(2, beside_experts, how)


def without_this_rank() -> str:
    mesh = DeviceMesh("cpu", [0])
    if dist.get_rank() == 0:
        return ""
    return says({"*": (mesh, [Shard(0)])}, ones(4, 6))


def test_a_mesh_without_this_rank() -> None:
    assert re.search(r"rank 1 is not in the mesh of layout=, which has the ranks \[0\]", run(2, without_this_rank)[1])


# -- shares of parts ---------------------------------------------------------------------------


def strided(make: str) -> None:
    """Gate and up in one weight, of which each rank holds a share; the plain optimizer holds them apart."""
    mesh, rank = mesh_of((2,), ("tp",)), dist.get_rank()
    random = torch.Generator().manual_seed(0)
    parts = [nn.Parameter(torch.randn(n, 8, generator=random)) for n in (12, 12)]
    own = marked(nn.Parameter(shares(parts, rank)), stride=2)
    if make == "muon":
        options: dict[str, Any] = {"split": {"fc1": Split({"gate": 12, "up": 12}, interleaved=2)}}
        plain: Any = Muon(parts, lr=0.1)
        wrapped: Any = canzona_compile.wrap(Muon([("fc1", own)], lr=0.1), layout=mesh, **options)
    else:
        plain = AdamW(parts, lr=0.1)
        wrapped = canzona_compile.wrap(AdamW([("fc1", own)], lr=0.1), layout=mesh)
    share_captures(wrapped)
    for step in range(4):
        for part in parts:
            part.grad = torch.randn(part.shape, generator=random)
        own.grad = shares([p.grad for p in parts], rank)
        if step == 2:
            wrapped.load_state_dict(wrapped.state_dict())
        wrapped.step()
        plain.step()
        assert torch.equal(own.detach(), shares(parts, rank)), f"step {step}"
    state = wrapped.state_dict()["state"][0]
    key = "momentum_buffer" if make == "muon" else "exp_avg"
    assert torch.equal(state[key], shares([plain.state[p][key] for p in parts], rank))
    with pytest.raises(CanzonaError, match="layout= is lost"):
        pickle.loads(pickle.dumps(wrapped)).step()


def shares(parts: Any, rank: int) -> Tensor:
    return torch.cat([part.detach().chunk(2)[rank] for part in parts])


@pytest.mark.parametrize("make", first(["muon", "adamw"]))
def test_shares_of_parts(make: str) -> None:
    run(2, strided, make)


def reported(split: Any) -> list[str]:
    """What the report of one step says of a fused weight and of another one."""
    named = [("attention.linear_qkv.weight", marked(ones(6, 6))), ("up.weight", marked(ones(4, 6)))]
    for _, param in named:
        param.grad = torch.ones_like(param)
    layout = mesh_of((2,), ("tp",)) if dist.is_initialized() else None
    with shared_captures():
        optimizer: Any = canzona_compile.wrap(Muon(named, lr=0.1), layout=layout, split=split)
        optimizer.step()
    return [text for text in optimizer.canzona.report().to_dict()["suggestions"] if "split=" in text]


def test_the_report_says_that_a_fused_weight_stays_whole() -> None:
    split = {"*qkv*": {"q": 6, "k": 6}}
    for said, apart in [*zip(run(2, reported, None), run(2, reported, split), strict=True), (reported(None), [])]:
        assert len(said) == 1
        assert "updated as one matrix: attention.linear_qkv.weight" in said[0]
        assert apart == []


def explained() -> list[str]:
    mesh = mesh_of((2,), ("tp",))
    named = [("up", marked(ones(4, 6))), ("down", marked(ones(4, 6), dim=3))]
    optimizer = canzona_compile.wrap(Muon(named, lr=0.1), layout=mesh, strategy="owner")
    return [f"{row.name} {list(row.shape)} {row.how}" for row in canzona_compile.explain(optimizer).parameters]


def test_explain_shows_whole_matrices() -> None:
    for rows in run(2, explained):
        assert rows == ["up [8, 6] compiled", "down [4, 6] refused"]
