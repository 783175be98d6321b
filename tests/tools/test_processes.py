"""The supervisor of all tools' processes: what they return, and how each way to fail is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from canzona_compile.compat.telling import heard_by, tell
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.tools import processes
from canzona_compile.tools.calibration.calibrate import calibrate
from canzona_compile.tools.processes import ProcessCall, asked, run, run_ranks, started
from tests.harness.marks import full
from tests.tools.user_builds import leaves, raises


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    """No process is left but those that other tests keep."""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


# -- what processes do -----------------------------------------------------------------------------


def sleeps(path: str | Path = os.devnull) -> None:
    """Standard error goes to the file."""
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    time.sleep(600)


def refuses() -> None:
    raise UnsupportedOptimizer("it is odd", at="0.weight", hint="take another")


def pid() -> int:
    print("not data")
    return os.getpid()


def tells(done: int) -> int:
    """Says how far it is."""
    tell("half of it", done, 2)
    return done


def goes_on(parts: int, seconds: float) -> None:
    for part in range(parts):
        tell(f"part {part + 1}")
        time.sleep(seconds)


def summed(rank: int, add: int) -> int:
    total = torch.tensor(rank + add)
    dist.all_reduce(total)
    return int(total)


def stays_away(rank: int) -> None:
    if rank == 1:
        refuses()
    dist.barrier()


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("function", "args", "says"),
    [
        (signal.raise_signal, (signal.SIGKILL,), "other was killed by SIGKILL\n  hint: check that there is memory"),
        full(os._exit, (0,), "other exited with code 0"),
        (raises, (), "other raised KeyError: 'no such layer'"),
        full(leaves, (), "other raised SystemExit: 3"),
        (threading.Lock, (), "other raised TypeError: cannot pickle"),
    ],
)
def test_a_process_that_fails_ends_the_others(function: Callable[..., Any], args: tuple[Any, ...], says: str) -> None:
    with pytest.raises(CanzonaError, match=says) as caught:
        run([ProcessCall("one", sleeps, ()), ProcessCall("other", function, args)], 100.0)
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    assert ("Traceback" in notes and "in the process 'other'" in notes) == ("raised" in says)


@pytest.mark.usefixtures("forked")
def test_our_errors_stay_what_they_are_while_others_wait() -> None:
    with pytest.raises(UnsupportedOptimizer) as caught:
        run_ranks(2, stays_away, (), 100.0)
    assert (caught.value.problem, caught.value.at, caught.value.hint) == ("it is odd", "0.weight", "take another")
    assert caught.value.__notes__ == ["in the process 'rank 1'"]


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_processes_that_hang_say_where(tmp_path: Path) -> None:
    said = [tmp_path / "one", tmp_path / "other"]
    with pytest.raises(CanzonaError, match="no result within 4 seconds") as caught:
        run([ProcessCall("quick", pid, ()), *(ProcessCall(path.name, sleeps, (path,)) for path in said)], 4.0)
    assert caught.value.at == "one, other"
    assert all("in sleeps" in path.read_text() for path in said)


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_a_limit_that_begins_again_with_progress() -> None:
    """The one that says how far it is outlives the limit, and the one that no longer does so hangs."""
    calls = [ProcessCall("on its way", goes_on, (6, 1.0)), ProcessCall("stuck", goes_on, (1, 600.0))]
    with started(calls) as workers:
        ends = {end.process.name: end for end in asked(workers, calls, 4.0, renewed=True)}
    assert {name: (end.how, end.process.told) for name, end in ends.items()} == {
        "on its way": ("returned", "part 6"),
        "stuck": ("hung", "part 1"),
    }


@pytest.mark.full
def test_results_come_in_order_and_standard_output_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    """In processes that start as those of users do."""
    assert len(set(run([ProcessCall("one", pid, ()), ProcessCall("two", pid, ())], 100.0))) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("not data") == 2


def test_a_machine_without_loopback_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network namespace is whose loopback interface is down; torch would wait for five minutes."""
    monkeypatch.setattr(processes, "HERE", "192.0.2.1")  # of documentation: nobody has it
    monkeypatch.setattr(processes, "JOIN", 1.0)
    with pytest.raises(CanzonaError, match=r"cannot connect to one another.*\n.*ip link set lo up"):
        run_ranks(2, summed, (10,), 100.0)
    with pytest.raises(CanzonaError, match="ip link set lo up"):
        calibrate(device="cpu", quick=True)


@pytest.mark.usefixtures("forked")
def test_ranks_meet_and_what_they_tell_is_told_here() -> None:
    heard: list[tuple[str, int, int]] = []
    with heard_by(lambda words, done=0, total=0: heard.append((words, done, total))):
        assert run_ranks(2, summed, (10,), 100.0, beside=[ProcessCall("beside", tells, (1,))]) == [21, 21]
    assert heard == [("half of it", 1, 2)]
