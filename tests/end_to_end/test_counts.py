"""Bytes and collectives, counted from outside, by replacing c10d's functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from canzona_compile.runtime import channel
from tests.harness.layouts import ALONE, Case
from tests.harness.marks import crossed, first, full
from tests.harness.optimizers import EVEN, UNEVEN, Shape, muon
from tests.harness.pairs import Pair
from tests.harness.ranks import collectives, run

# -- on the ranks ----------------------------------------------------------------------------------

FUNCTIONS = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "_all_gather_base",
    "_reduce_scatter_base",
]


AGREEMENT = ["all_reduce"]  # of two integers on the host, with which ranks agree before a step


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank did in one step.

    Attributes:
        functions: of c10d that were called, in order.
        sent, received: by each all-to-all, without what a rank sends to itself.
        started: collectives that the process groups counted.
        report: of the wrapped optimizer.
    """

    functions: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    started: int = 0
    report: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def observed(traffic: Traffic) -> Iterator[None]:
    """While open, every function of c10d that communicates notes that it was called."""
    originals = {name: getattr(c10d, name) for name in FUNCTIONS}

    def noting(name: str) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def call(*args: Any, **kwargs: Any) -> Any:
            traffic.functions.append(name)
            if name == "all_to_all_single":
                note_bytes(traffic, *args, **kwargs)
            return originals[name](*args, **kwargs)

        return call

    announced = channel.Channel.largest

    def announcing(own: channel.Channel, values: torch.Tensor) -> Any:
        traffic.functions.extend(AGREEMENT)
        return announced(own, values)

    channel.Channel.largest = announcing  # type: ignore[method-assign]
    modules = [m for m in (dist, c10d) for name in FUNCTIONS if hasattr(m, name)]
    for name in FUNCTIONS:
        for module in modules:
            setattr(module, name, noting(name))
    try:
        yield
    finally:
        channel.Channel.largest = announced  # type: ignore[method-assign]
        for name, original in originals.items():
            for module in modules:
                setattr(module, name, original)


def note_bytes(
    traffic: Traffic,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    for tensor, splits, total in (
        (output, output_split_sizes, traffic.received),
        (input, input_split_sizes, traffic.sent),
    ):
        rows = tensor.shape[0]
        own = dist.get_rank(group)
        mine = splits[own] if splits else rows // dist.get_world_size(group)
        assert not splits or sum(splits) == rows
        total.append((rows - mine) * tensor[:1].numel() * tensor.element_size())


def count(case: Case, shapes: Sequence[Shape], **options: Any) -> Traffic:
    """The traffic of the third step."""
    pair = Pair(lambda params: muon([{"params": params}]), shapes, case, **options)
    pair.go(2)
    pair.feed()
    traffic, before = Traffic(), collectives()
    with observed(traffic):
        pair.wrapped.step()
    started, report = collectives() - before, pair.report.to_dict()
    return Traffic(traffic.functions, traffic.sent, traffic.received, started, report)


def counted(ranks: int, case: Case, shapes: Sequence[Shape], **options: Any) -> list[Traffic]:
    """The traffic of each rank; all of them have the captures behind them."""
    return run(ranks, count, case, shapes, after=partial(count, ALONE, [*EVEN, *UNEVEN]), **options)


# -- traffic ---------------------------------------------------------------------------------------


def elements(shapes: Sequence[Shape]) -> int:
    return sum(m * n for m, n in shapes)


def check(found: Sequence[Traffic], shapes: Sequence[Shape], per_group: int) -> tuple[int, int]:
    """Agreement of what ranks, process groups and reports count: bytes on the wire, and micro-groups."""
    report = found[0].report
    groups = len(report["micro_groups"])
    for own in found:
        assert own.functions == [*AGREEMENT, *["all_to_all_single"] * per_group * groups]
        assert own.started == len(own.functions) == own.report["collectives_per_step"] + len(AGREEMENT)
    by_call = [sum(sizes) for sizes in zip(*(own.sent for own in found), strict=True)]
    assert by_call == [sum(s) for s in zip(*(own.received for own in found), strict=True)]
    wire = sum(by_call)
    assert report["wire_bytes_per_element"] * elements(shapes) == pytest.approx(wire, rel=1e-12)
    reported = [
        group[f"{phase}_bytes"] for group in report["micro_groups"] for phase in ("gather", "scatter", "exchange")
    ]
    assert sum(reported) == wire
    return wire, groups


def one_per_shape(ranks: int) -> list[Shape]:
    return list(EVEN)


def uneven(ranks: int) -> list[Shape]:
    return [shape for shape in UNEVEN for _ in range(ranks)]


@pytest.mark.parametrize(("ranks", "shapes"), crossed([2, 3, 4], [one_per_shape, uneven], most=1))
def test_fsdp(ranks: int, shapes: Callable[[int], list[Shape]]) -> None:
    """4 (W - 1) / W bytes per element: bfloat16 to the owner and back, but not what the owner has.

    Of one uneven matrix an owner has more or less than 1 / W; of W equal ones with an owner each
    exactly 1 / W, whatever the shards. That gradients are finite, ranks tell with what they tell anyway.
    """
    made = shapes(ranks)
    found = counted(ranks, Case("fsdp", (ranks,)), made, strategy="owner", skip_nonfinite=True)
    wire, groups = check(found, made, per_group=2)
    assert wire * ranks == 4 * (ranks - 1) * elements(made)
    assert groups == 1


@pytest.mark.parametrize(
    ("ranks", "options"), crossed([2, 3, 4], [{"micro_groups": 3}, {"capacity": 1500, "depth": 3}], most=2), ids=str
)
def test_fsdp_in_micro_groups(ranks: int, options: dict[str, Any]) -> None:
    """Two collectives each, and as many bytes as in one."""
    made = uneven(ranks)
    found = counted(ranks, Case("fsdp", (ranks,)), made, strategy="owner", **options)
    wire, groups = check(found, made, per_group=2)
    assert wire * ranks == 4 * (ranks - 1) * elements(made)
    assert groups > 1


@pytest.mark.parametrize(
    ("ranks", "shapes"),
    crossed([2, 3, 4], [UNEVEN, (*EVEN, *UNEVEN, *UNEVEN)], most=2),
    ids=lambda v: str(v).replace(" ", ""),
)
def test_fsdp_with_any_owners(ranks: int, shapes: Sequence[Shape]) -> None:
    """What crosses is all but the rows that the owner has."""
    found = counted(ranks, Case("fsdp", (ranks,)), shapes, strategy="owner")
    wire, _ = check(found, shapes, per_group=2)
    expected = 0
    for task in found[0].report["tasks"]:
        rows, columns = task["shape"]
        length = -(-rows // ranks)
        kept = min(max(rows - task["owner"] * length, 0), length)
        expected += 4 * (rows - kept) * columns
    assert wire == expected


@pytest.mark.parametrize(("layout", "mesh"), [("hsdp", (2, 2)), ("tp_ddp", (2, 2)), full("hsdp", (2, 4))])
def test_hsdp(layout: str, mesh: tuple[int, int]) -> None:
    """Gather and scatter in one replica, then every fragment of the update to the other replicas."""
    replicas, shards = mesh
    shapes = list(EVEN)
    found = counted(replicas * shards, Case(layout, mesh), shapes, strategy="owner")
    wire, _ = check(found, shapes, per_group=3)
    expected = 4 * (shards - 1) * elements(shapes) + 2 * (replicas - 1) * shards * elements(shapes)
    assert wire * shards == expected


@pytest.mark.parametrize(("layout", "ranks"), crossed(["ddp", "replicated"], [2, 3, 4], most=2))
def test_ddp(layout: str, ranks: int) -> None:
    """Nothing to gather: the owner sends the bfloat16 update to every other rank, in one collective."""
    shapes = [*EVEN, *UNEVEN]
    found = counted(ranks, Case(layout, (ranks,)), shapes, strategy="owner")
    wire, _ = check(found, shapes, per_group=1)
    assert wire == 2 * (ranks - 1) * elements(shapes)


@pytest.mark.full
@pytest.mark.parametrize("ranks", first([2, 4]))
def test_replicated_strategy(ranks: int) -> None:
    """Everybody gathers everything, nothing comes back; with equal copies the ranks only meet."""
    shapes = [*EVEN, *UNEVEN]
    found = counted(ranks, Case("fsdp", (ranks,)), shapes, strategy="replicated")
    wire, _ = check(found, shapes, per_group=1)
    assert wire == 2 * (ranks - 1) * elements(shapes)
    found = counted(ranks, Case("ddp", (ranks,)), shapes, strategy="replicated")
    for own in found:
        assert own.functions == [*AGREEMENT, "all_reduce"]
        assert own.started == len(AGREEMENT) + own.report["collectives_per_step"] == 2
        assert own.report["wire_bytes_per_element"] == 0
