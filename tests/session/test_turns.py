"""Calls while a step is under way, of threads that log and of signal handlers: a state between steps, or an error."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
from torch.optim import AdamW, Muon
from torch.utils.data import DataLoader

from canzona_compile import CanzonaError, Chain, chain
from canzona_compile.session.step_driver import StepDriver
from tests.harness.layouts import Case
from tests.harness.pairs import Pair, Shape, capture_alone, parameters
from tests.harness.ranks import run

SHAPES, FEW = ((6, 4), (4, 6)) * 30, ((6, 4), (4, 6)) * 3
STEPS = 4


def two(params: list[Any]) -> Chain:
    return chain(Muon(params[:-4], lr=0.1), AdamW(params[-4:], lr=0.1))


@contextmanager
def thread(call: Callable[[], None]) -> Iterator[None]:
    """Inside this context, a thread makes a call again and again, and gets its turn in the middle of lines."""
    ended, before = threading.Event(), sys.getswitchinterval()

    def work() -> None:
        while not ended.wait(1e-3):
            call()

    sys.setswitchinterval(1e-5)
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        yield
    finally:
        ended.set()
        worker.join(10.0)
        sys.setswitchinterval(before)
        assert not worker.is_alive(), "it hangs"


@contextmanager
def signals(call: Callable[[], None]) -> Iterator[None]:
    """Inside this context, the handler of a signal that comes in the middle of a step makes a call."""
    step = StepDriver.step

    def interrupted(driver: StepDriver) -> bool:
        signal.raise_signal(signal.SIGALRM)
        return step(driver)

    before = signal.signal(signal.SIGALRM, lambda *_: call())
    try:
        with mock.patch.object(StepDriver, "step", interrupted):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


MEANWHILE = {"thread": thread, "signals": signals}


def trained(how: str, shapes: tuple[Shape, ...] = SHAPES, case: Case | None = None, **options: Any) -> set[str]:
    """Train while `report` and `state_dict` are called.

    Returns:
        What came of these calls: "between steps", "torn", or the problem of an error; and what differs in the end.
    """
    pair, found, numbers = Pair(two, shapes, case=case, **options), set[str](), itertools.count()
    pair.steps(2)

    def call() -> None:
        try:
            if next(numbers) % 16 == 0:
                pair.wrapped.canzona.report()
            state = pair.wrapped.state_dict()["state"]
            whole = len(state) == len(shapes) and all(v is not None for own in state.values() for v in own.values())
            counts = {float(own["step"]) for own in state.values() if "step" in own}
            found.add("between steps" if whole and len(counts) == 1 else "torn")
        except CanzonaError as error:
            found.add(error.problem)
        except Exception as error:
            found.add(repr(error))

    with MEANWHILE[how](call):
        pair.go(STEPS)
    return found | {*pair.different()}


REFUSED = "state_dict() was called in the middle of step() of the same optimizer, and nothing was changed"
OF_ALL_RANKS = "state_dict() was called in a thread of its own, but needs all ranks, which may be in a step"


@pytest.mark.parametrize("how", list(MEANWHILE))
def test_in_one_process(how: str) -> None:
    found = trained(how, SHAPES if how == "thread" else FEW) - {"between steps"}
    assert found == ({REFUSED} if how == "signals" else set())


@pytest.mark.parametrize(("case", "said"), [("fsdp", "between steps"), ("ddp", OF_ALL_RANKS)])
def test_threads_on_ranks(case: str, said: str) -> None:
    after = partial(capture_alone, two(parameters(FEW)))
    assert run(2, trained, "thread", FEW, Case(case, (2,)), after=after, strategy="owner") == [{said}] * 2


def forked() -> tuple[bool, int]:
    """Data loaders fork in mid-training, and a child ends as programs do: the status of the child."""
    pair = Pair(two, FEW, case=Case("ddp", (2,)), strategy="owner")
    pair.steps(2)
    for _ in DataLoader(list(range(4)), num_workers=2, multiprocessing_context="fork"):
        pair.step()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    pair.steps(1)
    ended, deadline = (0, 0), time.monotonic() + 200.0
    while ended[0] == 0 and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    pair.steps(1)
    return ended[0] == child, ended[1]


def test_children_that_are_forked_in_mid_training() -> None:
    assert run(2, forked, fresh=True, after=partial(capture_alone, two(parameters(FEW)))) == [(True, 0)] * 2
