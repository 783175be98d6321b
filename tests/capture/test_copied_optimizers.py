"""Optimizers that hold what copies share, and miniatures made while the collector runs."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from typing import Any

import pytest
from torch import Tensor
from torch.optim import SGD

import canzona_compile
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.rehearsal.rehearsal import rehearse
from canzona_compile.replica.miniature import Miniature
from tests.capture.test_copies import Handle
from tests.harness.pairs import Pair, feed, parameters, params_of, same_bits
from tests.harness.traps import NAMED
from tests.harness.traps.grammar import toy
from tests.harness.traps.kit import identity

SHAPES = ((6, 4), (4, 6), (6, 4))


HELD = {"outside": f"from {Handle.__module__} import Handle", "begin": "self.handle = Handle()"}
# Writes into an object that copies of the optimizer share.
NotesInHandle = toy("notes-in-handle", **HELD)("""
    self.handle.notes["steps"] = self.handle.notes.get("steps", 0) + 1
    param.add_(cube(grad), alpha=-0.1 / self.handle.notes["steps"])
""")
ReadsHandle = toy("reads-handle", **HELD)("param.add_(cube(grad), alpha=-0.1 if self.handle.notes else -0.2)")


def test_a_step_that_writes_what_copies_share_is_refused_and_nothing_is_written() -> None:
    optimizer: Any = canzona_compile.wrap(NotesInHandle(parameters(SHAPES)))
    before = [p.detach().clone() for p in params_of(optimizer)]
    feed(optimizer, 0)
    with pytest.raises(UnsupportedOptimizer, match=r"the Handle that copies share"):
        optimizer.step()
    assert optimizer.handle.notes == {}
    assert all(map(same_bits, before, params_of(optimizer)))


def test_a_step_that_reads_what_copies_share_is_equal() -> None:
    gc.collect()
    before = Handle.freed
    pair = Pair(ReadsHandle, SHAPES)
    pair.steps(2)
    gc.collect()
    assert Handle.freed == before


def test_an_optimizer_with_a_finalizer_is_refused() -> None:
    class Freeing(SGD):
        def __del__(self) -> None:
            pass

    with pytest.raises(UnsupportedOptimizer, match="has a finalizer, __del__"):
        canzona_compile.wrap(Freeing(parameters(SHAPES), lr=0.1))


@pytest.mark.parametrize("trap", ["closure-default-argument", "closure-on-parameter", "closure-in-group"])
def test_a_rehearsal_does_not_step_what_functions_hold(trap: str) -> None:
    optimizer = NAMED[trap].make(parameters(SHAPES))
    feed(optimizer, 0)
    before = [p.detach().clone() for p in params_of(optimizer)]
    with contextlib.suppress(CanzonaError):
        rehearse(optimizer)
    assert all(map(same_bits, before, params_of(optimizer)))


@pytest.mark.parametrize("trap", ["cache-of-a-decorator", "cache-on-itself", "cache-in-a-module"])
def test_a_plan_leaves_nothing_in_the_caches_of_the_process(trap: str) -> None:
    plain = NAMED[trap].make(parameters(SHAPES))
    module = sys.modules[type(plain).__module__]
    optimizer: Any = canzona_compile.wrap(plain)
    feed(optimizer, 0)
    with contextlib.suppress(CanzonaError):
        optimizer.step()
    cached = getattr(module, "doubled", None) or getattr(module, "identity", identity)
    assert [type(cached(size)) for size in (4, 6)] == [Tensor, Tensor]


# -- ids that are given again ----------------------------------------------------------------------


class Laden(SGD):
    """Dicts and lists at many places, so that copies of them come and go."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for i in range(4):
            setattr(self, f"table{i}", {"a": [i], "b": {"c": i}})
        for param in params_of(self):
            param.marks = {"a": [1], "b": {}}  # type: ignore[attr-defined]
        self.state["odd"] = {"k": [1]}  # type: ignore[index]


def well_made(small: Miniature) -> bool:
    """Whether every copy is of the class of its original."""
    own: Any = small.optimizer
    tables = [getattr(own, f"table{i}") == {"a": [i], "b": {"c": i}} for i in range(4)]
    marks = [p.marks == {"a": [1], "b": {}} for p in small.params]  # type: ignore[attr-defined]
    groups = [isinstance(group["lr"], float) for group in own.param_groups]
    return all(tables) and all(marks) and all(groups) and own.state["odd"] == {"k": [1]}


def count_of_failures(miniatures: int) -> int:
    """Make many miniatures while the collector runs at every chance."""
    optimizer = Laden(parameters(SHAPES))
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        failures = 0
        for i in range(miniatures):
            litter = [{} for _ in range(i % 7)]
            try:
                failures += not well_made(Miniature(optimizer, [[0, 1, 2]]))
            except Exception:  # whatever a copy of the wrong class leads to
                failures += 1
            del litter
        return failures
    finally:
        gc.set_threshold(*before)


def test_miniatures_while_the_collector_runs() -> None:
    assert count_of_failures(60) == 0


def test_no_address_of_a_memo_is_given_to_what_is_copied_later() -> None:
    """Python keeps alive what a deep copy has copied in a list, under the id of the memo itself."""
    optimizer = Laden(parameters(SHAPES))
    seen: list[dict[Any, Any]] = []

    class Asks:
        def __deepcopy__(self, memo: dict[Any, Any]) -> Asks:
            memo[id(self)] = made = Asks()
            copy.deepcopy([1], memo)
            seen.append(memo)
            return made

    for name in ("first", "second"):
        setattr(optimizer, name, Asks())
    optimizer.param_groups[0]["third"] = Asks()
    optimizer.state["fourth"] = Asks()  # type: ignore[index]
    Miniature(optimizer, [[0, 1, 2]])
    assert len(seen) == 4
    for memo in seen:
        foreign = [key for key, made in memo.items() if isinstance(made, list) and made and key == id(made)]
        assert foreign == []
        held = [key for key in memo if key != id(memo) and isinstance(memo[key], list) and memo[key] is kept_by(memo)]
        assert held == []
    assert len({id(memo) for memo in seen}) == 1


def kept_by(memo: dict[Any, Any]) -> Any:
    return memo.get(id(memo))
