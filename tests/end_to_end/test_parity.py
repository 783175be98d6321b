"""Every layout, number of ranks and dtype gives the bits of the plain optimizer on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.harness.layouts import ALONE, Case, Laid
from tests.harness.marks import also, crossed, first, full
from tests.harness.optimizers import (
    MUON_GROUPS,
    STACK_GROUPS,
    EntriesMuon,
    GroupSpec,
    Scheduler,
    StackMuon,
    muon,
    param_groups,
    shapes_of,
)
from tests.harness.pairs import parameters
from tests.harness.ranks import run
from tests.harness.training import Training, check, on_ranks

DTYPES = [torch.float32, torch.bfloat16]
TRAININGS = {
    name: Training(
        lambda params, make=make, groups=groups: make(param_groups(groups, params)),  # type: ignore[misc]
        tuple(shapes_of(groups)),
        steps=6,
        schedule=lambda optimizer: Scheduler(optimizer).set,
        sizes=(0.1, 1e-3),
    )
    for name, make, groups in (
        ("muon", muon, MUON_GROUPS),
        ("stack", StackMuon, STACK_GROUPS),
        ("entries", EntriesMuon, STACK_GROUPS[1:]),
        ("alike", muon, [GroupSpec(((64, 48),), {"eps": eps, "weight_decay": eps / 4}) for eps in (0.1, 1.0, 4.0)]),
    )
}


# -- layouts ---------------------------------------------------------------------------------------

LINES = ("fsdp", "fsdp_columns", "tp_rows", "tp_columns", "ddp", "replicated")
PLANES = ("hsdp", "fsdp_tp", "tp_ddp")
# Three ranks share matrices unevenly, and some get nothing of two rows. A mesh of three dims takes eight.
CASES = [
    *(Case(layout, (3,)) for layout in LINES),
    *(Case(layout, (2, 2)) for layout in PLANES),
    Case("both_dims", (2, 2)),
    Case("replicated_rows", (2, 2)),
    Case("backwards", (3,)),
    Case("hsdp_tp", (2, 2, 2)),
]
MORE_CASES = [
    *(Case(layout, (ranks,)) for ranks in (2, 4, 8) for layout in LINES),
    *(Case(layout, mesh) for mesh in ((2, 4), (4, 2)) for layout in PLANES),
    Case("hsdp", (3, 1)),
    Case("fsdp_tp", (1, 3)),
    Case("replicated_rows", (4, 2)),
    Case("backwards", (4,)),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*crossed(CASES, DTYPES), *(full(case, dtype) for case in MORE_CASES for dtype in DTYPES)],
    ids=str,
)
def test_layout(case: Case, dtype: torch.dtype) -> None:
    outcomes = on_ranks(__name__, "muon", [case], dtype, strategy="owner")
    report = check(outcomes)
    assert {task["strategy"] for task in report["tasks"]} == {"owner"}
    assert len({task["owner"] for task in report["tasks"]}) == min(case.world, 9)


@pytest.mark.parametrize("case", [Case("fsdp", (2,)), Case("ddp", (2,))], ids=str)
def test_groups_that_differ_by_numbers_only(case: Case) -> None:
    """An owner has matrices of several groups, of one shape and one graph, that must not share their numbers."""
    check(on_ranks(__name__, "alike", [case], strategy="owner", micro_groups=1))


def fragments(case: Case) -> tuple[list[int], list[str]]:
    """Of this rank: how many elements it has of each parameter, and its placements."""
    laid = Laid(parameters(shapes_of(MUON_GROUPS)), case)
    placements = [str(getattr(p, "placements", "")) for p in laid.params]
    return [index.numel() for index in laid.indices], placements


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


@pytest.mark.parametrize(("layout", "dtype"), crossed(["fsdp", "hsdp", "ddp", "replicated", "plain"], DTYPES, most=1))
def test_world_of_one(layout: str, dtype: torch.dtype) -> None:
    case = Case(layout, (1, 1) if layout == "hsdp" else (1,))
    report = check(on_ranks(__name__, "muon", [case], dtype))
    assert {task["strategy"] for task in report["tasks"]} == {"local"}
    assert (report["world_size"], report["collectives_per_step"]) == (1, 0)


@pytest.mark.parametrize("dtype", first(DTYPES))
def test_one_process_without_groups(dtype: torch.dtype) -> None:
    report = check(on_ranks(__name__, "muon", [ALONE], dtype, group=False))
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


@pytest.mark.parametrize(("mix", "dtype"), crossed(list(MIXES), DTYPES, most=3))
def test_several_layouts(mix: str, dtype: torch.dtype) -> None:
    world, cases = MIXES[mix]
    assert {case.world for case in cases} == {world}
    report = check(on_ranks(__name__, "muon", cases, dtype, strategy="owner"))
    grids = {str(group["grid"]) for group in report["micro_groups"]}
    assert len(grids) >= 2


@pytest.mark.parametrize(
    ("recipe", "case"), [("muon", Case("fsdp", (3,))), full("muon", Case("hsdp", (2, 2)))], ids=str
)
def test_audits_disturb_nothing(recipe: str, case: Case) -> None:
    check(on_ranks(__name__, recipe, [case], strategy="owner", audit=7))


# -- stacks of experts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [*crossed([2, 3], DTYPES, most=1), *(full(ranks, dtype) for ranks in (4, 8) for dtype in DTYPES)],
)
def test_experts_on_their_ranks(ranks: int, dtype: torch.dtype) -> None:
    """A stack cut along its entries stays where it is: 0 collectives, counted."""
    case = Case("stack_dim0", (ranks,))
    outcomes = on_ranks(__name__, "stack", [case], dtype)
    report = check(outcomes)
    assert {o.collectives for o in outcomes} == {0}
    assert {task["strategy"] for task in report["tasks"]} == {"local"}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *crossed([Case("stack_dim1", (3,)), Case("stack_dim2", (3,)), Case("stack_dims", (2, 2))], DTYPES),
        *(full(Case(f"stack_dim{dim}", (r,)), dtype) for r in (2, 4, 8) for dim in (1, 2) for dtype in DTYPES),
        *(full(Case("stack_dims", (4, 2)), dtype) for dtype in DTYPES),
    ],
    ids=str,
)
def test_experts_cut_along_a_matrix_dim(case: Case, dtype: torch.dtype) -> None:
    outcomes = on_ranks(__name__, "stack", [case], dtype, strategy="owner")
    check(outcomes)
    assert min(o.collectives for o in outcomes) > 0


@pytest.mark.parametrize(("ranks", "dtype"), crossed([2, 4], DTYPES, most=0))
def test_entries_that_are_not_independent(ranks: int, dtype: torch.dtype) -> None:
    """Whose learning rate follows the number of entries needs the whole stack."""
    outcomes = on_ranks(__name__, "entries", [Case("stack_dim0", (ranks,))], dtype, strategy="owner")
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


@pytest.mark.parametrize(
    ("case", "options", "dtype"),
    crossed([Case("fsdp", (3,)), Case("hsdp", (2, 2)), Case("ddp", (2,))], list(OPTIONS), DTYPES, most=1),
    ids=str,
)
def test_options(case: Case, options: str, dtype: torch.dtype) -> None:
    chosen = OPTIONS[options]
    report = check(on_ranks(__name__, "muon", [case], dtype, **chosen))
    assert {task["strategy"] for task in report["tasks"]} == {chosen["strategy"]}
    assert len(report["micro_groups"]) > 1 or options == "replicated"


@pytest.mark.parametrize("case", [Case("fsdp", (2,)), *also([Case("ddp", (4,)), Case("fsdp", (8,))])], ids=str)
def test_automatic_strategy(case: Case) -> None:
    check(on_ranks(__name__, "muon", [case]))
