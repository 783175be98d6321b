"""Tests of others with wrapped optimizers: what passes with plain ones, and does it pass with ours?

    python benchmarks/foreign_tests.py
    python benchmarks/foreign_tests.py --suite optim-db --only 'test_steps and Adam'
    python benchmarks/foreign_tests.py --pytorch pytorch --dion dion --emerging Emerging-Optimizers --out results

Each test file runs in a process of its own, and what has passed runs again with every optimizer wrapped as it is made.
`optim-db` needs no checkout, but expecttest; the other suites need a checkout each, and what its tests import. Exit
code 1 if a test that passes plainly ends differently or with an internal error. See README.md beside it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from foreign_outcomes import (
    BAD,
    DIFFERENT,
    ERROR,
    PASSED,
    PLAIN_FAILS,
    REFUSED,
    SKIPPED,
    Compared,
    compare,
    counts,
    read,
)
from foreign_run import OURS, PLAIN, log_of

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Suite:
    """Test files of one project.

    Attributes:
        checkout: the option that has the folder; empty if the files are ours.
        files: patterns below the folder.
        left_out: files of them that need what this script does not start, such as ranks of torchrun.
        paths: folders of the checkout that its tests import from.
        despite: a pattern of reasons of skips that hold for kernels only, and not for the optimizers.
        on_cpu: whether what torch skips for want of GPUs runs on the CPU with gloo.
    """

    checkout: str
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    paths: tuple[str, ...] = (".",)
    despite: str = ""
    on_cpu: bool = False


SUITES = {
    "optim-db": Suite("", ("foreign_optim_db.py",)),
    "torch-schedulers": Suite("pytorch", ("test/optim/test_lrscheduler.py", "test/optim/test_swa_utils.py")),
    "torch-fsdp2": Suite(
        "pytorch",
        (
            *(
                f"test/distributed/_composable/fsdp/test_fully_shard_{name}.py"
                for name in ("autograd", "clip_grad_norm_", "comm", "extensions", "frozen", "state_dict", "training")
            ),
        ),
        on_cpu=True,
    ),
    "torch-checkpoint": Suite("pytorch", ("test/distributed/checkpoint/test_state_dict.py",), on_cpu=True),
    "torch-tp": Suite("pytorch", ("test/distributed/tensor/parallel/test_tp_examples.py",), on_cpu=True),
    "dion": Suite(
        "dion", ("tests/test_*.py",), left_out=("tests/test_cuda_graph.py",), despite="CUDA required|requires CUDA"
    ),
    "emerging": Suite(
        "emerging", ("tests/test_*.py", "tests/contrib/test_*.py"), left_out=("tests/test_distributed_*.py",)
    ),
}


@dataclass(frozen=True, slots=True)
class File:
    """A test file, and where the results of its two runs go."""

    suite: str
    folder: Path
    path: Path
    out: Path

    def results(self, how: str) -> Path:
        return self.out / self.suite / f"{self.path.stem}-{how}.jsonl"

    def run(self, only: str, each: float, whole: float) -> None:
        """Run it with plain optimizers, and then what has passed with wrapped ones."""
        for how in (PLAIN, OURS):
            self._run(how, only, each, whole)

    def _run(self, how: str, only: str, each: float, whole: float) -> None:
        suite, results = SUITES[self.suite], self.results(how)
        paths = [*(str(self.folder / path) for path in suite.paths), str(HERE), str(HERE.parent)]
        known = os.environ.get("PYTHONPATH", "")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*paths, known]).rstrip(os.pathsep)}
        command = [sys.executable, str(HERE / "foreign_run.py"), how, str(results), "--limit", f"{each}"]
        command += ["--despite", suite.despite] + (["--on-cpu"] if suite.on_cpu else [])
        command += ["--passed", str(self.results(PLAIN))] if how == OURS else []
        command += ["--rootdir", str(self.folder), str(self.path)] + (["-k", only] if only else [])
        results.parent.mkdir(parents=True, exist_ok=True)
        for old in (results, log_of(results)):
            old.unlink(missing_ok=True)
        with results.with_suffix(".log").open("wb") as log:
            running = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                running.wait(whole)
            except subprocess.TimeoutExpired:
                print(f"{self.path.name}, {how}: ended after {whole:g} s", file=sys.stderr)
            finally:
                kill_session(running)

    def compared(self) -> list[Compared]:
        """Every test of it in both runs."""
        return list(compare(read(self.results(PLAIN)), read(self.results(OURS))))


def kill_session(running: subprocess.Popen[bytes]) -> None:
    """End a process, and what it has started and left."""
    try:
        os.killpg(running.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    running.wait()


def files_of(name: str, folder: Path, out: Path) -> Iterator[File]:
    """Every test file of a suite."""
    suite = SUITES[name]
    left_out = {path for pattern in suite.left_out for path in folder.glob(pattern)}
    for path in sorted({path for pattern in suite.files for path in folder.glob(pattern)} - left_out):
        yield File(name, folder, path, out)


def table_of(found: dict[str, list[Compared]]) -> Table:
    """A row per suite."""
    table = Table("suite", "tests", "skipped", "plain fails", "plain passes", "with optimizers", "ours passes")
    for name in (REFUSED, DIFFERENT, ERROR):
        table.add_column(name)
    for suite, tests in found.items():
        of = counts(tests)
        passes = [one for one in tests if one.outcome not in (SKIPPED, PLAIN_FAILS)]
        wrapping = sum(bool(one.ours.wrapped) for one in passes)
        row = [len(tests), of[SKIPPED], of[PLAIN_FAILS], len(passes), wrapping]
        table.add_row(suite, *map(str, row), *(str(of[name]) for name in (PASSED, REFUSED, DIFFERENT, ERROR)))
    return table


def show(found: dict[str, list[Compared]]) -> None:
    """Print what is different or an error test by test, refusals by their text, and the table."""
    for suite, tests in found.items():
        for one in tests:
            if one.outcome in BAD:
                print(f"{suite}: {one.outcome}: {one.test}\n    {one.reason}")
        for outcome in (REFUSED, PLAIN_FAILS):
            for reason, times in Counter(one.reason for one in tests if one.outcome == outcome).most_common():
                print(f"{suite}: {outcome}: {times} x {reason}")
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=Path, metavar="DIR", help="a checkout of pytorch, or its folder test alone")
    parser.add_argument("--dion", type=Path, metavar="DIR", help="a checkout of microsoft/dion")
    parser.add_argument("--emerging", type=Path, metavar="DIR", help="a checkout of NVIDIA-NeMo/Emerging-Optimizers")
    parser.add_argument("--suite", help=f"comma-separated, of {', '.join(SUITES)} (default: those with a checkout)")
    parser.add_argument("--only", default="", help="an expression for the names of tests, as pytest's -k takes")
    parser.add_argument("--jobs", type=int, default=2, help="test files at a time (default: %(default)s)")
    parser.add_argument("--each", type=float, default=300, help="seconds for one test (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for one file (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep results and logs there")
    given = parser.parse_args()
    folders = {"": HERE}
    folders |= {name: path.resolve() for name in ("pytorch", "dion", "emerging") if (path := vars(given)[name])}
    wanted = given.suite.split(",") if given.suite else [n for n, suite in SUITES.items() if suite.checkout in folders]
    if unknown := [name for name in wanted if name not in SUITES]:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    if missing := [name for name in wanted if SUITES[name].checkout not in folders]:
        parser.error(f"{missing[0]} needs --{SUITES[missing[0]].checkout} DIR")
    began, found = time.monotonic(), dict[str, list[Compared]]()
    with tempfile.TemporaryDirectory(prefix="foreign-tests-") as folder:
        out = given.out.resolve() if given.out else Path(folder)
        files = [file for name in wanted for file in files_of(name, folders[SUITES[name].checkout], out)]
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(lambda file: file.run(given.only, given.each, given.limit), files))
        for file in files:
            found.setdefault(file.suite, []).extend(file.compared())
    show(found)
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(one.outcome in BAD for tests in found.values() for one in tests))


if __name__ == "__main__":
    sys.exit(main())
