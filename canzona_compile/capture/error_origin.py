"""Which line of the optimizer's own code an exception comes from."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

# Frames of these are how we got there, not why.
MACHINERY = (Path(torch.__file__).parent, Path(__file__).parents[1])
OPTIMIZERS = MACHINERY[0] / "optim"


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def blamed(error: BaseException) -> str:
    """The last line of the optimizer that led to `error`, as "; file.py, line 12: code"; or nothing."""
    frames = [frame for frame in frames_behind(error) if is_optimizer(Path(frame.filename))]
    if not frames:
        return ""
    last = frames[-1]
    return f"; {Path(last.filename).name}, line {last.lineno}: {(last.line or '').strip()}"


def frames_behind(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Frames of the exception; where Dynamo met it while tracing, those of the traced code."""
    yield from traceback.extract_tb(error.__traceback__)
    yield from getattr(error, "real_stack", None) or ()


def is_optimizer(path: Path) -> bool:
    if path.name.startswith("<"):
        return False
    return OPTIMIZERS in path.parents or not any(folder in path.parents for folder in MACHINERY)
