"""Optimizers that couple parameters: one rank steps all of them at once, and every rank has the plain one's bits."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from tests.harness import joint_optimizers as kinds
from tests.harness import small_runs
from tests.harness.checkpoint_routes import LOAD, SAVE
from tests.harness.joint_optimizers import MAKERS
from tests.harness.layouts import Case, Laid, full, mesh_of, replicate_of
from tests.harness.marks import only
from tests.harness.optimizers import share_captures
from tests.harness.pairs import feed, parameters, params_of, same_bits
from tests.harness.ranks import do_alone, run
from tests.harness.small_runs import SmallRun, never, rate

SHAPES = ((7, 5), (5, 8), (6, 6), (4, 6))
SAVED, END = 4, 7
ALONE = Case("plain", ())
Missing = Callable[[int, int], bool]
pytestmark = pytest.mark.filterwarnings("ignore:rank 0 alone steps all parameters")


drawn = partial(small_runs.drawn, SHAPES)


def one_at_times(step: int, place: int) -> bool:
    return step in (2, 3) and place == 1


def part_of(name: str, case: Case, begun: bool = True, **options: Any) -> SmallRun:
    return SmallRun(MAKERS[name], SHAPES, case, begun, **options)


def plain(name: str, stop: int = END, missing: Missing = never) -> Optimizer:
    """The plain optimizer after some steps."""
    optimizer: Optimizer = MAKERS[name]([nn.Parameter(value) for value in drawn(-1)])
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(stop):
        optimizer.param_groups[0]["lr"] = rate(step)
        for i, (param, grad) in enumerate(zip(params, drawn(step), strict=True)):
            param.grad = None if missing(step, i) else grad
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


def train(name: str, case: Case, missing: Missing = never, **options: Any) -> tuple[list[int], str, bool, list[str]]:
    part, wanted = part_of(name, case, **options), plain(name, missing=missing)
    part.steps(0, END, missing)
    hows = [f"{row.how} {row.cell}" for row in part.optimizer.canzona.explain().parameters]
    shown = str(kept(part.optimizer)) == str(kept(wanted))
    return different(part.values(), wanted), part.optimizer.canzona.explain().parameters[0].why[:42], shown, hows


GOOD = ([], "one rank steps all parameters at once, bec", True, ["eager model"] * 4)


def alone(name: str) -> None:
    """Train in one process. Ranks that have it behind them need not rehearse anew."""
    assert train(name, ALONE) == GOOD


@pytest.mark.parametrize("name", MAKERS)
def test_in_one_process(name: str) -> None:
    do_alone(partial(alone, name))


def train_with_nothing_in_one(case: Case) -> tuple[list[bool], list[str]]:
    """Train parameters of which one has no elements."""
    shapes = ((7, 5), (0, 4), (6, 6))
    part = SmallRun(MAKERS["norm"], shapes, case, True)
    params = [nn.Parameter(value) for value in small_runs.drawn(shapes, -1)]
    optimizer = MAKERS["norm"](params)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = rate(step)
        for param, grad in zip(params, small_runs.drawn(shapes, step), strict=True):
            param.grad = grad
        optimizer.step()
    part.steps(0, 3, never)
    same = [same_bits(a, b) for a, b in zip(part.values(), values_of(optimizer), strict=True)]
    return same, [row.how for row in part.optimizer.canzona.explain().parameters]


@pytest.mark.ranks
@pytest.mark.parametrize("case", [Case("ddp", (2,)), Case("fsdp", (2,))], ids=str)
def test_a_parameter_without_elements(case: Case) -> None:
    alone = partial(train_with_nothing_in_one, ALONE)
    assert run(2, train_with_nothing_in_one, case, after=alone) == [([True] * 3, ["eager"] * 3)] * 2


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
    assert run(case.world, train, name, case, after=partial(alone, name)) == [GOOD] * case.world


@pytest.mark.ranks
@pytest.mark.parametrize("name", only([("distance",)], ["distance", "norm", "positions"]))
def test_gradients_may_be_missing(name: str) -> None:
    found = run(2, train, name, Case("fsdp", (2,)), missing=one_at_times, after=partial(alone, name))
    assert found == [GOOD] * 2


def script(kind: str, case: Case, stop: int) -> list[str]:
    """What differs while gradients come and go: one is missing at some steps, all at one; another is frozen."""
    values = drawn(-1)
    laid = Laid(values, case)
    wrapped: Any = kinds.SCRIPTED[kind](list(laid.params))
    canzona_compile.wrap(wrapped, replicate=replicate_of(case))
    share_captures(wrapped, maker=kind)
    other: Any = kinds.SCRIPTED[kind]([nn.Parameter(value.clone()) for value in values])
    wrong: list[str] = []
    for step in range(stop):
        for i, grad in enumerate(drawn(step)):
            gone = step == 4 or (i == 1 and step in (2, 6)) or (i == 3 and step > 8)
            laid.params[i].grad = None if gone else laid.like_param(grad, i)
            params_of(other)[i].grad = None if gone else grad.clone()
            for param in (laid.params[i], params_of(other)[i]):
                param.requires_grad_(not (i == 3 and step > 8))
        wrapped.step()
        other.step()
        wrong += [f"step {step}: parameter {i}" for i in different([full(p) for p in laid.params], other)]
        wrong += [f"step {step}: {name}" for name, value in seen(other).items() if seen(wrapped).get(name) != value]
        wrong += [f"step {step}: {name} is there" for name in seen(wrapped).keys() - seen(other).keys()]
    held, wanted = ({k for k, v in one.state_dict()["state"].items() if v} for one in (wrapped, other))
    return [*wrong, *([] if held == wanted else [f"state of {held}, not of {wanted}"])]


def seen(optimizer: Any) -> dict[str, str]:
    """What users see beside parameters and their state."""
    hidden = {"state", "param_groups", "canzona", "step"}
    own = {k: v for k, v in vars(optimizer).items() if k not in hidden and not k.startswith("_")}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    odd = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    return {k: str(v) for k, v in {**own, "groups": groups, "odd state": odd}.items()}


@pytest.mark.parametrize("kind", kinds.SCRIPTED)
def test_whatever_a_step_keeps(kind: str) -> None:
    assert script(kind, ALONE, 55 if kind == "late log" else 16) == []


@pytest.mark.ranks
@pytest.mark.parametrize("kind", only([("odd state",), ("late log",)], list(kinds.SCRIPTED)))
def test_whatever_a_step_keeps_on_ranks(kind: str) -> None:
    begun = partial(script, kind, ALONE, 2)
    assert run(2, script, kind, Case("fsdp", (2,)), 55 if kind == "late log" else 16, after=begun) == [[], []]


def test_objects_that_come_late_are_refused() -> None:
    optimizer = canzona_compile.wrap(kinds.LateObject(parameters()))
    for step in range(49):
        feed(optimizer, step)
        optimizer.step()
    feed(optimizer, 49)
    with pytest.raises(UnsupportedOptimizer, match=r"changes self\.held.*cannot be sent"):
        optimizer.step()


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([torch.ones(5, 4).t(), torch.ones(3, 4)], "is not contiguous"),
        ([torch.ones(5, 4), torch.tensor(2.0)], ""),
    ],
    ids=["transposed", "scalar"],
)
def test_odd_parameters(params: list[Tensor], says: str) -> None:
    optimizer = canzona_compile.wrap(kinds.SquaredNorm([nn.Parameter(value.clone()) for value in params]))
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    with pytest.raises(UnsupportedOptimizer, match=says) if says else contextlib.nullcontext():
        optimizer.step()
    assert torch.equal(params_of(optimizer)[0], params[0]) == bool(says)


def said_by(step: Callable[[], object]) -> str:
    """The message of the error that a step raises."""
    try:
        step()
    except (CanzonaError, RuntimeError) as error:
        return str(error)
    return "no error"


def reducing() -> str:
    return said_by(partial(SmallRun(kinds.Reducing, SHAPES, Case("fsdp", (2,))).steps, 0, 1))


@pytest.mark.ranks
def test_a_step_that_communicates_is_refused() -> None:
    assert all("communicates by itself" in said for said in run(2, reducing, fresh=True))


# -- the report, and what it costs -----------------------------------------------------------------


def reported() -> tuple[list[str], list[tuple[int, int] | None], list[str]]:
    part = part_of("norm", Case("fsdp", (2,)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        part.steps(0, 2)
    report = part.optimizer.canzona.report()
    owners = [task.owner for task in part.optimizer.canzona.session.driver.plan.owned.tasks]
    return [str(one.message) for one in found], owners, sorted(report.fallbacks)


@pytest.mark.ranks
def test_it_is_said_who_steps_what_and_why() -> None:
    (warned, owners, fallbacks), (silent, same, _) = run(2, reported, after=partial(alone, "norm"))
    assert [said for said in warned if said.startswith("rank 0 alone steps all parameters of NormOnItself")] == warned
    assert len(warned) == 1
    assert "couples parameters" in warned[0]
    assert silent == []
    assert owners == same == [(0, 0)] * 4
    assert fallbacks == [f"group0.param{i}" for i in range(4)]


# -- checkpoints -----------------------------------------------------------------------------------


def save(name: str, case: Case, folder: Path, way: str) -> None:
    part = part_of(name, case)
    part.steps(0, SAVED)
    SAVE[way](part, folder / way)  # type: ignore[arg-type]


def load(name: str, case: Case, folder: Path, way: str) -> list[int]:
    part = part_of(name, case, begun=False)
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
    after = partial(alone, "distance")
    run(3, save, "distance", Case("fsdp", (3,)), tmp_path, way, after=after)
    found = run(case.world, load, "distance", case, tmp_path, way, group=bool(case.mesh), after=after)
    assert [one for one in found if one] == []


def test_state_is_that_of_the_plain_optimizer() -> None:
    part, wanted = part_of("distance", ALONE), plain("distance", SAVED)
    part.steps(0, SAVED)
    assert str(part.optimizer.state_dict()) == str(wanted.state_dict())


# -- errors ----------------------------------------------------------------------------------------


def fails(case: Case, stop: int) -> str:
    part = SmallRun(kinds.Failing, SHAPES, case)
    for step in range(stop):
        part.optimizer.param_groups[0]["fails"] = step == 3
        if (said := said_by(partial(part.steps, step, step + 1))) != "no error":
            return f"{step}: {said}"
    return "no error"


@pytest.mark.ranks
def test_an_error_of_the_step_reaches_every_rank() -> None:
    found = run(2, fails, Case("fsdp", (2,)), 4, fresh=True, after=partial(fails, ALONE, 2))
    assert all(said.startswith("3: ") and "the fourth step" in said for said in found)


def test_what_cannot_be_shown_is_refused() -> None:
    optimizer = canzona_compile.wrap(kinds.KeepsObjects(parameters()))
    feed(optimizer, 0)
    with pytest.raises(UnsupportedOptimizer, match=r"couples parameters.*\n.*\n.*changes self.last"):
        optimizer.step()


def of_two_meshes() -> str:
    one, other = Laid(drawn(-1)[:2], Case("fsdp", (2,))), [nn.Parameter(value) for value in drawn(-1)[2:]]
    optimizer = canzona_compile.wrap(kinds.NormOnItself([*one.params, *other]))
    share_captures(optimizer, maker=kinds.NormOnItself)
    for param in [*one.params, *other]:
        param.grad = torch.ones_like(param)
    return said_by(optimizer.step)


@pytest.mark.ranks
def test_parameters_of_several_meshes_are_refused() -> None:
    for said in run(2, of_two_meshes, after=partial(alone, "norm")):
        assert "steps all parameters at once, but this one is on ranks" in said
        assert "group0.param2" in said


def under_zero1() -> str:
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 4, bias=False))
    optimizer = kinds.NormOnItself(list(model.parameters()))
    return said_by(lambda: canzona_compile.zero1(model, optimizer, mesh=mesh_of((2,), ("dp",))))


@pytest.mark.ranks
def test_zero1_refuses_them() -> None:
    for said in run(2, under_zero1):
        assert "zero1 spreads matrices over owner ranks, but NormOnItself couples parameters" in said
        assert "wrap(optimizer, replicate=mesh)" in said
