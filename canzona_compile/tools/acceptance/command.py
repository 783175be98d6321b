"""`python -m canzona_compile accept`, or by torchrun `-m canzona_compile.tools.accept`."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.rendezvous import rendezvous

from canzona_compile.compat.torch_private import PrefixStore
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.acceptance.journal import AcceptanceJournal, counted, files_of
from canzona_compile.tools.acceptance.machine import AcceptedMachine, checkout, facts, needed
from canzona_compile.tools.acceptance.step import AcceptanceStep, OneProgram, OnRanks
from canzona_compile.tools.acceptance.steps_audit import audit
from canzona_compile.tools.acceptance.steps_layouts import data_parallel, first_layouts, other_layouts
from canzona_compile.tools.acceptance.steps_machine import benchmarks, checked_memory, gpu_tests, machine_works, tuned
from canzona_compile.tools.acceptance.supervisor import MARGIN, LocalRanks, Supervisor
from canzona_compile.tools.processes import RankPlace, backend_for, places_here

log = logging.getLogger(__name__)

FOLDER = "canzona-acceptance"
SMOKE, WHOLE = "smoke", "all"
# Seconds of the process groups' timeouts. One step waits for it, and no rank waits so long for a slow one.
PATIENCE = {("cuda", "nccl"): 120.0, ("cuda", "gloo"): 60.0, ("cpu", "gloo"): 30.0}
ON_FEW = (2, 4)  # numbers of ranks that show something, where there are not as many GPUs
Taken = tuple[AcceptanceStep, int]  # a step, and how many ranks take it
RANKS = {"ranks", "two mesh dims", "two stages"}  # needs of steps that show something else with more ranks


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `accept` to its parser."""
    add = parser.add_argument
    add("part", nargs="?", choices=PARTS, help="run only this part (default: all parts, in this order)")
    add("--minutes", type=float, metavar="M", help="end within M minutes; skip the steps that do not fit")
    add("--dry", action="store_true", help="run on the CPU with gloo and tiny matrices; skip steps that need CUDA")
    add(
        "--ranks",
        type=numbers,
        metavar="N,...",
        help="number of processes on this machine, or several numbers to run in turn (default: one per GPU, then 2 "
        "and 4 if there are fewer GPUs; dry: 1)",
    )
    add(
        "--only",
        action="append",
        metavar="PATTERN",
        help="run only steps with matching names, such as 'audit/*'; may be repeated",
    )
    words = "folder for the page and the archive of all results (%(default)s); logs go to FOLDER-files"
    add("--output", type=Path, default=Path(FOLDER), metavar="FOLDER", help=words)
    add(
        "--list", action="store_true", help="list the steps, what each shows and needs, and which would be skipped here"
    )


def run(given: Namespace) -> int:
    """Take all steps, write down what each found, and return the exit code: 0 if none failed, 1 if one did.

    Everything that was written lies in the archive at the end, also after an interrupt.

    Raises:
        CanzonaError: there is no CUDA device and this is no dry run, or an argument is wrong.
    """
    began = time.monotonic()
    steps = chosen(all_steps(given.dry, given.part), given.only)
    device = "cpu" if given.dry or (given.list and not torch.cuda.is_available()) else "cuda"
    if given.list:
        list_steps(steps, device, ranks_here(given.ranks, device))
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        raise CanzonaError(
            "torch finds no CUDA device", hint="pass --dry to try the command on the CPU with tiny matrices"
        )
    if device == "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise CanzonaError("TRITON_INTERPRET is set, so kernels would be interpreted", hint="unset TRITON_INTERPRET")
    if "WORLD_SIZE" in os.environ:
        own = launched(device)
        worlds: tuple[int, ...] = (own.places[0].world,)
        if given.ranks is not None and given.ranks != worlds:
            raise CanzonaError(
                f"--ranks is {','.join(map(str, given.ranks))}, but torchrun started {worlds[0]} ranks",
                hint="omit --ranks, or run without torchrun",
            )
    else:
        worlds = ranks_here((1,) if given.part == SMOKE and given.ranks is None else given.ranks, device)
        own = alone(device, max(worlds))
    machine = AcceptedMachine(device, max(worlds), checkout())
    deadline = began + 60 * given.minutes if given.minutes else None
    with interrupted_by_signals():
        return accept(steps, machine, own, given.output, given.part or WHOLE, worlds, deadline)


def accept(
    steps: Sequence[AcceptanceStep],
    machine: AcceptedMachine,
    own: LocalRanks,
    output: Path,
    part: str = WHOLE,
    worlds: Sequence[int] = (),
    deadline: float | None = None,
) -> int:
    """Take steps one after the other.

    Args:
        steps: in order, the same ones for every supervisor.
        machine: the machine.
        own: the ranks of this supervisor.
        output: for the page and the archive; it is made.
        part: the name of what is run.
        worlds: the numbers of ranks that take the steps, one after the other; all ranks if there are none.
        deadline: of the clock `time.monotonic`: what would not end by then is skipped, or ended.

    Returns:
        0 if none failed, otherwise 1; on all supervisors alike.
    """
    worlds = tuple(worlds) or (machine.ranks,)
    folder = files_of(output) / part
    folder.mkdir(parents=True, exist_ok=True)
    machines = {n: replace(machine, ranks=n, backend=own.of(n)[0].backend) for n in worlds}
    backends = {n: own.backend for n, own in machines.items()}
    journal = AcceptanceJournal(output, part, facts(machine, backends)) if own.first else None
    supervisor = Supervisor(own, machines, journal, folder.absolute(), deadline)
    try:
        for number, (step, ranks) in enumerate(taken(steps, machines)):
            supervisor.take(number, step, ranks)
        if journal is not None:
            journal.finish()
    finally:
        supervisor.close()
        if journal is not None:
            log.info("%s: %s\neverything is in %s", journal.page, counted(journal.results), journal.pack())
    leave_together(own)
    return 1 if supervisor.failed else 0


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
    """The steps of a whole run, or of a part.

    Args:
        dry: whether they are meant for a CPU.
        part: a name of `PARTS`; None for all of them.
    """
    return [step for name in ([part] if part else PARTS) if name != SMOKE or part for step in PARTS[name](dry)]


def taken(steps: Sequence[AcceptanceStep], machines: Mapping[int, AcceptedMachine]) -> list[Taken]:
    """Which numbers of ranks take which step, in order.

    Steps that need no ranks, and programs, are taken once. The others are taken by each number of ranks with which they
    show something: first the steps that fewer ranks could not take. A step that nothing here can take comes once, to
    say why. What needs processes of its own comes after the others of the same number of ranks, and once: first what
    ends them, then what needs other variables.

    Args:
        steps: in order.
        machines: by numbers of ranks, in order.
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


def list_steps(steps: Sequence[AcceptanceStep], device: str, worlds: Sequence[int]) -> None:
    """Print what each step shows and needs, and with how many ranks it would be taken here, or why not."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    machines = {n: AcceptedMachine(device, n, checkout(), backend_for(device, n)) for n in worlds}
    here: dict[str, list[int]] = {}
    for step, ranks in taken(steps, machines):
        here.setdefault(step.name, []).append(ranks)
    print(f"Here: {count or 'no'} GPUs, ranks {', '.join(f'{n} over {m.backend}' for n, m in machines.items())}\n")
    for step in steps:
        why = machines[here[step.name][-1]].missing(step)
        who = "one program" if isinstance(step.work, OneProgram) else f"ranks {', '.join(map(str, here[step.name]))}"
        print(f"{step.name}: {step.shows}\n    needs {needed(step)}; here: {f'skipped, {why}' if why else who}")


def chosen(steps: Sequence[AcceptanceStep], patterns: Sequence[str] | None) -> list[AcceptanceStep]:
    """The steps that were asked for.

    Raises:
        CanzonaError: there is none.
    """
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
    """The numbers of ranks that take the steps on this machine, without a launcher."""
    if asked is not None:
        return asked
    if device == "cpu":
        return (1,)
    gpus = torch.cuda.device_count()
    return (gpus, *(n for n in ON_FEW if n > gpus))


def alone(device: str, ranks: int) -> LocalRanks:
    """All ranks under one supervisor, on this machine."""
    return LocalRanks(*places_here(ranks, device, PATIENCE[device, backend_for(device, ranks)]))


def launched(device: str) -> LocalRanks:
    """One rank under this supervisor, of those that torchrun or a launcher like it started."""
    store, rank, world = next(iter(rendezvous("env://")))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    near = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = PATIENCE[device, backend_for(device, near)]
    place = RankPlace(rank, world, local, near, device, host, port, "", patience)
    return LocalRanks((place,), PrefixStore("canzona acceptance", store))


def leave_together(own: LocalRanks) -> None:
    """Wait until every supervisor is done: a launcher ends the others with the first that fails.

    The first one is the last to leave, because it may hold the store.
    """
    first, patience = own.places[0], timedelta(seconds=MARGIN)
    others = range(0, first.world, len(own.places))
    own.store.set(f"done {first.rank}", "")
    own.store.wait([f"done {rank}" for rank in others], patience)
    own.store.set(f"left {first.rank}", "")
    if own.first:
        own.store.wait([f"left {rank}" for rank in others], patience)


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
