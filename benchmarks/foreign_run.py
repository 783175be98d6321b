"""Runs test files of others with pytest, plainly or with wrapped optimizers, and writes what became of each test.

    python benchmarks/foreign_run.py ours results.jsonl --despite 'CUDA required' tests/test_optimizers.py

`foreign_tests.py` starts it. The layer is switched on as this file is imported: processes that a test spawns import
their main module again, so they have it too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foreign_layer
from canzona_compile.api.wrap import wrap
from foreign_outcomes import read

OURS, PLAIN = "ours", "plain"


class TooLong(Exception):
    """A test took longer than it may."""


class Recorder:
    """A plugin of pytest: a line of JSON for each test that was collected, and one for each that ended.

    Args:
        file: gets the lines.
        log: the file that grows with each wrapped optimizer.
        limit: seconds for one test.
        despite: a pattern of reasons; tests that would be skipped for one of them run.
        wanted: ids of the tests that run; None if all do.
    """

    def __init__(self, file: Path, log: Path, limit: float, despite: str, wanted: set[str] | None) -> None:
        self._file, self._log, self._limit, self._despite, self._wanted = file, log, limit, despite, wanted
        self._failed: dict[str, str] = {}
        self._outcome = ""

    def write(self, **line: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(trylast=True)  # of what is selected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._wanted is not None:
            items[:] = [item for item in items if item.nodeid in self._wanted]
        if "absl" in sys.modules:  # its flags have to be read before tests ask for them
            sys.modules["absl.flags"].FLAGS(["tests"])
        for item in items:
            for node in item.listchain() if self._despite else ():
                node.own_markers[:] = [m for m in node.own_markers if not self._unwanted(m)]
            self.write(test=item.nodeid, outcome="collected")

    def _unwanted(self, mark: pytest.Mark) -> bool:
        return mark.name == "skipif" and bool(re.search(self._despite, mark.kwargs.get("reason", "")))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, wrapped = time.monotonic(), self._num_wrapped()
        result = yield
        failed = self._failed.pop(item.nodeid, "")
        outcome = "failed" if failed else self._outcome
        more = {"text": failed, "wrapped": self._num_wrapped() - wrapped, "seconds": time.monotonic() - began}
        self.write(test=item.nodeid, outcome=outcome, **more)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        def stop(*_: Any) -> None:
            raise TooLong(f"more than {self._limit:g} s")

        random.seed(0)
        torch.manual_seed(0)  # so that tests that draw their inputs draw the same in both runs
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self._limit)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = self._failed.get(report.nodeid, "") + report.longreprtext + "\n"
        elif report.when == "setup" or report.skipped:
            self._outcome = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", text=report.longreprtext)

    def _num_wrapped(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=(OURS, PLAIN))
    parser.add_argument("results", type=Path, help="a file")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one test (default: %(default)s)")
    parser.add_argument("--despite", default="", help="run tests that are skipped for reasons like this pattern")
    parser.add_argument("--on-cpu", action="store_true", help="run what torch skips for want of GPUs")
    parser.add_argument("--passed", type=Path, metavar="FILE", help="only tests that have passed by these results")
    given, files = parser.parse_known_args()
    wanted = given.passed and {test for test, ended in read(given.passed).items() if ended.outcome == "passed"}
    options = ["--tb=native", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "--disable-warnings"]
    recorder = Recorder(given.results, log_of(given.results), given.limit, given.despite, wanted)
    return int(pytest.main([*options, *files], plugins=[recorder]))


def log_of(results: Path) -> Path:
    """The file that grows with each wrapped optimizer, next to the results."""
    return results.with_suffix(".wrapped")


def run_on_cpu() -> None:
    """Make the harness of torch's distributed tests start its ranks where there is no device, and start them fast."""
    from torch.testing._internal import common_distributed, common_fsdp

    def start(self: Any) -> None:
        self._start_processes(multiprocessing.get_context("forkserver").Process)

    multiprocessing.set_forkserver_preload(["canzona_compile.api.wrap", common_fsdp.__name__, "pytest"])
    ranks: Any = common_distributed.MultiProcessTestCase
    ranks._spawn_processes = start  # spawned ones would import everything anew
    skip: Any = common_distributed.skip_if_lt_x_gpu
    skip.__kwdefaults__["allow_cpu"] = True
    of_fsdp: Any = common_fsdp.FSDPTest
    of_fsdp._run = vars(common_fsdp.FSDPTestMixin)["_run"]  # which needs devices only if there are any


if "--on-cpu" in sys.argv:
    run_on_cpu()
if sys.argv[1:2] == [OURS]:
    foreign_layer.install(wrap, log_of(Path(sys.argv[2])))
if __name__ == "__main__":
    sys.exit(main())
