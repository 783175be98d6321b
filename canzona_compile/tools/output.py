"""How commands end: their results on standard output, or in files that are checked before long work; errors."""

from __future__ import annotations

import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from canzona_compile.errors import CanzonaError

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(content: RenderableType, json: Callable[[], str] | None = None) -> None:
    """Print something for people, or as JSON for machines.

    Args:
        json: makes the text for machines; None where people read.
    """
    if json is not None:
        print(json())
    else:
        from rich.console import Console  # late: many commands print no page

        Console(width=None if sys.stdout.isatty() else 120).print(content)


def check_output(path: str | Path | None, at: str) -> None:
    """Make sure that there can be such a file, because making what goes into it takes a while.

    Args:
        path: of the file; None if there will be none.
    """
    if path is not None and Path(path).is_dir():
        raise unwritable(path, at, "it is a folder")
    if path is not None and not Path(path).parent.is_dir():
        raise unwritable(path, at, "there is no such folder")


def write(text: str, path: str | Path | None, at: str) -> None:
    """Write a text to a file, or to standard output if there is no path."""
    if path is None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as in a file; a page declares this encoding
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, at, error.strerror or str(error)) from error


def unwritable(path: str | Path, at: str, why: str) -> CanzonaError:
    hint = "pass a file in an existing folder that you can write to"
    return CanzonaError(f"it cannot be written: {why}", at=f"{at} {path}", hint=hint)


def exit_code(run: Callable[[Namespace], int], given: Namespace) -> int:
    """Run a command: its exit code, or 2 if it could not be done. What is wrong then goes to standard error."""
    try:
        return run(given)
    except CanzonaError as error:
        print("\n".join([*getattr(error, "__notes__", ()), "", f"error: {error}"]), file=sys.stderr)
    except Exception:  # Python's own exit code would be 1, which means something else here
        traceback.print_exc()
    return 2
