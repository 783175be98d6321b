"""Programs for CUDA: which stream each call runs on, and that events order whatever shares memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Muon

import canzona_compile
from canzona_compile.ir import program_ops, storage
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Act, BufferUse, Step
from canzona_compile.ir.storage import rules_of
from canzona_compile.lowering.stream_sync import COMPUTE, PACK
from canzona_compile.machine.hardware import Machine
from canzona_compile.session import plan, session
from tests.harness import ranks
from tests.harness.marks import also, full, only
from tests.harness.optimizers import share_captures
from tests.lowering.emitted_steps import CUDA, MAKERS, SHAPES, SIMILAR, WITH_LANES, emitted, templates
from tests.lowering.happens_before import Race, check, orders


def calls(step: Step) -> list[str]:
    """What a program calls, in order."""
    return [getattr(n.target, "__name__", str(n.target)) for n in step.program.module.graph.nodes]


GRIDS = [(1, 2), (2, 1), (2, 2), (1, 3)]


KEPT: list[Any] = [
    ("muon", "owner", (1, 2), CUDA),
    ("muon", "owner", (2, 1), CUDA),  # waits for readers
    ("muon", "owner", (1, 2), WITH_LANES),
    ("muon", "owner", (1, 1), WITH_LANES),
]


@pytest.mark.parametrize(
    ("name", "strategy", "grid", "machine"),
    only(KEPT, list(MAKERS), ["owner", "replicated"], [*GRIDS, (1, 1)], [CUDA, WITH_LANES]),
    ids=lambda value: value.rates.name if isinstance(value, Machine) and value.rates else None,
)
def test_every_access_is_ordered(name: str, strategy: Any, grid: tuple[int, int], machine: Machine) -> None:
    options: dict[str, Any] = {"machine": machine, "shapes": SIMILAR if machine is WITH_LANES else SHAPES}
    options |= {"matrices": 8, "strategy": strategy, "micro_groups": 3}
    for variant in range(len(templates(name, SHAPES[0]))):
        for rank in range(grid[0] * grid[1]):
            check(emitted(name, grid, rank=rank, variant=variant, **options), rank)


@pytest.mark.parametrize("grid", [(1, 1), *also([(1, 2), (2, 2)])], ids=str)
@pytest.mark.parametrize("state", ["int8", "bfloat16", *also(["int8 cpu"])])
@pytest.mark.parametrize("width", [128, *also([120])])
def test_every_access_to_stored_state_is_ordered(grid: tuple[int, int], state: str, width: int) -> None:
    rules = rules_of({"momentum_buffer": state})
    for rank in range(grid[0] * grid[1]):
        step = emitted("muon", grid, rank=rank, shapes=((16, width), (8, width)), state=rules, micro_groups=2)
        assert (storage.part in {n.target for n in step.program.module.graph.nodes}) == (
            "cpu" not in state and (width == 128 or state == "bfloat16")
        )
        check(step, rank)


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(
    grid=st.sampled_from(GRIDS),
    matrices=st.integers(1, 7),
    groups=st.integers(1, 5),
    depth=st.integers(1, 4),
    strategy=st.sampled_from(["auto", "owner", "replicated"]),
    capacity=st.sampled_from([1, 1024, 2**20]),
    fast=st.booleans(),
    data=st.data(),
)
def test_every_access_is_ordered_in_any_schedule(
    grid: tuple[int, int],
    matrices: int,
    groups: int,
    depth: int,
    strategy: Any,
    capacity: int,
    fast: bool,
    data: st.DataObject,
) -> None:
    rank = data.draw(st.integers(0, grid[0] * grid[1] - 1))
    options = {"strategy": strategy, "micro_groups": groups, "depth": depth, "capacity": capacity}
    numerics = "fast" if fast else "exact"
    check(emitted("muon", grid, rank=rank, matrices=matrices, numerics=numerics, **options), rank)


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ((1, 2), {}),
        ((1, 1), {"machine": WITH_LANES, "shapes": SIMILAR, "micro_groups": 2}),
        full((2, 1), {}),
        full((2, 2), {}),
        full((1, 2), {"strategy": "replicated"}),
        full((2, 2), {"machine": WITH_LANES, "shapes": SIMILAR}),
    ],
)
def test_an_order_that_is_missing_is_found(grid: tuple[int, int], options: dict[str, Any]) -> None:
    """Each `wait` and each `keep` is needed: without any one of them the checker finds a race."""
    step = emitted("muon", grid, **{"strategy": "owner", "micro_groups": 4, "matrices": 8, **options})
    names = [node.name for node in orders(step.program.module)]
    assert len(names) >= 4
    for name in names:
        module = step.program.module
        graph = fx.Graph()
        returned = graph.graph_copy(module.graph, {})
        graph.output(returned)
        graph.erase_node(next(n for n in graph.nodes if n.name == name))
        broken = replace(step, program=replace(step.program, module=fx.GraphModule(module, graph)))
        with pytest.raises(Race, match=r"wait for|is free while"):
            check(broken, 0)


def test_a_program_for_the_cpu_has_no_streams() -> None:
    step = emitted("muon", (1, 2), machine=Machine("cpu", "gloo", 1), strategy="owner")
    assert not {"on_stream", "record", "wait", "keep"} & set(calls(step))
    assert "streams" not in step.program.inputs


def test_a_rank_alone_needs_no_streams() -> None:
    for state in (None, rules_of({"momentum_buffer": "bfloat16"})):  # which prepare opens and rounds
        assert not {"on_stream", "record", "wait", "keep"} & set(calls(emitted("muon", (1, 1), state=state)))


def test_batches_that_leave_processors_idle_compute_in_lanes() -> None:
    """Side by side; everything else of a rank alone stays on one stream, and with a depth of 1 these do, too."""
    step = emitted("muon", (1, 1), machine=WITH_LANES, shapes=SIMILAR, micro_groups=1)
    current, where = "caller", dict[str, set[str]]()
    for node in step.program.module.graph.nodes:
        if node.target is program_ops.on_stream:
            current = node.args[1]
        elif node.op == "call_module":
            where.setdefault(str(node.target).rpartition("_f32_")[2], set()).add(current)
    assert where.pop("compute_stacked") == {COMPUTE, "compute 1"}
    assert where
    assert set().union(*where.values()) == {COMPUTE}
    assert "stacked lane=1:" in show(step)
    others: list[dict[str, Any]] = [{"machine": CUDA}, {"machine": WITH_LANES, "depth": 1}]
    for options in others:
        step = emitted("muon", (1, 1), shapes=SIMILAR, **options)
        assert {batch.lane for group in step.micro_groups for batch in group.batches} == {0}


def trained(shards: int, for_cuda: bool, **options: Any) -> tuple[list[torch.Tensor], set[str]]:
    """On ranks: whole parameters after some steps of a sharded Muon, and what its program calls."""
    machine = CUDA if for_cuda else Machine("cpu", "gloo", 1)
    mesh = init_device_mesh("cpu", (shards,))
    random = torch.Generator().manual_seed(3)
    values = [torch.randn(SHAPES[i % 2], generator=random) for i in range(6)]
    params = [torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]
    with (
        mock.patch.object(plan, "machine_of", return_value=machine),
        mock.patch.object(session, "free_memory", return_value=1 << 40),
    ):
        optimizer: Any = canzona_compile.wrap(Muon(params, lr=0.1), **options)
        share_captures(optimizer)
        for step in range(4):
            for param, value in zip(params, values, strict=True):
                param.grad = distribute_tensor(value.roll(step, 0), mesh, [Shard(0)])
            optimizer.step()
    return [p.full_tensor().detach() for p in params], set(calls(optimizer.canzona.step))


def step_alone() -> None:
    """What ranks would capture, each by itself."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = canzona_compile.wrap(Muon(params, lr=0.1))
    share_captures(optimizer)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()


@pytest.mark.full
def test_a_program_for_cuda_does_what_one_for_the_cpu_does() -> None:
    """With an order that streams do not change: the calls are the same ones."""
    options: dict[str, Any] = {"strategy": "owner", "micro_groups": 3, "after": partial(step_alone)}
    for (ours, called), (expected, plain) in zip(
        ranks.run(2, trained, 2, True, **options), ranks.run(2, trained, 2, False, **options), strict=True
    ):
        assert {"on_stream", "record", "wait"} <= called
        assert "on_stream" not in plain
        for a, b in zip(ours, expected, strict=True):  # steps of 0.1 in bf16; padding adds in another order
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_the_program_shows_its_streams() -> None:
    """Products run on a stream of their own; what feeds collectives, and what applies, on another."""
    step = emitted("muon", (1, 2), strategy="owner", micro_groups=2)
    current, where = "caller", {}
    for node in step.program.module.graph.nodes:
        if node.target is program_ops.on_stream:
            current = node.args[1]
        elif node.op == "call_module" or node.target in (program_ops.each, program_ops.finish):
            where.setdefault(str(node.target if node.op == "call_module" else node.target.__name__), set()).add(current)
    assert {v for k, s in where.items() for v in s if k == "each"} == {COMPUTE}
    assert {v for k, s in where.items() for v in s if k.endswith(("_prepare", "_apply")) or k == "finish"} == {PACK}
    assert current == "caller"
    text = show(step)
    assert "program_ops_on_stream(streams, 'pack')" in text
    assert "program_ops_wait(streams, 0)" in text
    stored = emitted("muon", (1, 2), strategy="owner", micro_groups=2, state=rules_of("cpu"))
    assert "program_ops_on_stream(streams, 'state')" in show(stored)  # copies to and from the host


def test_consecutive_groups_gather_into_different_memory() -> None:
    """Unpacking one group does not wait until the group before is computed."""
    step = emitted("muon", (1, 2), strategy="owner", micro_groups=4, matrices=8)
    slots = {b.micro_group: b.slot for b in step.buffers if b.use is BufferUse.GATHERED}
    order = [e.micro_group for e in step.schedule if e.act is Act.COMPUTE]
    assert len(order) > 2
    assert all(slots[a] != slots[b] for a, b in pairwise(order))
