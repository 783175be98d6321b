"""The memory that whole trainings keep, by the stand-in's allocator, and the capacity that they choose by it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import canzona_compile
from canzona_compile.ir.options import LARGEST_CAPACITY, LEAST_CAPACITY, SHARE, Options, capacity_within
from canzona_compile.session.plan import proposed_capacity
from canzona_compile.session.session import free_memory
from tests.fake_cuda import trainings
from tests.fake_cuda.device import current_device
from tests.fake_cuda.rank_programs import torch_alone
from tests.fake_cuda.test_trainings import reload
from tests.fake_cuda.trainings import Script, plain_training, run_script
from tests.harness.layouts import Case

# Large enough that 512 bytes, to which the allocator rounds, are little.
SHAPES = ((96, 64), (64, 96), (96, 64), (56, 40), (96, 64))
GAPS = {2: (1,), 3: (1,), 4: (1,), 7: (1,)}  # the program without a gradient is recorded, too


@dataclass(frozen=True)
class SeenStep:
    """What is held after a step, in bytes, and how much of it the report calls buffers."""

    held: int
    buffers: int


class Watch:
    """Looks at the memory of a rank's device before every step, as an edit of a script."""

    def __init__(self) -> None:
        self.steps: dict[int, list[SeenStep]] = defaultdict(list)

    def __call__(self, optimizer: Any) -> None:
        if not canzona_compile.is_wrapped(optimizer):
            return
        device = current_device()
        if optimizer.canzona.session.driver is not None:
            self.steps[device.index].append(SeenStep(device.held, optimizer.canzona.report().memory.buffers))


@contextmanager
def larger_matrices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainings, "SHAPES", SHAPES)
        yield


def watched(case: Case, steps: int, **script: Any) -> dict[int, list[SeenStep]]:
    """Train Muon, and look at the memory of every rank after every step but the last."""
    watch = Watch()
    with larger_matrices(), torch_alone():
        made = Script("muon", case, steps, edits=dict.fromkeys(range(steps), watch), **script)
        run_script(made, None, plain_training(made))
    return watch.steps


TWO = Case("fsdp", (2,))


@pytest.mark.full
def test_programs_that_grow_leave_nothing_behind() -> None:
    """The first programs have other gradients, and smaller buffers. All that is left are those of the last one."""
    small = {0: (0, 3, 4), 1: (0, 3, 4)}
    grown = watched(TWO, 7, missing=small)
    for rank, own in watched(TWO, 5).items():
        assert grown[rank][0].buffers < own[-1].buffers
        assert grown[rank][-1] == own[-1]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
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
    case = Case("ddp", (2,))
    of_one = watched(case, 6)
    for rank, own in watched(case, 12, missing=GAPS).items():
        assert own[-1] == of_one[rank][-1]


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
            assert device.held == 0, "a plan that is given up keeps no buffers or recordings"

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
    free = free_memory(torch.device("cuda"))
    assert free == 2 * 2**30, "what the passes before needed at most is not free"
    assert proposed_capacity([Options()], free) == free // SHARE
    assert proposed_capacity([Options(), Options(agreed=(((0, 1), 4096),))], free) == 4096
    assert proposed_capacity([Options()], None) == proposed_capacity([Options(capacity=64)], free) == 0
    followed: Any = SimpleNamespace(capacity=None, plan="followed")
    assert proposed_capacity([followed], free) == 0


def test_a_capacity_is_a_power_of_two_within_bounds() -> None:
    for free in (-(10**9), 0, 10**9, 80 * 10**9):
        share = 2 ** int(math.log2(max(1, free // SHARE)))
        assert capacity_within(free) == min(max(share, LEAST_CAPACITY), LARGEST_CAPACITY)
