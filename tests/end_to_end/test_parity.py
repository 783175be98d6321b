"""Every layout, number of ranks and dtype gives the bits of the plain optimizer on one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import canzona_compile
from tests.harness.layouts import Case, Laid, full, local, replicate_of
from tests.harness.optimizers import (
    MUON_GROUPS,
    RECIPES,
    Scheduler,
    param_groups,
    shapes_of,
    share_captures,
)
from tests.harness.ranks import collectives, run

STEPS = 12
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
]


# -- on the ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """What plain training gives: all of it follows from the seed."""

    first: tuple[Tensor, ...]
    grads: tuple[tuple[Tensor, ...], ...]  # by step
    params: tuple[Tensor, ...]
    momenta: tuple[Tensor, ...]


@functools.cache
def plain_run(recipe: str, dtype: torch.dtype) -> Run:
    """The plain optimizer on full tensors."""
    random = torch.Generator().manual_seed(5)

    def draw(scale: float) -> tuple[Tensor, ...]:
        shapes = shapes_of(RECIPES[recipe].groups)
        return tuple((torch.randn(s, generator=random) * scale).to(dtype) for s in shapes)

    first = draw(0.1)
    grads = tuple(draw(1e-3) for _ in range(STEPS))
    params = [torch.nn.Parameter(v.clone()) for v in first]
    optimizer = RECIPES[recipe].make(param_groups(RECIPES[recipe].groups, params))
    scheduler = Scheduler(optimizer)
    for step, values in enumerate(grads):
        scheduler.set(step)
        for param, grad in zip(params, values, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    momenta = tuple(optimizer.state[p]["momentum_buffer"] for p in params)
    return Run(first, grads, tuple(p.detach() for p in params), momenta)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank found after the last step.

    Attributes:
        different: what has other bits than the plain run: "parameter 3", "momentum 0".
        elements: of each parameter's fragment.
        collectives: that the last step started, counted by the process groups.
        report: of the wrapped optimizer.
    """

    different: list[str]
    elements: list[int]
    collectives: int
    report: dict[str, Any]


def train(recipe: str, cases: Sequence[Case], dtype: torch.dtype, **options: Any) -> Outcome:
    """STEPS steps of the wrapped optimizer on this rank's fragments, fed the plain run's gradients."""
    plain = plain_run(recipe, dtype)
    laid = Laid(plain.first, *cases)
    optimizer: Any = RECIPES[recipe].make(param_groups(RECIPES[recipe].groups, laid.params))
    canzona_compile.wrap(optimizer, replicate=replicate_of(*cases), **options)
    share_captures(optimizer)
    scheduler = Scheduler(optimizer)
    before = 0
    for step, values in enumerate(plain.grads):
        scheduler.set(step)
        for i, param in enumerate(laid.params):
            param.grad = laid.like_param(values[i], i)
        before = collectives()
        optimizer.step()
    started = collectives() - before
    state = optimizer.state_dict()["state"]
    momenta = [state[i]["momentum_buffer"] for i in range(len(laid.params))]
    different = [
        *differences("parameter", laid.params, plain.params, laid),
        *differences("momentum", momenta, plain.momenta, laid),
    ]
    elements = [index.numel() for index in laid.indices]
    return Outcome(different, elements, started, optimizer.canzona.report().to_dict())


def differences(what: str, found: Sequence[Tensor], expected: Sequence[Tensor], laid: Laid) -> Iterator[str]:
    """Compare this rank's fragments, and what torch gathers from all of them."""
    for i, (got, whole) in enumerate(zip(found, expected, strict=True)):
        same = got.dtype == whole.dtype and torch.equal(local(got), laid.fragment(whole, i))
        gathered = full(got) if gathers(got) else whole
        if not same or not torch.equal(gathered, whole):
            yield f"{what} {i}"


def gathers(tensor: Tensor) -> bool:
    """Does torch gather it right? Where ranks descend it puts fragments in the wrong order."""
    if not isinstance(tensor, DTensor):
        return True
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    return bool(ranks == sorted(ranks))


def check(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The right bits everywhere, by graphs, with as many collectives as reported: the report."""
    assert [o.different for o in outcomes] == [[]] * len(outcomes)
    report = outcomes[0].report
    assert report["fallbacks"] == {}
    assert all(o.collectives == o.report["collectives_per_step"] for o in outcomes)
    return report


# -- layouts ---------------------------------------------------------------------------------------

LINES = ("fsdp", "fsdp_columns", "tp_rows", "tp_columns", "ddp", "replicated")
PLANES = ("hsdp", "fsdp_tp", "tp_ddp")
CASES = [
    *(Case(layout, (ranks,)) for ranks in (2, 3, 4, 8) for layout in LINES),
    *(Case(layout, mesh) for mesh in ((2, 2), (2, 4), (4, 2)) for layout in PLANES),
    Case("hsdp", (3, 1)),
    Case("fsdp_tp", (1, 3)),
    Case("both_dims", (2, 2)),
    Case("replicated_rows", (4, 2)),
    Case("backwards", (4,)),
    Case("hsdp_tp", (2, 2, 2)),
]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout(case: Case, dtype: torch.dtype) -> None:
    outcomes = run(case.world, train, "muon", [case], dtype, strategy="owner")
    report = check(outcomes)
    assert {task["strategy"] for task in report["tasks"]} == {"owner"}
    assert len({task["owner"] for task in report["tasks"]}) == min(case.world, 9)


def fragments(case: Case) -> tuple[list[int], list[str]]:
    """Of this rank: how many elements it has of each parameter, and its placements."""
    laid = Laid(plain_run("muon", torch.float32).first, case)
    placements = [str(getattr(p, "placements", "")) for p in laid.params]
    return [index.numel() for index in laid.indices], placements


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "copies", "placement"),
    [
        (Case("fsdp", (3,)), 1, "(Shard(dim=0),)"),
        (Case("fsdp", (8,)), 1, "(Shard(dim=0),)"),
        (Case("fsdp_columns", (3,)), 1, "(Shard(dim=1),)"),
        (Case("tp_columns", (8,)), 1, "(Shard(dim=1),)"),
        (Case("hsdp", (2, 4)), 2, "(Replicate(), Shard(dim=0))"),
        (Case("fsdp_tp", (2, 4)), 1, "(_StridedShard(dim=0, sf=4), Shard(dim=0))"),
        (Case("fsdp_tp", (4, 2)), 1, "(Shard(dim=0), Shard(dim=1))"),
        (Case("hsdp_tp", (2, 2, 2)), 2, "(Replicate(), _StridedShard(dim=0, sf=2), Shard(dim=0))"),
        (Case("tp_ddp", (2, 4)), 2, "(Shard(dim=1),)"),
    ],
    ids=str,
)
def test_layouts_are_what_they_are_called(case: Case, copies: int, placement: str) -> None:
    """Uneven and empty fragments, real strided shards: otherwise the tests above would show little."""
    found = run(case.world, fragments, case)
    by_param = list(zip(*(elements for elements, _ in found), strict=True))
    sizes = [math.prod(shape) for shape in shapes_of(MUON_GROUPS)]
    assert [sum(own) for own in by_param] == [copies * size for size in sizes]
    assert placement in found[0][1]
    assert any(len(set(own)) > 1 for own in by_param)
    assert case.world < 4 or any(0 in own for own in by_param)


# -- one device ------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "ddp", "replicated", "plain"])
def test_world_of_one(layout: str, dtype: torch.dtype) -> None:
    case = Case(layout, (1, 1) if layout == "hsdp" else (1,))
    report = check(run(1, train, "muon", [case], dtype))
    assert {task["strategy"] for task in report["tasks"]} == {"local"}
    assert (report["world_size"], report["collectives_per_step"]) == (1, 0)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_process_without_groups(dtype: torch.dtype) -> None:
    report = check(run(1, train, "muon", [Case("plain", ())], dtype, group=False))
    assert (report["world_size"], report["collectives_per_step"]) == (1, 0)


# -- several layouts in one optimizer ---------------------------------------------------------------

MIXES = {
    "fsdp and ddp": (3, [Case("fsdp", (3,)), Case("ddp", (3,))]),
    "fsdp and plain": (2, [Case("fsdp", (2,)), Case("plain", (2,))]),
    "three meshes": (4, [Case("fsdp", (4,)), Case("hsdp", (2, 2)), Case("tp_alone", (2, 2))]),
    "two orders": (3, [Case("fsdp", (3,)), Case("backwards", (3,))]),
    "all": (
        8,
        [
            Case("fsdp", (8,)),
            Case("hsdp", (2, 4)),
            Case("fsdp_tp", (4, 2)),
            Case("backwards", (8,)),
            Case("tp_ddp", (4, 2)),
        ],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
def test_several_layouts(mix: str, dtype: torch.dtype) -> None:
    world, cases = MIXES[mix]
    report = check(run(world, train, "muon", cases, dtype, strategy="owner"))
    grids = {str(group["grid"]) for group in report["micro_groups"]}
    assert len(grids) >= 2


# -- stacks of experts -----------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_experts_on_their_ranks(ranks: int, dtype: torch.dtype) -> None:
    """A stack cut along its entries stays where it is: 0 collectives, counted."""
    case = Case("stack_dim0", (ranks,))
    outcomes = run(ranks, train, "stack", [case], dtype)
    report = check(outcomes)
    assert {o.collectives for o in outcomes} == {0}
    assert {task["strategy"] for task in report["tasks"]} == {"local"}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        *(Case(layout, (r,)) for r in (2, 3, 4, 8) for layout in ("stack_dim1", "stack_dim2")),
        Case("stack_dims", (2, 2)),
        Case("stack_dims", (4, 2)),
    ],
    ids=str,
)
def test_experts_cut_along_a_matrix_dim(case: Case, dtype: torch.dtype) -> None:
    outcomes = run(case.world, train, "stack", [case], dtype, strategy="owner")
    check(outcomes)
    assert min(o.collectives for o in outcomes) > 0


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_entries_that_are_not_independent(ranks: int, dtype: torch.dtype) -> None:
    """Whose learning rate follows the number of entries needs the whole stack."""
    outcomes = run(ranks, train, "entries", [Case("stack_dim0", (ranks,))], dtype, strategy="owner")
    check(outcomes)
    assert min(o.collectives for o in outcomes) > 0


# -- options ---------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "depth 1": {"micro_groups": 3, "depth": 1, "strategy": "owner"},
    "depth 2": {"micro_groups": 3, "depth": 2, "strategy": "owner"},
    "depth 3": {"micro_groups": 3, "depth": 3, "strategy": "owner"},
    "small capacity": {"capacity": 8192, "strategy": "owner"},
    "replicated": {"strategy": "replicated"},
    "replicated groups": {"micro_groups": 3, "strategy": "replicated"},
}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", [Case("fsdp", (3,)), Case("hsdp", (2, 2)), Case("ddp", (2,))], ids=str)
def test_options(case: Case, options: str, dtype: torch.dtype) -> None:
    chosen = OPTIONS[options]
    report = check(run(case.world, train, "muon", [case], dtype, **chosen))
    assert {task["strategy"] for task in report["tasks"]} == {chosen["strategy"]}
    assert len(report["micro_groups"]) > 1 or options == "replicated"


@pytest.mark.ranks
@pytest.mark.parametrize("case", [Case("fsdp", (2,)), Case("fsdp", (8,)), Case("ddp", (4,))], ids=str)
def test_automatic_strategy(case: Case) -> None:
    check(run(case.world, train, "muon", [case], torch.float32))
