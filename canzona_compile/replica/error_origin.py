"""Find the line of the optimizer's own code that an exception comes from."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from canzona_compile.errors import CanzonaError

# Frames in these folders belong to torch and to this package, and are not the cause of an error.
MACHINERY = (Path(torch.__file__).parent, Path(__file__).parents[1])
OPTIMIZERS = MACHINERY[0] / "optim"


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def failed_on(rank: int, error: BaseException) -> CanzonaError:
    """Make the error that other ranks raise where the step of a rank failed: the first line of its error, and what to
    do about that if it says so."""
    return CanzonaError(f"the step failed on rank {rank}: {first_line(error)}", hint=getattr(error, "hint", None))


def note_rank(rank: int, error: Exception) -> None:
    """Say on which rank a step failed, below an error that is the optimizer's or torch's and does not say it."""
    if not isinstance(error, CanzonaError):
        error.add_note(f"canzona_compile: this was raised by the step of rank {rank}")


def blamed(error: BaseException) -> str:
    """Return the last line of the optimizer's code that led to `error`, as "; file.py, line 12: code", or ""."""
    frames = [frame for frame in frames_behind(error) if is_optimizer(Path(frame.filename))]
    if not frames:
        return ""
    last = frames[-1]
    return f"; {Path(last.filename).name}, line {last.lineno}: {(last.line or '').strip()}"


def frames_behind(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of an exception, then the frames of traced code if Dynamo raised it in a trace."""
    yield from traceback.extract_tb(error.__traceback__)
    yield from getattr(error, "real_stack", None) or ()


def is_optimizer(path: Path) -> bool:
    """Tell whether a source file may hold the code of an optimizer."""
    if path.name.startswith("<"):
        return False
    return OPTIMIZERS in path.parents or not any(folder in path.parents for folder in MACHINERY)
