"""Programs are kept by what takes part in a step, the most recently used ones, on shared slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canzona_compile.ir.pipeline import PassHistory
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.session import program_cache
from canzona_compile.session.program_cache import BoundProgram, ProgramCache, ProgramKey

CPU = torch.device("cpu")


def key(*tasks: str, label: int = 0) -> ProgramKey:
    return ProgramKey(tasks, (("template", label, tasks),))


class Maker:
    """Makes programs with one slot of ten bytes per task, and tells which it made."""

    def __init__(self) -> None:
        self.made: list[ProgramKey] = []

    def __call__(self, wanted: ProgramKey, memory: SharedSlots) -> BoundProgram:
        self.made.append(wanted)
        executor: Any = SimpleNamespace(slots=memory.of([10] * len(wanted.tasks), CPU), follow=lambda: None)
        step: Any = wanted
        return BoundProgram(executor, step, PassHistory(()))


def test_a_program_is_made_once() -> None:
    cache, maker = ProgramCache(), Maker()
    first = cache.get(key("a", "b"), maker)
    assert cache.get(key("a", "b"), maker) is first
    assert (len(cache), maker.made) == (1, [key("a", "b")])


def test_other_tasks_and_other_variants_are_other_programs() -> None:
    cache, maker = ProgramCache(), Maker()
    keys = [key("a", "b"), key("a"), key("a", "b", label=1)]
    assert len({id(cache.get(k, maker)) for k in keys}) == 3
    assert [program.step for program in cache] == keys


def test_the_least_recently_used_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MOST_PROGRAMS", 2)
    cache, maker = ProgramCache(), Maker()
    for name in ("a", "b", "a", "c"):  # b was used before a
        cache.get(key(name), maker)
    assert [program.step for program in cache] == [key("a"), key("c")]
    cache.get(key("a"), maker)
    assert maker.made == [key("a"), key("b"), key("c")]
    cache.get(key("b"), maker)
    assert maker.made == [key("a"), key("b"), key("c"), key("b")]
    assert len(cache) == 2


def test_slots_are_shared_and_counted_once() -> None:
    cache, maker = ProgramCache(), Maker()
    large, small = cache.get(key("a", "b"), maker), cache.get(key("c"), maker)
    assert any(slot is small.executor.slots[0] for slot in large.executor.slots)
    assert cache.buffer_sizes == [10, 10]


def test_forgotten_programs_give_up_their_slots() -> None:
    cache, maker = ProgramCache(), Maker()
    before = cache.get(key("a"), maker).executor.slots
    cache.forget()
    assert (len(cache), cache.buffer_sizes) == (0, [])
    after = cache.get(key("a"), maker).executor.slots
    assert after[0] is not before[0]
