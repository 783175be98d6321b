"""What long work is doing: a line on a terminal that goes away again, one line elsewhere, and lines of the log.

Work says what it does by `tell`, wherever it is in the code. Who waits for it opens `shown` around it, as the first
step and the commands do, or `heard_by`, as processes do that pass the words on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from canzona_compile.compat.interrupts import uninterrupted
from canzona_compile.errors import CanzonaError

VARIABLE = "CANZONA_LOGS"
ROOT = "canzona_compile"
# A name in the variable, and the loggers that it stands for; "all" is the root of all of them.
PARTS = {
    "all": (ROOT,),
    "capture": (f"{ROOT}.capture",),
    "passes": (f"{ROOT}.ir.pipeline",),
    "kernels": (f"{ROOT}.kernels",),
    "progress": (f"{ROOT}.progress",),
    "runtime": (f"{ROOT}.runtime",),
    "session": (f"{ROOT}.session", f"{ROOT}.api", f"{ROOT}.data_parallel"),
    "tools": (f"{ROOT}.tools",),
}
LEVELS = {"+": logging.DEBUG, "": logging.INFO, "-": logging.ERROR}


def levels(text: str) -> dict[str, int]:
    """Read the variable: names with commas between; `name` is INFO, `+name` is DEBUG, `-name` is errors only."""
    found: dict[str, int] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        sign = word[0] if word[0] in "+-" else ""
        name = word.removeprefix(sign)
        if name not in PARTS:
            raise CanzonaError(
                f"there is no logger {name!r}",
                at=f"{VARIABLE}={text}",
                hint=f"use one of {', '.join(PARTS)}; +name logs more, -name logs only errors",
            )
        found |= dict.fromkeys(PARTS[name], LEVELS[sign])
    return found


def set_up() -> bool:
    """Do what the variable says."""
    wanted = levels(os.environ.get(VARIABLE, ""))
    if not wanted:
        return False
    for name, level in wanted.items():
        logging.getLogger(name).setLevel(level)
    root = logging.getLogger(ROOT)
    if not any(isinstance(handler, RankedHandler) for handler in root.handlers):
        root.addHandler(RankedHandler())
        root.propagate = False
    return True


class RankedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error, with the rank before each line where a launcher has given one."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(rank)s%(name)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK")
        record.rank = "" if rank is None else f"[rank{rank}] "
        return super().format(record)


if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(f"{ROOT}.progress")  # the name that users know it by, wherever this file is
ours = logging.getLogger(ROOT)

SOON = 1.0  # seconds after which people at a terminal want to know what takes so long
LONG = 5.0  # seconds after which others want to know, too


@uninterrupted
def console_on_stderr() -> Console:
    """Make a console. Rich draws from Python's random as it is imported; for users nothing was drawn."""
    before = random.getstate()
    from rich.console import Console

    random.setstate(before)
    return Console(stderr=True)


class Hear(Protocol):
    """What hears of the progress of some work."""

    def __call__(self, words: str, done: int = 0, total: int = 0) -> None:
        """Hear what is being done."""


def ignore(words: str, done: int = 0, total: int = 0) -> None:
    """Hear nothing."""


_hears: ContextVar[Hear] = ContextVar("hears", default=ignore)


def tell(words: str, done: int = 0, total: int = 0) -> None:
    """Say what this work is doing, to who waits for it and to the log; see `Hear` for the arguments."""
    log.debug("%s", words)
    _hears.get()(words, done, total)


@contextlib.contextmanager
def heard_by(hear: Hear) -> Iterator[Hear]:
    """Inside this context, `hear` gets what is told."""
    token = _hears.set(hear)
    try:
        yield hear
    finally:
        _hears.reset(token)


@contextlib.contextmanager
def shown(title: str, *, patience: float = 0.0, quiet: bool = False, console: Console | None = None) -> Iterator[Hear]:
    """Inside this context, show on a terminal what is told; within another such context, do nothing.

    Elsewhere commands show nothing, and work with `patience` says once what it is doing, see `SaidOnce`. Standard
    output is not touched. INFO lines of the log would break the line. A command, which asked for them itself, leaves
    them out inside; where others asked for them, and `patience` is not 0, they are there and the line is not.

    Args:
        patience: seconds until the line appears; 0 for commands.
    """
    if quiet or _hears.get() is not ignore:
        yield _hears.get()
        return
    if console is None and find_spec("rich") is not None:  # nothing but a line for people needs rich
        console = console_on_stderr()
    logged = ours.isEnabledFor(logging.INFO)
    at_terminal = console is not None and console.is_terminal and not console.is_dumb_terminal
    if console is None or not at_terminal or os.environ.get(VARIABLE) or (patience and logged):
        with heard_by(SaidOnce(title) if patience else ignore) as hear:
            yield hear
        return
    line = ProgressLine(title, console)
    timer = threading.Timer(patience, line.begin)
    timer.daemon = True
    timer.start()
    before = ours.level
    if logged:
        ours.setLevel(logging.WARNING)
    try:
        with heard_by(line.hear):
            yield line.hear
    finally:
        ours.setLevel(before)
        timer.cancel()
        line.end()


class SaidOnce:
    """Logs once what some work is doing, at the first words that are told after `LONG` seconds.

    It is a warning, because Python shows these where nobody has set up logs. The title begins the line.
    """

    def __init__(self, title: str) -> None:
        self._title, self._begin, self._part, self._said = title, time.monotonic(), "", False

    def __call__(self, words: str, done: int = 0, total: int = 0) -> None:
        if total:
            self._part = f" (part {done} of {total})"
        seconds = time.monotonic() - self._begin
        if seconds >= LONG and not self._said:
            self._said = True
            log.warning(
                "%s, after %.0f s: %s%s. %s=+progress says more", self._title, seconds, words, self._part, VARIABLE
            )


class ProgressLine:
    """One line with a spinner, words, a bar where the number of parts is known, and the seconds so far."""

    def __init__(self, title: str, console: Console) -> None:
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn())
        self._bar = Progress(
            *(*columns, TimeElapsedColumn()),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._title, self._escape = title, escape
        self._task = self._bar.add_task(escape(title), total=None)
        self._lock = threading.Lock()  # the line begins in the thread of a timer
        self._ended = False

    def hear(self, words: str, done: int = 0, total: int = 0) -> None:
        """Show these words from now on; see `Hear`."""
        self._bar.update(self._task, description=self._escape(f"{self._title}: {words}"))
        if total:  # words without a count belong to the part that was begun before
            self._bar.update(self._task, completed=done, total=total)

    def begin(self) -> None:
        """Show the line, unless the work has ended."""
        with self._lock:
            if not self._ended:
                self._bar.start()

    def end(self) -> None:
        """Take the line away, or let it never appear."""
        with self._lock:
            self._ended = True
            self._bar.stop()
