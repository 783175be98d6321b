"""Optimizers that couple parameters: one rank steps all of them at once, and every rank has the plain one's bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError, InvalidGradient, UnsupportedOptimizer
from tests.harness import joint_optimizers as kinds
from tests.harness.checkpoint_routes import LOAD, SAVE
from tests.harness.checkpointing import Holder
from tests.harness.joint_optimizers import MAKERS
from tests.harness.layouts import Case, Laid, full, mesh_of, replicate_of
from tests.harness.marks import only
from tests.harness.pairs import feed, parameters, params_of, same_bits
from tests.harness.ranks import run

SHAPES = ((7, 5), (5, 8), (6, 6), (4, 6))
SAVED, END = 4, 7
ALONE = Case("plain", ())
pytestmark = pytest.mark.filterwarnings("ignore:rank 0 alone steps all parameters")


def drawn(step: int) -> list[Tensor]:
    """The gradients of a step; those of step -1 are the first values."""
    random = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def has_gradient(step: int, place: int, missing: bool) -> bool:
    return not (missing and step in (2, 3) and place == 1)


class Part:
    """A run on this rank. It has what the routes of checkpoints need."""

    def __init__(self, name: str, case: Case, begun: bool = True, **options: Any) -> None:
        values = drawn(-1)
        self.laid = Laid(values if begun else [torch.full_like(v, 0.25) for v in values], case)
        self.model = Holder(self.laid.params)
        self.optimizer: Any = MAKERS[name](list(self.laid.params))
        canzona_compile.wrap(self.optimizer, replicate=replicate_of(case), **options)

    def steps(self, start: int, stop: int, missing: bool = False) -> None:
        for step in range(start, stop):
            self.optimizer.param_groups[0]["lr"] = rate(step)
            for i, (param, grad) in enumerate(zip(self.laid.params, drawn(step), strict=True)):
                param.grad = self.laid.like_param(grad, i) if has_gradient(step, i, missing) else None
            self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        return [full(param) for param in self.laid.params]


def rate(step: int) -> float:
    return 0.05 / (1 + step)


def plain(name: str, stop: int = END, missing: bool = False) -> Optimizer:
    """The plain optimizer after some steps."""
    optimizer: Optimizer = MAKERS[name]([nn.Parameter(value) for value in drawn(-1)])
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(stop):
        optimizer.param_groups[0]["lr"] = rate(step)
        for i, (param, grad) in enumerate(zip(params, drawn(step), strict=True)):
            param.grad = grad if has_gradient(step, i, missing) else None
        optimizer.step()
    return optimizer


def kept(optimizer: Optimizer) -> dict[str, Any]:
    """What users read of an optimizer beside parameters and their state."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"groups": groups, "norm": getattr(optimizer, "norm", None), "log": getattr(optimizer, "log", None)}


def values_of(optimizer: Optimizer) -> list[Tensor]:
    return [param.detach().clone() for param in params_of(optimizer)]


def different(found: list[Tensor], wanted: Optimizer) -> list[int]:
    whole = values_of(wanted)
    return [i for i, (a, b) in enumerate(zip(found, whole, strict=True)) if not same_bits(a, b)]


def train(name: str, case: Case, missing: bool = False, **options: Any) -> tuple[list[int], str, bool, list[str]]:
    part, wanted = Part(name, case, **options), plain(name, missing=missing)
    part.steps(0, END, missing)
    hows = [row.how for row in part.optimizer.canzona.explain().parameters]
    shown = str(kept(part.optimizer)) == str(kept(wanted))
    return different(part.values(), wanted), part.optimizer.canzona.explain().parameters[0].why[:42], shown, hows


GOOD = ([], "one rank steps all parameters at once, bec", True, ["joint"] * 4)


@pytest.mark.parametrize("name", MAKERS)
def test_in_one_process(name: str) -> None:
    assert train(name, ALONE) == GOOD


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "case"),
    only(
        [("distance", Case("fsdp", (3,))), ("norm", Case("ddp", (2,)))],
        list(MAKERS),
        [Case("fsdp", (2,)), Case("fsdp", (3,)), Case("hsdp", (2, 2)), Case("ddp", (2,)), Case("tp_columns", (2,))],
    ),
    ids=str,
)
def test_on_ranks(name: str, case: Case) -> None:
    assert run(case.world, train, name, case) == [GOOD] * case.world


@pytest.mark.ranks
@pytest.mark.parametrize("name", only([("distance",)], ["distance", "norm", "positions"]))
def test_gradients_may_be_missing(name: str) -> None:
    assert run(2, train, name, Case("fsdp", (2,)), missing=True) == [GOOD] * 2


def test_whoever_reads_parameters_without_gradients_needs_them_all() -> None:
    optimizer = canzona_compile.wrap(kinds.AllWeights(parameters()))
    feed(optimizer, 0)
    optimizer.param_groups[0]["params"][1].grad = None
    before = values_of(optimizer)
    with pytest.raises(InvalidGradient, match="parameters that have no gradient"):
        optimizer.step()
    assert all(map(same_bits, before, values_of(optimizer)))


# -- the report, and what it costs -----------------------------------------------------------------


def reported() -> tuple[list[str], list[tuple[int, int] | None], list[str]]:
    part = Part("norm", Case("fsdp", (2,)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        part.steps(0, 2)
    report = part.optimizer.canzona.report()
    owners = [task.owner for task in part.optimizer.canzona.session.driver.plan.owned.tasks]
    return [str(one.message) for one in found], owners, sorted(report.fallbacks)


@pytest.mark.ranks
def test_it_is_said_who_steps_what_and_why() -> None:
    (warned, owners, fallbacks), (silent, same, _) = run(2, reported)
    assert [said for said in warned if said.startswith("rank 0 alone steps all parameters of NormOnItself")] == warned
    assert len(warned) == 1
    assert "couples parameters" in warned[0]
    assert silent == []
    assert owners == same == [(0, 0)] * 4
    assert fallbacks == [f"group0.param{i}" for i in range(4)]


# -- checkpoints -----------------------------------------------------------------------------------


def save(name: str, case: Case, folder: Path, way: str) -> None:
    part = Part(name, case)
    part.steps(0, SAVED)
    SAVE[way](part, folder / way)  # type: ignore[arg-type]


def load(name: str, case: Case, folder: Path, way: str) -> list[int]:
    part = Part(name, case, begun=False)
    LOAD[way][1](part, folder / LOAD[way][0])  # type: ignore[arg-type]
    part.steps(SAVED, END)
    return different(part.values(), plain(name))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "case"),
    only([("by hand", ALONE)], ["shards", "flat shards", "by hand"], [ALONE, Case("fsdp", (2,)), Case("ddp", (2,))]),
    ids=str,
)
def test_saved_on_three_ranks_and_loaded_on_others(way: str, case: Case, tmp_path: Path) -> None:
    run(3, save, "distance", Case("fsdp", (3,)), tmp_path, way)
    found = run(2, load, "distance", case, tmp_path, way) if case.mesh else [load("distance", case, tmp_path, way)]
    assert [one for one in found if one] == []


def test_state_is_that_of_the_plain_optimizer() -> None:
    part, wanted = Part("distance", ALONE), plain("distance", SAVED)
    part.steps(0, SAVED)
    assert str(part.optimizer.state_dict()) == str(wanted.state_dict())


# -- errors ----------------------------------------------------------------------------------------


def fails() -> str:
    laid = Laid(drawn(-1), Case("fsdp", (2,)))
    optimizer: Any = canzona_compile.wrap(kinds.Failing(list(laid.params)))
    for step in range(4):
        optimizer.param_groups[0]["fails"] = step == 3
        for i, (param, grad) in enumerate(zip(laid.params, drawn(step), strict=True)):
            param.grad = laid.like_param(grad, i)
        try:
            optimizer.step()
        except (CanzonaError, RuntimeError) as error:
            return f"{step}: {error}"
    return "no error"


@pytest.mark.ranks
def test_an_error_of_the_step_reaches_every_rank() -> None:
    assert all(said.startswith("3: ") and "the fourth step" in said for said in run(2, fails, fresh=True))


def test_what_cannot_be_shown_is_refused() -> None:
    optimizer = canzona_compile.wrap(kinds.KeepsObjects(parameters()))
    feed(optimizer, 0)
    with pytest.raises(UnsupportedOptimizer, match=r"couples parameters.*\n.*\n.*self.last, where it keeps Holder"):
        optimizer.step()


def of_two_meshes() -> str:
    one, other = Laid(drawn(-1)[:2], Case("fsdp", (2,))), [nn.Parameter(value) for value in drawn(-1)[2:]]
    optimizer = canzona_compile.wrap(kinds.NormOnItself([*one.params, *other]))
    for param in [*one.params, *other]:
        param.grad = torch.ones_like(param)
    try:
        optimizer.step()
    except CanzonaError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_parameters_of_several_meshes_are_refused() -> None:
    for said in run(2, of_two_meshes):
        assert "steps all parameters at once, but this one lies on ranks" in said
        assert "group0.param2" in said


def under_zero1() -> str:
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 4, bias=False))
    try:
        optimizer = kinds.NormOnItself(list(model.parameters()))
        canzona_compile.zero1(model, optimizer, mesh=mesh_of((2,), ("dp",)))
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    except CanzonaError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_zero1_refuses_them() -> None:
    for said in run(2, under_zero1):
        assert "zero1 gives every matrix to another owner, but NormOnItself couples parameters" in said
        assert "wrap(optimizer, replicate=mesh)" in said
