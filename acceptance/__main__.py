"""All that a GPU can show, riskiest parts first: `python -m acceptance`, in the folder of the repository.

It runs on one machine. A launcher may start it: then the first process does everything.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType

import torch

from acceptance.journal import AcceptanceJournal, counted
from acceptance.machine import facts_of_ranks
from acceptance.step import RANKS, AcceptanceStep, AcceptedMachine, OneProgram, OnRanks, needed
from acceptance.steps_audit import audit
from acceptance.steps_layouts import data_parallel, first_layouts, other_layouts
from acceptance.steps_machine import benchmarks, checked_memory, gpu_tests, machine_works, tuned
from acceptance.supervisor import Supervisor
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.output import exit_code

log = logging.getLogger("acceptance")

SMOKE, WHOLE = "smoke", "all"
ON_FEW = (2, 4)  # numbers of ranks that show something, where there are not as many GPUs
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
Taken = tuple[AcceptanceStep, int]  # a step, and how many ranks take it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0 if no step failed, 1 if one did, 2 if it could not be done."""
    parser = ArgumentParser(prog="acceptance", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("part", nargs="?", choices=PARTS, help="run only this part (default: all parts, in this order)")
    add("--minutes", type=float, metavar="M", help="end within M minutes; skip the steps that do not fit")
    add("--dry", action="store_true", help="run on the CPU with gloo and tiny matrices; skip steps that need CUDA")
    ranks = (
        "number of processes, or several numbers to run in turn (default: one per GPU, then 2 and 4 if there are fewer "
        "GPUs; dry: 1)"
    )
    add("--ranks", type=numbers, metavar="N,...", help=ranks)
    only = "run only steps with matching names, such as 'audit/*'; may be repeated"
    add("--only", action="append", metavar="PATTERN", help=only)
    output = "folder for the page and the archive of all results (%(default)s); logs go to FOLDER-files"
    add("--output", type=Path, default=Path("canzona-acceptance"), metavar="FOLDER", help=output)
    listed = "list the steps, what each shows and needs, and which would be skipped here"
    add("--list", action="store_true", help=listed)
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    for name in ("canzona_compile", "acceptance"):
        logging.getLogger(name).setLevel(logging.INFO)
    return exit_code(run, given)


def run(given: Namespace) -> int:
    """Take all steps, write down what each found, and return the exit code."""
    began, ranks = time.monotonic(), given.ranks
    if "LOCAL_RANK" in os.environ:
        if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
            raise CanzonaError("this runs on one machine", hint="start it on each machine by itself")
        if os.environ["LOCAL_RANK"] != "0":
            return 0
        ranks = ranks or (int(os.environ["WORLD_SIZE"]),)
        for name in [name for name in os.environ if name.startswith(LAUNCHED)]:
            del os.environ[name]  # its own ranks and programs are no ranks of the launcher
    steps = chosen(all_steps(given.dry, given.part), given.only)
    device = "cpu" if given.dry or (given.list and not torch.cuda.is_available()) else "cuda"
    if given.part == SMOKE and ranks is None and not given.list:
        ranks = (1,)
    machines = {n: AcceptedMachine(device, n) for n in ranks_here(ranks, device)}
    if given.list:
        list_steps(steps, machines)
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        raise CanzonaError(
            "torch finds no CUDA device", hint="pass --dry to try the command on the CPU with tiny matrices"
        )
    if device == "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise CanzonaError("TRITON_INTERPRET is set, so kernels would be interpreted", hint="unset TRITON_INTERPRET")
    deadline = began + 60 * given.minutes if given.minutes else None
    with interrupted_by_signals():
        return accept(steps, machines, given.output, given.part or WHOLE, deadline)


def accept(
    steps: Sequence[AcceptanceStep],
    machines: Mapping[int, AcceptedMachine],
    output: Path,
    part: str = WHOLE,
    deadline: float | None = None,
) -> int:
    """Take steps one after the other; 0 if none failed, otherwise 1.

    Everything that was written lies in the archive at the end, also after an interrupt.

    Args:
        deadline: of the clock `time.monotonic`: what would not end by then is skipped, or ended.
    """
    journal = AcceptanceJournal(output, part, facts_of_ranks(machines.values()))
    supervisor = Supervisor(machines, journal, journal.folder.absolute(), deadline)
    try:
        for step, ranks in taken(steps, machines):
            supervisor.take(step, ranks)
        journal.finish()
    finally:
        supervisor.close()
        log.info("%s: %s\neverything is in %s", journal.page, counted(journal.results), journal.pack())
    return 1 if journal.failed else 0


def correctness(dry: bool) -> Iterator[AcceptanceStep]:
    """Without the machine nothing works, and without `layouts` no number means anything.

    Then come cases that were found by reading to hang or to corrupt, then other layouts.
    """
    yield from (*machine_works(), *first_layouts(), *audit(), *other_layouts(), *data_parallel())


def smoke(dry: bool) -> Iterator[AcceptanceStep]:
    """What one rank can tell in three minutes: its steps of `correctness`, and the tests of what runs programs."""
    yield from (step for step in correctness(dry) if not RANKS & {*step.needs})
    yield from gpu_tests(dry, "runtime")


# The parts, in order; each one can be run by itself. A whole run has no smoke part: other parts have all of its steps.
PARTS: Mapping[str, Callable[[bool], Iterator[AcceptanceStep]]] = {
    SMOKE: smoke,
    "correctness": correctness,
    "tests": gpu_tests,
    "benchmarks": benchmarks,
    "tuning": tuned,
    "memory": checked_memory,
}


def all_steps(dry: bool, part: str | None = None) -> list[AcceptanceStep]:
    """The steps of a part, or of a whole run if there is none; `dry` if they are meant for a CPU."""
    return [step for name in ([part] if part else PARTS) if name != SMOKE or part for step in PARTS[name](dry)]


def taken(steps: Sequence[AcceptanceStep], machines: Mapping[int, AcceptedMachine]) -> list[Taken]:
    """Which numbers of ranks take which step, in order.

    Steps that need no ranks, and programs, are taken once. The others are taken by each number of ranks with which they
    show something: first the steps that fewer ranks could not take. A step that nothing here can take comes once, to
    say why. What needs processes of its own comes after the others of the same number of ranks, and once: first what
    ends them, then what needs other variables.
    """
    numbers, found = list(machines), list[Taken]()
    able = {step.name: [n for n in numbers if not machines[n].missing(step)] for step in steps}
    for n in numbers:
        turns: tuple[list[Taken], ...] = ([], [], [], [])
        for step in steps:
            with_these, work = able[step.name] or [numbers[-1]], step.work
            turn = int(n != with_these[0])
            if isinstance(work, OnRanks) and (work.ends_ranks or work.variables):
                turn = 3 if work.variables else 2
            once = turn > 1 or not RANKS & {*step.needs} or isinstance(work, OneProgram)
            if n == with_these[0] or (n in with_these and not once):
                turns[turn].append((step, n))
        found += itertools.chain(*turns)
    return found


def list_steps(steps: Sequence[AcceptanceStep], machines: Mapping[int, AcceptedMachine]) -> None:
    """Print what each step shows and needs, and with how many ranks it would be taken here, or why not."""
    here: dict[str, list[int]] = {}
    for step, ranks in taken(steps, machines):
        here.setdefault(step.name, []).append(ranks)
    print(f"Here: ranks {', '.join(f'{n} over {m.backend} on {m.device}' for n, m in machines.items())}\n")
    for step in steps:
        why = machines[here[step.name][-1]].missing(step)
        who = "one program" if isinstance(step.work, OneProgram) else f"ranks {', '.join(map(str, here[step.name]))}"
        print(f"{step.name}: {step.shows}\n    needs {needed(step)}; here: {f'skipped, {why}' if why else who}")


def chosen(steps: Sequence[AcceptanceStep], patterns: Sequence[str] | None) -> list[AcceptanceStep]:
    """The steps that were asked for."""
    found = [step for step in steps if not patterns or any(fnmatchcase(step.name, pattern) for pattern in patterns)]
    if not found:
        raise CanzonaError(f"no step is called {' or '.join(patterns or ())}", hint="--list names them")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Numbers of ranks, as in "1,2,4"."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ArgumentTypeError(f"{text!r} should be one or more numbers, as in 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))


def ranks_here(asked: tuple[int, ...] | None, device: str) -> tuple[int, ...]:
    """The numbers of ranks that take the steps."""
    if asked is not None:
        return asked
    if device == "cpu":
        return (1,)
    gpus = torch.cuda.device_count()
    return (gpus, *(n for n in ON_FEW if n > gpus))


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let what ends a command from outside raise, as Ctrl-C does, so that results are packed and ranks are ended.

    What is ignored, as nohup ignores that a terminal closes, stays ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
