"""Optimizers whose elementwise work runs in generated kernels, in Triton's interpreter, on one rank."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Act, Event, Form
from canzona_compile.lowering.elementwise_kernels import kernel_of
from canzona_compile.lowering.memory_plan import RankMemory, prepared_slots
from canzona_compile.optimizers.normuon import NorMuon
from canzona_compile.optimizers.shampoo import Shampoo
from canzona_compile.optimizers.soap import SOAP
from tests.codegen.pointwise import generating, kernels_of
from tests.harness.marks import full
from tests.harness.pairs import Pair, muon
from tests.harness.samples import grid_of, muon_step
from tests.harness.toys import TwoKinds
from tests.harness.traps.grammar import toy
from tests.ir.test_printer import passes

pytest.importorskip("triton")
SHAPES = ((16, 12), (16, 12), (5, 7))  # captured once per shape


# Counts in a 0-d tensor, which scales the update: read by every block of a kernel, written by none.
Stepping = toy("stepping")("""
    if not state:
        state.update(step=torch.zeros(()), average=torch.zeros_like(param))
    state["step"] += 1
    state["average"].lerp_(grad, 0.25)
    param.add_(cube(state["average"]) / state["step"], alpha=-group["lr"])
""")


# An operator that no kernel is generated for.
Turning = toy("turning")('param.add_(torch.remainder(cube(grad), 3.0), alpha=-group["lr"])')


# Reads the new state after it was sent, and the parameter before.
Decaying = toy("decaying")("""
    if not state:
        state.update(average=torch.zeros_like(param), square=torch.zeros_like(param))
    state["average"].lerp_(grad + 0.1 * param, 0.25)
    state["square"].mul_(0.9).addcmul_(grad, grad, value=0.1)
    update = cube(state["average"]) / (state["square"].clamp(min=1e-3) + state["average"].abs())
    param.mul_(1 - group["lr"]).sub_(update * group["lr"])
""")


MAKE: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": lambda params: muon(params, weight_decay=0.1),
    "normuon": lambda params: NorMuon(params, lr=0.01),
    "soap": lambda params: SOAP(params, lr=0.01, every=2),
    "shampoo": lambda params: Shampoo(params, lr=0.01, every=2, graft=True, weight_decay=0.1),
    "muon-and-adam": lambda params: TwoKinds(
        [{"params": params[:2], "use_muon": True}, {"params": params[2:], "use_muon": False}]
    ),
    "groups": lambda params: muon([{"params": params[:1], "lr": 0.3}, {"params": params[1:], "momentum": 0.5}]),
    "decaying": Decaying,
    "stepping": Stepping,
}


def launches(optimizer: Any) -> dict[GroupedKernel, int]:
    """Of the kernels of all programs that were made."""
    steps = [program.step for program in optimizer.canzona.session.driver.programs]
    kernels = [m for step in steps for m in step.program.module.children() if isinstance(m, GroupedKernel)]
    return {kernel: kernel.launches for kernel in kernels}


@pytest.mark.parametrize(
    "name", [full(name) if name in ("normuon", "soap", "shampoo", "decaying", "stepping") else name for name in MAKE]
)
def test_optimizers_take_the_plain_ones_steps(name: str) -> None:
    """Bit for bit; one launch to prepare and one to apply per micro-group and step, and no other."""
    with generating():
        pair = Pair(MAKE[name], SHAPES)
        pair.steps(2)
        for step in range(4):  # SOAP and Shampoo refresh on every other one
            if step == 2:
                pair.set("lr", 0.02)
            before = launches(pair.wrapped)
            pair.step()
            own = kernels_of(pair.wrapped)
            ran = {kernel for kernel, count in launches(pair.wrapped).items() if count != before.get(kernel, 0)}
            assert ran == set(own.values())
            assert {kernel.launches - before.get(kernel, 0) for kernel in ran} == {1}
            emitted = pair.wrapped.canzona.step
            assert emitted.program.eager == {}
            stages = Counter(n.split("_", 1)[1] for n in own)
            assert stages["apply"] == len(emitted.micro_groups)
            whole = name in ("soap", "shampoo")  # all that they prepare needs the whole matrix
            assert stages["prepare"] == (0 if whole else len(emitted.micro_groups))
            assert set(stages) <= {"prepare", "apply"}


def test_state_is_written_by_prepare_where_apply_does_not_read_it() -> None:
    with generating():
        pair = Pair(MAKE["muon"], SHAPES)
        pair.steps(2)
    cuts = pair.wrapped.canzona.step.placed
    for cut in cuts:
        kernel = kernel_of(cut)
        assert not isinstance(kernel, str), kernel
        assert set(kernel.early.values()) == {"momentum_buffer"}
        assert [cut.fragment_writes[i] for i in kernel.apply] == ["param"]


def test_operators_without_a_kernel_stay_with_torch_and_are_reported() -> None:
    with generating():
        pair = Pair(Turning, SHAPES[:1])
        pair.steps(3)
    eager = pair.wrapped.canzona.step.program.eager
    assert set(eager.values()) == {"aten.remainder.Scalar has no Triton spelling"}
    assert [
        s for s in pair.report.suggestions if s.startswith("Elementwise work of turning_16x12_f32 runs operator by")
    ]
    assert kernels_of(pair.wrapped) == {}


def test_numbers_in_tensors_on_the_cpu_stay_with_torch() -> None:
    """Beside tensors of a device ATen takes 0-d ones on the CPU for numbers, and rounds them otherwise."""
    cut = run(muon_step(grid_of(1, 4), (64, 32)), passes(1))[1].step_at(Form.SCHEDULED).placed[0]
    assert not isinstance(kernel_of(cut), str)
    graph = copy.deepcopy(cut.apply)
    with graph.inserting_before(graph.output_node()):
        third = graph.call_function(torch.ops.aten.full.default, ([], 3.0))
    third.meta["val"] = torch.empty((), device="meta")
    assert kernel_of(replace(cut, apply=graph)) == "tensors on cpu and meta"


def test_sources_are_dumped(tmp_path: Path) -> None:
    with generating():
        pair = Pair(MAKE["muon"], SHAPES)
        pair.steps(2)
        kernel = kernels_of(pair.wrapped)["g0_apply"]
        folder = pair.wrapped.canzona.dump(tmp_path)
    assert (folder / "g0_apply.py").read_text() == kernel.source
    assert kernel.source.startswith('"""g0 apply of Muon, one launch"""')


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_what_is_prepared_shares_memory_only_with_what_it_never_meets(groups: int) -> None:
    step = run(muon_step(grid_of(1, 4), *[(64, 32)] * 6), passes(groups))[1].step_at(Form.SCHEDULED)
    at = {event: i for i, event in enumerate(step.schedule)}
    slots = prepared_slots(step)
    assert min(slots.values()) > max(b.slot for b in step.buffers)
    lives = {g.index: (at[Event(Act.PREPARE, g.index)], at[Event(Act.APPLY, g.index)]) for g in step.micro_groups}
    for a, b in combinations(lives, 2):
        meet = lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]
        assert not (meet and slots[a] == slots[b])
    assert len(set(slots.values())) <= min(len(lives), step.depth + 1)
    memory = RankMemory(step)
    views = [memory.prepared(index, torch.float32, (3, 5)) for index in slots for _ in range(2)]
    assert [(v.slot, v.offset) for v in views] == [(slot, offset) for slot in slots.values() for offset in (0, 64)]


def test_on_cpu_nothing_is_generated() -> None:
    pair = Pair(MAKE["muon"], SHAPES)
    pair.steps(2)
    program = pair.wrapped.canzona.step.program.module
    assert not any(isinstance(module, GroupedKernel) for module in program.modules())
