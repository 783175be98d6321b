"""Input that is a mistake, or looks like one: refused with what is wrong and where, or followed as torch does."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW, Muon

import canzona_compile
from canzona_compile.errors import CanzonaError, EveryRankComputes, InvalidGradient, UnsupportedOptimizer
from tests.harness.beside import BesidePlain
from tests.harness.layouts import full, mesh_of
from tests.harness.marks import crossed
from tests.harness.marks import full as only_full
from tests.harness.mistakes import refused
from tests.harness.model_pairs import update
from tests.harness.optimizers import shared_captures
from tests.harness.pairs import Pair, different, feed, muon, parameters, params_of, same_bits
from tests.harness.plain_shards import HoldingGradients
from tests.harness.ranks import run
from tests.harness.toys import WideFactors
from tests.harness.traps.grammar import toy


@pytest.mark.parametrize("other", [lambda memory: memory[4:], lambda memory: memory[:8].T], ids=["rows", "transposed"])
def test_parameters_that_share_memory_are_refused(other: Callable[[Tensor], Tensor]) -> None:
    memory = torch.randn(12, 4)
    named = [("first", nn.Parameter(memory[:8])), ("second", nn.Parameter(other(memory)))]
    optimizer = canzona_compile.wrap(muon(named))
    feed(optimizer, 0)
    with refused("shares memory with first", kind=UnsupportedOptimizer, at="second"):
        optimizer.step()


def test_parameters_side_by_side_in_one_memory_are_not() -> None:
    memory = torch.randn(12, 4)
    optimizer = canzona_compile.wrap(muon([nn.Parameter(memory[:8]), nn.Parameter(memory[8:])]))
    feed(optimizer, 0)
    optimizer.step()
    apart = [nn.Parameter(p.detach().clone()) for p in (memory[:8], memory[8:])]
    assert all(same_bits(a, b) for a, b in zip(apart, params_of(optimizer), strict=True))


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Rprop])
def test_parameters_without_dims(kind: Any) -> None:
    """A scalar, as CLIP's `logit_scale`, under optimizers that its ranks gather whole."""
    Pair(lambda params: kind(params, lr=0.1), shapes=((), (6, 4))).steps(3)


@pytest.mark.parametrize(
    ("make", "dtypes"),
    crossed([muon, WideFactors], [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]),
    ids=lambda value: str(value) if isinstance(value, tuple) else value.__name__,
)
def test_checkpoints_of_parameters_in_another_dtype(make: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    saved, here = dtypes
    before = make(parameters(dtype=saved))
    feed(before, 0)
    before.step()
    checkpoint = before.state_dict()
    both = [make(parameters(dtype=here)), canzona_compile.wrap(make(parameters(dtype=here)))]
    for optimizer in both:
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
    for i, param in enumerate(params_of(both[0])):  # torch would round the float32 factor to the parameter's dtype
        if "factor" in both[0].state[param]:
            both[0].state[param]["factor"] = checkpoint["state"][i]["factor"].clone()
    for step in range(1, 4):
        for optimizer in both:
            feed(optimizer, step)
            optimizer.step()
    assert different(*both) == []


def test_a_checkpoint_of_another_optimizer() -> None:
    """Torch loads it, and the plain optimizer fails in its step with a KeyError."""
    adamw = torch.optim.AdamW(parameters())
    feed(adamw, 0)
    adamw.step()
    optimizer = canzona_compile.wrap(muon(parameters()))
    optimizer.load_state_dict(adamw.state_dict())
    feed(optimizer, 1)
    with pytest.raises(CanzonaError, match=r"(?s)lacks 'momentum', .*param_groups.0.*optimizer has saved"):
        optimizer.step()


def test_state_of_other_shapes_fails_as_in_the_plain_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    """As far as users set it themselves; what is loaded is compared with the parameter."""
    for optimizer in (muon(parameters([(6, 9)])), canzona_compile.wrap(muon(parameters([(6, 9)])))):
        optimizer.state[params_of(optimizer)[0]]["momentum_buffer"] = torch.zeros(6, 8)
        feed(optimizer, 1)
        with pytest.raises(RuntimeError, match=r"tensor a \(8\) must match"):
            optimizer.step()
    assert "failed while attempting" not in caplog.text


def test_an_option_of_adamw_given_to_the_whole_model() -> None:
    with pytest.raises(TypeError, match=r"muon_adamw.*betas"):
        canzona_compile.muon_adamw(nn.Sequential(nn.Linear(4, 6)), betas=(0.9, 0.95))


def test_ranks_that_a_launcher_started_and_nobody_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    optimizer = canzona_compile.wrap(muon(parameters()))
    feed(optimizer, 0)
    with pytest.warns(EveryRankComputes, match="WORLD_SIZE is 2.*init_process_group"):
        optimizer.step()


Tidy = toy("tidy", end="self.zero_grad()")()  # drops gradients when it is done with them


def test_gradients_that_the_step_drops_are_gone() -> None:
    """So that the next backward pass does not add to them."""
    pair = Pair(Tidy)
    for step in range(3):
        for optimizer in pair.both:
            for i, param in enumerate(params_of(optimizer)):
                (param * torch.full_like(param, step + i + 0.5)).sum().backward()
            optimizer.step()
            assert all(param.grad is None for param in params_of(optimizer))
        assert different(*pair.both) == []


# Keeps every fifth element: one of the second parameter, which counts as contiguous although its stride is not 1.
Sampling = toy(
    "sampling", param="state.setdefault('some', param.detach().clone().ravel()[::5]).lerp_(grad.ravel()[::5], 0.1)"
)()


def test_state_of_one_element_with_another_stride() -> None:
    pair = Pair(Sampling, shapes=((6, 4), (5, 1)))
    pair.steps(3)
    assert all(pair.wrapped.state.values())


def test_names_cannot_steer_a_terminal() -> None:
    param = nn.Parameter(torch.randn(4, 4))
    optimizer: Any = canzona_compile.wrap(Muon([("weight\x1b[31m\n", param)]))
    param.grad = torch.randn(4, 4)
    optimizer.step()
    shown = optimizer.canzona.report().to_text() + str(canzona_compile.explain(optimizer))
    assert "\x1b" not in shown
    assert "weight\\x1b[31m\\n" in shown
    param.grad = torch.randn(4, 4).to_sparse()
    with pytest.raises(CanzonaError) as caught:
        optimizer.step()
    assert "\x1b" not in str(caught.value)


@functools.cache
def saved_plan() -> str:
    """The plan of Muon for `parameters`, as JSON."""
    optimizer = canzona_compile.wrap(muon(parameters()))
    feed(optimizer, 0)
    optimizer.step()
    return optimizer.canzona.plan().to_json()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda plan: plan["tasks"][0].update(owner=[0, 0.7]), "0.7 is not an integer"),
        (lambda plan: plan["tasks"][0].update(owner=[False, 0]), "False is not an integer"),
        (lambda plan: plan["tasks"][0].update(shape=["6", 4]), "'6' is not an integer"),
        (lambda plan: plan["tasks"][0].update(owner=[0]), "an entry is wrong"),
        (lambda plan: plan["tasks"].append(plan["tasks"][0]), "two tasks have one name"),
        (lambda plan: plan.update(depth=1.5), "1.5 is not an integer"),
    ],
)
def test_plans_with_odd_entries_are_refused(change: Any, problem: str) -> None:
    plan = json.loads(saved_plan())
    change(plan)
    with pytest.raises(CanzonaError, match=problem):
        canzona_compile.wrap(muon(parameters()), plan=plan)


def test_gradients_where_no_optimizer_looks() -> None:
    param: Any = nn.Parameter(torch.randn(4, 4))
    optimizer = canzona_compile.wrap(Muon([("weight", param)]))
    param.main_grad = torch.randn(4, 4)
    with refused(r"gradients in param\.main_grad are not read", kind=InvalidGradient, at="weight"):
        optimizer.step()
    param.grad = param.main_grad
    optimizer.step()


# -- gradients that every rank has whole, of parameters that are sharded ----------------------------


def placed(value: Tensor, *placements: Any) -> DTensor:
    return DTensor.from_local(value.clone(), mesh_of((2,), ("tp",)), placements, run_check=False)


def whole_gradients(how: str) -> None:
    """The plain optimizer slices them, and leaves them to the user as they were."""
    tp, random = mesh_of((2,), ("tp",)), torch.Generator().manual_seed(0)
    values = {"up": torch.randn(8, 6, generator=random), "down": torch.randn(6, 7, generator=random)}
    dims = {"up": 0, "down": 1}
    own: Any = {n: nn.Parameter(distribute_tensor(v, tp, [Shard(dims[n])])) for n, v in values.items()}
    plain: Any = {n: nn.Parameter(value.clone()) for n, value in values.items()}
    with shared_captures():
        if how == "chain":
            members = [Muon([("up", own["up"])], lr=0.1), AdamW([("down", own["down"])], lr=0.1)]
            optimizer: Any = canzona_compile.wrap(canzona_compile.chain(*members))
            expected: Any = [Muon([plain["up"]], lr=0.1), AdamW([plain["down"]], lr=0.1)]
        else:
            options: Any = {"split": {"up": {"a": 4, "b": 4}}} if how == "split" else {}
            optimizer = canzona_compile.wrap(Muon([*own.items()], lr=0.1), **options)
            expected = [Muon([*plain.values()], lr=0.1)]
    halves = [nn.Parameter(part.clone()) for part in values["up"].split(4)]
    apart = Muon(halves, lr=0.1)
    for step in range(4):
        for name, value in values.items():
            plain[name].grad = torch.randn(value.shape, generator=random)
            own[name].grad = placed(plain[name].grad, Replicate())
        if step == 2:  # the plan is made anew
            optimizer.load_state_dict(optimizer.state_dict())
            own["up"].grad = distribute_tensor(plain["up"].grad, tp, [Shard(0)])
        given = [param.grad for param in own.values()]
        for half, grad in zip(halves, plain["up"].grad.split(4), strict=True):
            half.grad = grad
        for one in (optimizer, apart, *expected):
            one.step()
        assert [param.grad for param in own.values()] == given
        assert same_bits(full(own["up"]), torch.cat(halves) if how == "split" else plain["up"])
        assert same_bits(full(own["down"]), plain["down"])


@pytest.mark.parametrize("how", ["wrap", "chain", "split"])
def test_gradients_that_every_rank_has_whole(how: str) -> None:
    run(2, whole_gradients, how)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.tokens(tokens))  # type: ignore[no-any-return]


def embeddings_by_rows(fsdp: bool) -> list[str]:
    """As torch's examples of tensor parallelism do it: the gradient of the embedding is whole on every rank."""
    mesh = mesh_of((2, 2), ("dp", "tp")) if fsdp else mesh_of((2,), ("tp",))
    torch.manual_seed(0)
    model = Embeddings()
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    plan: Any = {"tokens": rows, "out": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    with shared_captures():
        optimizer = canzona_compile.wrap(torch.optim.Adam(model.named_parameters(), lr=0.1))
    with BesidePlain() as beside:
        for _ in range(2):
            model(torch.arange(8)).square().sum().backward()
            grad: Any = model.tokens.weight.grad
            assert fsdp or grad.placements == (Replicate(),)
            update([optimizer])
    return beside.finish()


@pytest.mark.parametrize("fsdp", [False, only_full(True)])
def test_embeddings_under_tensor_parallelism(fsdp: bool) -> None:
    assert not any(run(4 if fsdp else 2, embeddings_by_rows, fsdp))


def refused_placements(case: str) -> str:
    tp = mesh_of((2,), ("tp",))
    param = nn.Parameter(distribute_tensor(torch.ones(8, 6), tp, [Shard(0)]))
    placement: Any = {"summands": Partial(), "columns": Shard(1), "held": Replicate()}[case]
    param.grad = placed(torch.ones(8, 3 if case == "columns" else 6), placement)
    kind: Any = HoldingGradients if case == "held" else Muon
    with shared_captures(), pytest.raises(InvalidGradient) as caught:
        canzona_compile.wrap(kind([("up", param)], lr=0.1)).step()
    assert param.grad.placements == (placement,)
    param.grad = param.grad.redistribute(placements=param.placements)  # as the hint says
    with shared_captures():
        canzona_compile.wrap(kind([("up", param)], lr=0.1)).step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("summands", "placements .*Partial.*Each rank has a summand, and nobody has added them"),
        ("columns", r"placements .*\(dim=1\)|placements \(S\(1\)"),
        ("held", "placements"),
    ],
)
def test_gradients_of_other_placements_are_refused(case: str, what: str) -> None:
    for said in run(2, refused_placements, case):
        assert re.search(f"(?s){what}.*up.*redistribute", said), said


def placement_left_out() -> str:
    mesh = mesh_of((2, 1), ("dp", "tp"))
    param = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0), Replicate()]))
    own = torch.ones(4, 6)
    param.grad = DTensor.from_local(own, mesh, [Shard(0)])
    with shared_captures(), pytest.raises(InvalidGradient) as caught:
        canzona_compile.wrap(Muon([("up", param)], lr=0.1)).step()
    param.grad = DTensor.from_local(own, param.device_mesh, param.placements)  # as the hint says
    with shared_captures():
        canzona_compile.wrap(Muon([("up", param)], lr=0.1)).step()
    return str(caught.value)


def test_a_gradient_with_a_placement_left_out_is_refused() -> None:
    for said in run(2, placement_left_out):
        assert re.search("(?s)placements .*up.*DTensor.from_local", said), said


@pytest.mark.parametrize(
    ("name", "value"), [("alpha", "x"), ("alpha", None), ("split", 3), ("plan", 3), ("hardware", 3)]
)
def test_an_option_of_another_kind_is_refused(name: str, value: Any) -> None:
    with refused(f"{name}={value!r} is not ", at=f"the option {name}"):
        canzona_compile.wrap(muon(parameters()), **{name: value})


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(CanzonaError, match="not a int"):
        canzona_compile.wrap(muon(parameters()), model=3)  # type: ignore[arg-type]


def test_a_class_names_the_call_that_has_no_such_option() -> None:
    with pytest.raises(TypeError, match=r"wrap_cls\(\) got an unexpected keyword argument 'stager'"):
        canzona_compile.wrap_cls(Muon, stager=True)  # type: ignore[call-arg]
