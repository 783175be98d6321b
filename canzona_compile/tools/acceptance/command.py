"""`python -m canzona_compile accept`, or by torchrun `-m canzona_compile.tools.accept`."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch.distributed.rendezvous import rendezvous

from canzona_compile.compat.torch_private import PrefixStore
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.acceptance.journal import AcceptanceJournal, counted
from canzona_compile.tools.acceptance.machine import AcceptedMachine, checkout, facts
from canzona_compile.tools.acceptance.step import AcceptanceStep
from canzona_compile.tools.acceptance.steps_audit import audit, last_audit
from canzona_compile.tools.acceptance.steps_layouts import data_parallel, first_layouts, other_layouts
from canzona_compile.tools.acceptance.steps_machine import checked_memory, gpu_tests, machine_works, measured
from canzona_compile.tools.acceptance.supervisor import MARGIN, LocalRanks, Supervisor
from canzona_compile.tools.processes import RankPlace, places_here

log = logging.getLogger(__name__)

FOLDER = "canzona-acceptance"
# Seconds of the process groups' timeouts. One step waits for it, and no rank waits so long for a slow one.
PATIENCE = {"cuda": 120.0, "cpu": 30.0}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `accept` to its parser."""
    add = parser.add_argument
    add("--dry", action="store_true", help="on the CPU with gloo and tiny matrices; what needs CUDA is skipped")
    add("--ranks", type=int, metavar="N", help="processes to start here (default: one per GPU; dry: 1)")
    add("--only", action="append", metavar="PATTERN", help="steps by name, as in 'audit/*'; may be repeated")
    add("--output", type=Path, default=Path(FOLDER), metavar="FOLDER", help="for all results (%(default)s)")
    add("--list", action="store_true", help="name the steps and what each shows, and take none")


def run(given: Namespace) -> int:
    """Take all steps, write down what each found, and return the exit code: 0 if none failed, 1 if one did.

    Raises:
        CanzonaError: there is no CUDA device and this is no dry run, or an argument is wrong.
    """
    steps = chosen(all_steps(str(given.output.absolute())), given.only)
    if given.list:
        for step in steps:
            print(f"{step.name}: {step.shows}")
        return 0
    device = "cpu" if given.dry else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise CanzonaError("there is no CUDA device, and torch sees none", hint="--dry runs it on the CPU, tiny")
    if device == "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise CanzonaError("TRITON_INTERPRET is set: kernels would be interpreted", hint="unset TRITON_INTERPRET")
    own = launched(device) if "WORLD_SIZE" in os.environ else alone(device, ranks_here(given.ranks, device))
    world = own.places[0].world
    if given.ranks is not None and given.ranks != world:
        raise CanzonaError(f"--ranks is {given.ranks}, and torchrun started {world}", hint="leave one of them out")
    return accept(steps, AcceptedMachine(device, world, checkout()), own, given.output)


def accept(steps: Sequence[AcceptanceStep], machine: AcceptedMachine, own: LocalRanks, folder: Path) -> int:
    """Take steps one after the other.

    Args:
        steps: in order, the same ones for every supervisor.
        machine: the machine.
        own: the ranks of this supervisor.
        folder: for all results; it is made.

    Returns:
        0 if none failed, otherwise 1; on all supervisors alike.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = AcceptanceJournal(folder, facts(machine)) if own.first else None
    supervisor = Supervisor(own, machine, journal, folder.absolute())
    try:
        for number, step in enumerate(steps):
            supervisor.take(number, step)
    finally:
        supervisor.close()
    if journal is not None:
        journal.finish()
        log.info("%s: %s", journal.page, counted(journal.results))
    leave_together(own)
    return 1 if supervisor.failed else 0


def all_steps(folder: str) -> list[AcceptanceStep]:
    """The steps of a whole run.

    Without the machine nothing works, and without `layouts` no number means anything. Then come cases that were found
    by reading to hang or to corrupt, then other layouts, then what takes long.

    Args:
        folder: for results of steps.
    """
    return [
        *machine_works(),
        *first_layouts(),
        *audit(),
        *other_layouts(),
        *data_parallel(),
        *gpu_tests(),
        *measured(folder),
        *checked_memory(),
        *last_audit(),
    ]


def chosen(steps: Sequence[AcceptanceStep], patterns: Sequence[str] | None) -> list[AcceptanceStep]:
    """The steps that were asked for.

    Raises:
        CanzonaError: there is none.
    """
    found = [step for step in steps if not patterns or any(fnmatchcase(step.name, pattern) for pattern in patterns)]
    if not found:
        raise CanzonaError(f"no step is called {' or '.join(patterns or ())}", hint="--list names them")
    return found


def ranks_here(asked: int | None, device: str) -> int:
    """How many ranks to start on this machine without a launcher.

    Raises:
        CanzonaError: there are not so many GPUs.
    """
    most = torch.cuda.device_count() if device == "cuda" else asked or 1
    ranks = most if asked is None else asked
    if not 1 <= ranks <= most:
        raise CanzonaError(f"--ranks is {ranks}, and there are {most} GPUs", hint="every rank needs a GPU of its own")
    return ranks


def alone(device: str, ranks: int) -> LocalRanks:
    """All ranks under one supervisor, on this machine."""
    return LocalRanks(*places_here(ranks, device, PATIENCE[device]))


def launched(device: str) -> LocalRanks:
    """One rank under this supervisor, of those that torchrun or a launcher like it started."""
    store, rank, world = next(iter(rendezvous("env://")))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    near = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    place = RankPlace(rank, world, local, near, device, host, port, "", PATIENCE[device])
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
