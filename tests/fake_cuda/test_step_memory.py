"""The memory of whole trainings is what reports say that a step needs at most, by the stand-in's allocator."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import canzona_compile
from canzona_compile.ir.options import LARGEST_CAPACITY, LEAST_CAPACITY, SHARE, Options, capacity_within
from canzona_compile.machine.hardware import Machine
from canzona_compile.report.units import format_bytes
from canzona_compile.session.plan import proposed_capacity
from canzona_compile.session.step_memory import StepMemory
from tests.fake_cuda import trainings
from tests.fake_cuda.device import current_device
from tests.fake_cuda.rank_programs import torch_alone
from tests.fake_cuda.test_trainings import reload
from tests.fake_cuda.trainings import Script, plain_training, run_script
from tests.harness.layouts import Case
from tests.harness.marks import first

# Large enough that 512 bytes, to which the allocator rounds, are little.
SHAPES = ((96, 64), (64, 96), (96, 64), (56, 40), (96, 64))
GAPS = {2: (1,), 3: (1,), 4: (1,), 7: (1,)}  # the program without a gradient is recorded, too


@dataclass(frozen=True)
class SeenStep:
    """What a step held at most and keeps, in bytes, and what the report says after it."""

    most: int
    held: int
    said: StepMemory


class Watch:
    """Looks at the memory of a rank's device before every step, as an edit of a script."""

    def __init__(self) -> None:
        self.steps: dict[int, list[SeenStep]] = defaultdict(list)

    def __call__(self, optimizer: Any) -> None:
        if not canzona_compile.is_wrapped(optimizer):
            return
        device = current_device()
        if optimizer.canzona.session.driver is not None:
            report = optimizer.canzona.report()
            assert f"{format_bytes(report.memory.most)} in addition to parameters" in report.to_text(120)
            self.steps[device.index].append(SeenStep(device.most, device.held, report.memory))
        device.most = device.held


@contextmanager
def larger_matrices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainings, "SHAPES", SHAPES)
        yield


def watched(name: str, case: Case, steps: int, kernels: bool = False, **script: Any) -> dict[int, list[SeenStep]]:
    """Train, and look at the memory of every rank after every step but the last."""
    watch = Watch()
    edits: dict[int, Any] = dict.fromkeys(range(steps), watch)
    for step, edit in script.pop("edits", {}).items():
        edits[step] = lambda optimizer, edit=edit: (watch(optimizer), edit(optimizer))
    with larger_matrices(), nullcontext() if kernels else torch_alone():
        made = Script(name, case, steps, edits=edits, kernels=kernels, **script)
        run_script(made, None, plain_training(made))
    return watch.steps


def reloading(optimizer: Any) -> None:
    """Give up the plan, with its buffers and recordings."""
    reload(optimizer)
    if canzona_compile.is_wrapped(optimizer):
        assert optimizer.canzona.session.driver is None
        assert current_device().held == 0


TWO = Case("fsdp", (2,))
ALONE = Case("plain", ())
TRAININGS: dict[str, dict[str, Any]] = {
    "muon on shards": {"name": "muon", "case": TWO, "steps": 6},
    "muon of tp": {"name": "muon", "case": Case("tp_rows", (2,)), "steps": 6},
    "muon on replicas": {"name": "muon", "case": Case("ddp", (2,)), "steps": 6},
    "muon alone": {"name": "muon", "case": ALONE, "steps": 6},
    "muon on replicas of shards": {"name": "muon", "case": Case("hsdp", (2, 2)), "steps": 6},
    "soap on shards": {"name": "soap", "case": TWO, "steps": 9},
    "shampoo on shards": {"name": "shampoo", "case": TWO, "steps": 9},
    "soap alone": {"name": "soap", "case": ALONE, "steps": 9},
    "shampoo alone": {"name": "shampoo", "case": ALONE, "steps": 9},
    "generated kernels": {"name": "muon", "case": TWO, "steps": 6, "kernels": True},
    "gradients are missing": {"name": "muon", "case": Case("ddp", (2,)), "steps": 10, "missing": GAPS},
    "soap, and gradients are missing": {"name": "soap", "case": ALONE, "steps": 12, "missing": {7: (1,)}},
    "gradients move late": {"name": "muon", "case": TWO, "steps": 8, "moving": lambda rank, step: step == 5},
    "gradients move always": {"name": "muon", "case": TWO, "steps": 8, "moving": lambda rank, step: True},
    "soap, and gradients move always": {
        "name": "soap",
        "case": ALONE,
        "steps": 14,
        "moving": lambda rank, step: True,
    },
    "kernels, and gradients move always": {
        "name": "muon",
        "case": TWO,
        "steps": 7,
        "kernels": True,
        "moving": lambda rank, step: True,
    },
    "another plan": {"name": "muon", "case": TWO, "steps": 9, "edits": {4: reloading}},
}


COPYING = ("gradients move always", "soap, and gradients move always")


@pytest.mark.parametrize("training", [*first([t for t in TRAININGS if t not in COPYING]), COPYING[0]])
def test_steps_hold_what_reports_say(training: str) -> None:
    for own in watched(**TRAININGS[training]).values():
        last = own[-1].said
        assert 0.95 * last.most <= max(step.most for step in own) <= 1.05 * last.most
        kept = last.buffers + last.tables + last.recordings + last.gradients
        assert (last.gradients > 0) == (training in COPYING)
        assert 0.95 * kept <= own[-1].held <= 1.05 * kept


@pytest.mark.full
def test_programs_that_grow_leave_nothing_behind() -> None:
    """The first programs have other gradients, and smaller buffers. All that is left are those of the last one."""
    small = {0: (0, 3, 4), 1: (0, 3, 4)}
    grown = watched("muon", TWO, 7, missing=small)
    for rank, own in watched("muon", TWO, 5).items():
        assert grown[rank][0].said.buffers < own[-1].said.buffers
        assert grown[rank][-1].said.buffers == own[-1].said.buffers
        assert grown[rank][-1].held == own[-1].held
        assert 0.75 * grown[rank][-1].said.most <= max(step.most for step in grown[rank]) <= grown[rank][-1].said.most


@pytest.mark.parametrize("seed", first(range(6)))
def test_programs_whose_buffers_have_grown_compute_the_same(seed: int) -> None:
    """One is recorded; then another one needs larger buffers; then the first one is recorded and replayed again."""
    missing = dict.fromkeys((*range(5), *range(7, 12)), (0, 3, 4))
    script = Script("muon", TWO, 12, missing=missing)
    plain = plain_training(script)
    with torch_alone():
        right, found = run_script(script, None, plain), run_script(script, seed, plain)
    for own, other in zip(right, found, strict=True):
        assert all(map(torch.equal, own.values, other.values))
        assert "recorded once" in other.how[4]
        assert "recorded 2 times" in other.how[-1]


@pytest.mark.full
def test_recordings_of_several_programs_take_what_the_largest_takes() -> None:
    """Each program is recorded; values that streams leave to one another lie in the same memory."""
    for own in watched("muon", Case("ddp", (2,)), 12, missing=GAPS).values():
        recordings = {step.said.recordings for step in own}
        assert len(recordings) == 1
        assert own[-1].held - own[-1].said.buffers == recordings.pop()


def chosen_by(rooms: tuple[int, int]) -> tuple[int, str, int]:
    """What two ranks with so much free memory choose: capacity and plan; and the bytes of the buffers of both."""
    found: dict[int, set[tuple[int, str, int]]] = {}

    def look(optimizer: Any) -> None:
        if not canzona_compile.is_wrapped(optimizer):
            return
        device, handle = current_device(), optimizer.canzona
        device.room = rooms[device.index] if handle.session.driver is None else 1 << 40
        if handle.session.driver is not None:
            one = (handle.report().capacity, handle.plan().fingerprint, handle.report().memory.buffers)
            found.setdefault(device.index, set()).add(one)
            reload(optimizer)

    with larger_matrices(), torch_alone():
        script = Script("muon", TWO, 5, edits={0: look, 2: look, 4: look}, options={"strategy": "owner"})
        results = run_script(script, None, plain_training(script))
    assert all(result.distance < 2e-3 for result in results)
    ((*first, one),), ((*second, other),) = found[0], found[1]  # later plans keep the capacity, though more is free
    assert first == second
    return (*first, one + other)


def test_the_rank_with_the_least_free_memory_decides_on_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canzona_compile.ir.options.LEAST_CAPACITY", 1)
    most, plan, large = chosen_by((1 << 40, 1 << 40))
    least, other, small = chosen_by((1 << 40, 600_000))
    assert (most, least) == (LARGEST_CAPACITY, 2**14)
    assert plan != other
    assert small < large


def test_what_is_given_or_known_decides_before_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, gib in (("memory_reserved", 3), ("max_memory_allocated", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda device, gib=gib: gib * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**40))

    def proposed(*options: Any, device: str = "cuda") -> int:
        owned: Any = SimpleNamespace(machine=Machine(device, "", 1))
        return proposed_capacity(owned, torch.device(device), options)

    assert proposed(Options()) == 2 * 2**30 // SHARE, "what the passes before needed at most is not free"
    assert proposed(Options(), Options(agreed=(((0, 1), 4096),))) == 4096
    assert proposed(Options(), device="cpu") == proposed(Options(capacity=64)) == 0
    assert proposed(SimpleNamespace(capacity=None, plan="followed")) == 0


def test_a_capacity_is_a_power_of_two_within_bounds() -> None:
    for free in (-(10**9), 0, 10**9, 80 * 10**9):
        share = 2 ** int(math.log2(max(1, free // SHARE)))
        assert capacity_within(free) == min(max(share, LEAST_CAPACITY), LARGEST_CAPACITY)
