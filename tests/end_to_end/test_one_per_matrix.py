"""`one_per_matrix=`: an optimizer object per matrix, with the bits of plain ones made so, and with its own state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import canzona_compile
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from tests.harness.checkpoint_routes import LOAD, SAVE
from tests.harness.checkpointing import END, SAVED, SHAPES, Run, values_of
from tests.harness.layouts import ALONE, Case, full, mesh_of
from tests.harness.marks import only
from tests.harness.mistakes import refused
from tests.harness.model_pairs import update
from tests.harness.own_objects import MAKERS, ByAddress, Oracle
from tests.harness.pairs import Pair, feed, parameters, params_of, same_bits
from tests.harness.ranks import run
from tests.harness.toy_optimizers import PerParameter, cube
from tests.harness.traps.grammar import toy

# It counts outside of the state of parameters, and takes those of any shape.
Tempering = toy(
    "tempering", group='group["steps"] = group.get("steps", 0) + 1', update="grad", scale='1 / group["steps"]'
)()


def rate(step: int) -> float:
    return 0.05 / (1 + step)


def never(_step: int, _place: int) -> bool:
    return False


class Part(Run):
    """A run on this rank, of an optimizer object per matrix; one that loads others begins elsewhere."""

    makers = MAKERS

    def __init__(self, name: str, case: Case, begun: bool = True, **options: Any) -> None:
        super().__init__(name, case, begun=begun, one_per_matrix=MAKERS[name], **options)

    def steps(self, start: int, stop: int, missing: Callable[[int, int], bool] = never) -> None:
        """Take steps; `missing` tells by step and place which gradients are not there."""
        for step in range(start, stop):
            self.optimizer.param_groups[0]["lr"] = rate(step)
            self.feed(step)
            for i, param in enumerate(self.laid.params):
                param.grad = None if missing(step, i) else param.grad
            self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        return [full(param) for param in self.laid.params]


def missing_one(step: int, place: int) -> bool:
    return (step, place) in ((0, 1), (3, 0))


def expected(name: str, stop: int = END, missing: Any = never) -> list[Tensor]:
    oracle = Oracle(name, values_of(-1))
    for step in range(stop):
        oracle.set("lr", rate(step))
        oracle.step([None if missing(step, i) else grad for i, grad in enumerate(values_of(step))])
    return [p.detach() for p in oracle.params]


def different(found: list[Tensor], wanted: list[Tensor]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not same_bits(a, b)]


def train(name: str, case: Case, missing: Any = never, **options: Any) -> tuple[list[int], list[str]]:
    part = Part(name, case, **options)
    part.steps(0, END, missing)
    hows = [row.cell for row in part.optimizer.canzona.explain().parameters]
    return different(part.values(), expected(name, missing=missing)), hows


GOOD = ([], ["own object"] * 3)


@pytest.mark.parametrize("name", MAKERS)
def test_in_one_process(name: str) -> None:
    assert train(name, ALONE) == train(name, ALONE, missing_one) == GOOD


# In the manner of Distributed Shampoo: its constructor puts objects into the state, with parameters' numbers, and on
# itself, which hold parameter groups and views of parameters.
Naming = toy(
    "naming",
    begin="""
    self.distributors = [
        SimpleNamespace(group=group, blocks=[p.detach().view(-1) for p in group["params"]])
        for group in self.param_groups
    ]
    for i, param in enumerate(self.param_groups[0]["params"]):
        self.state[param]["factor"] = Factor(len(param))
        self.state[param]["factor"].name = f"{i}.factor"
    """,
)("""
    state["factor"].matrix += grad @ grad.T
    (held,) = self.distributors
    param.add_(state["factor"].matrix @ grad, alpha=-held.group["lr"])
""")


def test_constructors_may_put_objects_into_the_state_and_hold_groups() -> None:
    plain, own = (Naming(parameters(SHAPES)) for _ in range(2))
    canzona_compile.wrap(own, one_per_matrix=Naming)
    for step in range(3):
        for optimizer in (plain, own):
            optimizer.param_groups[0]["lr"] = rate(step)
            feed(optimizer, step)
            optimizer.step()
    assert different(params_of(own), params_of(plain)) == []


def test_objects_that_have_stepped_are_refused() -> None:
    own = Naming(parameters(SHAPES))
    feed(own, 0)
    own.step()
    canzona_compile.wrap(own, one_per_matrix=Naming)
    with pytest.raises(CanzonaError, match="plain optimizer has already stepped"):
        own.step()


@pytest.mark.parametrize(
    ("name", "case"),
    only(
        [("by address", Case("fsdp", (2,))), ("by index", Case("ddp", (2,))), ("probing", Case("fsdp", (3,)))],
        list(MAKERS),
        [Case("fsdp", (2,)), Case("fsdp", (3,)), Case("ddp", (2,)), Case("tp_columns", (2,))],
    ),
    ids=str,
)
def test_on_ranks(name: str, case: Case) -> None:
    assert run(case.world, train, name, case, missing_one) == [GOOD] * case.world


def test_every_rank_computes_every_matrix() -> None:
    """Their generators are those of the matrix, so the copies do not drift apart."""
    assert run(2, train, "probing", Case("ddp", (2,)), strategy="replicated") == [GOOD] * 2


def under_zero1(name: str) -> list[int]:
    model = nn.ParameterList([nn.Parameter(value) for value in values_of(-1)])
    optimizer = MAKERS[name](list(model))
    canzona_compile.zero1(model, optimizer, mesh=mesh_of((2,), ("dp",)), one_per_matrix=MAKERS[name])
    for step in range(END):
        optimizer.param_groups[0]["lr"] = rate(step)
        sum((param * grad).sum() for param, grad in zip(model, values_of(step), strict=True)).backward()
        update([optimizer])
    return different([param.detach() for param in model], expected(name))


def test_under_zero1() -> None:
    assert run(2, under_zero1, "by address") == [[], []]


# -- checkpoints -----------------------------------------------------------------------------------


def save(name: str, case: Case, folder: Path, ways: list[str]) -> None:
    part = Part(name, case)
    part.steps(0, SAVED)
    for way in ways:
        SAVE[way](part, folder / way)


def load(name: str, case: Case, folder: Path, way: str) -> list[int]:
    part = Part(name, case, begun=False)
    LOAD[way][1](part, folder / LOAD[way][0])
    part.steps(SAVED, END)
    return different(part.values(), expected(name))


@pytest.mark.parametrize(
    ("name", "case"),
    only(
        [("by address", ALONE), ("by index", Case("fsdp", (2,)))],
        list(MAKERS),
        [Case("fsdp", (2,)), Case("ddp", (2,)), ALONE],
    ),
    ids=str,
)
def test_saved_on_two_ranks_and_loaded_on_others(name: str, case: Case, tmp_path: Path) -> None:
    ways = ["shards", "flat shards", "by hand"]
    run(2, save, name, Case("fsdp", (2,)), tmp_path, ways)
    for way in ways:
        found = run(case.world, load, name, case, tmp_path, way, group=bool(case.mesh))
        assert found == [[]] * case.world, way


def test_saved_state_is_plain(tmp_path: Path) -> None:
    part = Part("by address", ALONE)
    part.steps(0, 2)
    torch.save(part.optimizer.state_dict(), tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)["state"][0]
    leaves = {"state/0/0/moment", "state/0/0/factors/0", "state/0/0/wide"}
    assert found.keys() == {*leaves, "notes", "generator"}
    assert found["state/0/0/wide"].dtype == torch.float64


def test_state_that_does_not_fit_is_refused() -> None:
    part = Part("by address", ALONE)
    part.steps(0, 2)
    saved = part.optimizer.state_dict()
    del saved["state"][1]["state/0/0/moment"]
    other = Part("by address", ALONE)
    other.optimizer.load_state_dict(saved)
    with refused("does not fit the optimizer object of this matrix", at="group0.param1"):
        other.steps(2, 3)


def test_state_of_a_plain_optimizer_is_refused() -> None:
    plain = MAKERS["by address"](parameters(SHAPES))
    feed(plain, 0)
    plain.step()
    part = Part("by address", ALONE)
    part.optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(CanzonaError, match="plain optimizer has already stepped"):
        part.steps(0, 1)


def test_what_state_dict_must_not_hold_is_named() -> None:
    part = Part("by index", ALONE)
    part.steps(0, 1)
    own = part.optimizer.state[part.laid.params[1]]["object"].optimizer
    own.count = object()
    with refused(r"has a object at kept/0", at="group0.param1"):
        part.optimizer.state_dict()


def unsaved(case: Case) -> list[tuple[str, str]]:
    part = Part("by index", case)
    part.steps(0, 1)
    for param in part.laid.params:
        own = part.optimizer.state[param].get("object")
        if own is not None:  # the owner alone has it
            own.optimizer.count = object()
    with pytest.raises(CanzonaError, match="has a object at kept/0") as caught:
        part.optimizer.state_dict()
    return [(str(caught.value.at), str(caught.value.hint))]


def test_what_the_owner_cannot_save_is_an_error_on_every_rank() -> None:
    hint = "let its state_dict() return tensors, numbers and texts, in dicts, lists and tuples"
    assert run(2, unsaved, Case("fsdp", (2,)), fresh=True) == [[("group0.param0", hint)]] * 2


# -- plans and edits -------------------------------------------------------------------------------


def test_new_plans_groups_and_cleared_state() -> None:
    values = values_of(-1)
    plain = [ByAddress([nn.Parameter(value.clone())]) for value in values]
    plain[2].param_groups[0]["beta"] = 0.5
    params = [nn.Parameter(value) for value in values]
    wrapped: Any = canzona_compile.wrap(ByAddress(params[:2]), one_per_matrix=ByAddress)
    for step in range(6):
        if step == 2:
            wrapped.add_param_group({"params": params[2:], "beta": 0.5})
        if step == 3:
            wrapped.canzona.release()
        if step == 4:
            wrapped.state[params[0]].clear()
            (own,) = plain[0].param_groups[0]["params"]
            plain[0] = ByAddress([own])
        for i, (optimizer, grad) in enumerate(zip(plain, values_of(step), strict=True)):
            params[i].grad = grad.clone()
            if i < 2 or step >= 2:
                params_of(optimizer)[0].grad = grad.clone()
                optimizer.step()
        wrapped.step()
    assert different([p.detach() for p in params], [params_of(own)[0].detach() for own in plain]) == []


def test_scalars_have_objects_too() -> None:
    """The wrapped optimizer itself never steps, so that its counter stands still."""
    params, plain = parameters([(), (4, 3)]), parameters([(), (4, 3)])
    wrapped = canzona_compile.wrap(Tempering(params), one_per_matrix=Tempering)
    alone = [Tempering([param]) for param in plain]
    for step in range(3):
        feed(wrapped, step)
        for own, param, like in zip(alone, plain, params, strict=True):
            param.grad = like.grad
            own.step()
        wrapped.step()
    assert different([p.detach() for p in params], [p.detach() for p in plain]) == []
    assert [row.cell for row in wrapped.canzona.explain().parameters] == ["own object"] * 2


def test_attributes_that_users_change_are_followed_or_refused() -> None:
    part, oracle = Part("by index", ALONE), Oracle("by index", values_of(-1))
    for step in range(2):
        for own in (part.optimizer, *oracle.optimizers):
            own.decay = 0.2 + step
        oracle.set("lr", rate(step))
        oracle.step(list(values_of(step)))
        part.steps(step, step + 1)
    assert different(part.values(), [p.detach() for p in oracle.params]) == []
    part.optimizer.moments.append(torch.zeros(1))
    with pytest.raises(UnsupportedOptimizer, match=r"self.moments.* changed"):
        part.steps(2, 3)


def test_it_cannot_be_unwrapped_once_it_stepped() -> None:
    part = Part("by address", ALONE)
    part.steps(0, 1)
    with pytest.raises(CanzonaError, match="cannot be merged back"):
        canzona_compile.unwrap(part.optimizer)
    part.steps(1, END)  # it is still wrapped
    assert different(part.values(), expected("by address")) == []


# -- what is said ----------------------------------------------------------------------------------


def test_the_refusal_prints_the_line_to_write() -> None:
    params = [nn.Parameter(value) for value in values_of(-1)]
    optimizer: Any = ByAddress(params, lr=0.03, beta=0.8)
    canzona_compile.wrap(optimizer)
    feed(optimizer, 0)
    with pytest.raises(UnsupportedOptimizer) as caught:
        optimizer.step()
    line = "wrap(optimizer, one_per_matrix=lambda params: ByAddress(params, lr=0.03, beta=0.8))"
    assert line in str(caught.value)
    assert "the contract" in str(caught.value)
    eval(line, {"wrap": canzona_compile.wrap, "optimizer": canzona_compile.unwrap(optimizer), "ByAddress": ByAddress})
    optimizer.step()


class ByName(ByAddress):
    """Its constructor takes names as well, as that of modded-nanogpt's optimizer."""

    def __init__(self, named: Iterable[tuple[str, Any]], lr: float = 0.1) -> None:
        self.names = {name: len(param) for name, param in named}
        super().__init__([param for _, param in named], lr)


# In the manner of GPA's AdamW: the first parameter has the mode of all, which a user sets.
InTrainMode = toy(
    "in-train-mode",
    step="""
    if "train" not in self.state[self.param_groups[0]["params"][0]]:
        raise RuntimeError("not in train mode")
    """,
    update="grad",
)()


def refusal_of(optimizer: Any) -> str:
    canzona_compile.wrap(optimizer)
    feed(optimizer, 0)
    with pytest.raises(UnsupportedOptimizer) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_line_that_fails_is_not_printed() -> None:
    says = refusal_of(ByName([(str(i), param) for i, param in enumerate(parameters(SHAPES))], lr=0.03))
    assert "ByName(params, lr=0.03) is not enough: ValueError: too many values to unpack" in says
    modal = InTrainMode(parameters(SHAPES))
    modal.state[params_of(modal)[0]]["train"] = torch.tensor(True)
    says += refusal_of(modal)
    assert "leave it out of `wrap`" in says
    assert "InTrainMode(params, lr=0.1) is not enough: RuntimeError: not in train mode" in says
    assert "wrap(optimizer, one_per_matrix=" not in says


def compiled_late(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """In the manner of HeavyBall, which calls torch.compile when a function is first called."""
    compiled = None

    def call(value: Tensor) -> Tensor:
        nonlocal compiled
        compiled = compiled or function
        return compiled(value)

    return call


doubled = compiled_late(lambda value: value * 2)


CompilingLate = toy("compiling-late", outside=f"from {__name__} import doubled", update="doubled(grad)")()


def test_a_function_that_is_compiled_late_is_named_with_the_line() -> None:
    says = refusal_of(CompilingLate(parameters(SHAPES)))
    assert "changes compiled, which call closes over" in says
    assert "wrap(optimizer, one_per_matrix=lambda params: CompilingLate(params, lr=0.1))" in says


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda params: ByAddress([*params, nn.Parameter(torch.ones(2))]), "returns a ByAddress that does not hold"),
        (lambda params: None, "returns a NoneType"),
        (lambda params: ByAddress(params, rate=1.0), "fails for this parameter.*unexpected keyword"),
        (lambda params: torch.optim.LBFGS(params), "makes a LBFGS, whose step requires closure"),
    ],
    ids=["two", "none", "failing", "closure"],
)
def test_functions_that_make_something_else_are_refused(make: Any, says: str) -> None:
    wrapped = canzona_compile.wrap(ByAddress(parameters(SHAPES)), one_per_matrix=make)
    feed(wrapped, 0)
    with refused(says, at="group0.param0"):
        wrapped.step()


def test_chains_take_it_wrapped() -> None:
    params = [nn.Parameter(value) for value in values_of(-1)]
    first, second = ByAddress(params[:2]), torch.optim.AdamW(params[2:])
    with pytest.raises(CanzonaError, match="several optimizers"):
        canzona_compile.wrap(canzona_compile.chain(first, second), one_per_matrix=ByAddress)
    both = canzona_compile.chain(canzona_compile.wrap(first, one_per_matrix=ByAddress), second)
    feed(both, 0)
    both.step()


def test_it_takes_a_function() -> None:
    with pytest.raises(CanzonaError, match="one_per_matrix= takes a function"):
        canzona_compile.wrap(ByAddress(parameters(SHAPES)), one_per_matrix=3)  # type: ignore[arg-type]


def test_reports_say_so() -> None:
    part = Part("by address", ALONE)
    row = canzona_compile.explain(part.optimizer).parameters[0]  # before the first step
    assert (row.cell, "one_per_matrix=" in row.why) == ("own object", True)
    part.steps(0, 1)
    assert "one_per_matrix=" in part.optimizer.canzona.report().to_text(width=400)


class Inside(PerParameter):
    """Steps an optimizer of its own, on itself or in its group, before it does its own work."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params)
        self.where = where
        self.home["inner"] = torch.optim.AdamW(self.param_groups[0]["params"], lr=0.01)

    @property
    def home(self) -> dict[str, Any]:
        return vars(self) if self.where == "self" else self.param_groups[0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.home["inner"].step()
        super().step()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: Any) -> None:
        param.sub_(cube(self.home["inner"].state[param]["exp_avg"]), alpha=group["lr"])


class Saving(Inside):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.home["inner"].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.home["inner"].load_state_dict(state_dict["inner"])
        super().load_state_dict(state_dict)


def inside(where: str) -> str:
    make = partial(Inside, where=where)
    pair = Pair(make, case=Case("ddp", (2,)), compares_state=False, one_per_matrix=make)
    for _ in range(3):
        pair.feed()
        pair.take()
    wrong = [i for i, (a, b) in enumerate(zip(*map(params_of, pair.both), strict=True)) if not torch.equal(a, b)]
    with pytest.raises(CanzonaError) as caught:
        pair.wrapped.state_dict()
    return f"{wrong} {caught.value}"


@pytest.mark.parametrize("where", ["self", "group"])
def test_an_optimizer_inside_is_the_objects_own_and_its_state_is_not_lost(where: str) -> None:
    for text in run(2, inside, where):
        assert text.startswith("[] the state_dict() of Inside lacks the state of 'inner', an optimizer inside")


def test_a_class_that_saves_the_optimizer_inside() -> None:
    make = partial(Saving, where="self")
    pair = Pair(make, compares_state=False, one_per_matrix=make)
    pair.go(2)
    pair.wrapped.load_state_dict(copy.deepcopy(pair.wrapped.state_dict()))
    pair.go(2)
    assert all(map(torch.equal, *map(params_of, pair.both)))


class Averaging(ByAddress):
    """It averages gradients by itself, as the optimizer of nanochat does."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(param.grad)
        super().step(closure)


def step_averaging() -> None:
    pair = Pair(Averaging, SHAPES, Case("fsdp", (2,)), one_per_matrix=Averaging)
    pair.feed()
    with refused(r"the optimizer communicates by itself \(c10d\.allreduce_", kind=UnsupportedOptimizer):
        pair.wrapped.step()


def test_objects_that_communicate_are_refused() -> None:
    """Owners step different matrices at a time: sums would be of these, without an error."""
    run(2, step_averaging)
