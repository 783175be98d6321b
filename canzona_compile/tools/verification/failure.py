"""What keeps `verify` from comparing, in words that tell the user where to look."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

import canzona_compile.errors as errors

# Frames of imports and of this folder say nothing. Frames of torch and of this package are named only where there are
# no others, because the user cannot mend anything there.
SILENT = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<")
NOT_THE_USERS = (str(Path(errors.__file__).parent), str(Path(torch.__file__).parent))


class CannotVerify(errors.CanzonaError):
    """`build` gave nothing that can be checked, or its functions raised."""


@contextlib.contextmanager
def blamed(what: str, hint: str | None = None) -> Iterator[None]:
    """Turn an exception inside into an error that says what raised it; errors of this package pass as they are.

    Args:
        what: what runs inside, as in "build()".
        hint: what the user can do about it.

    Raises:
        CannotVerify: something inside raised. It names the user's own innermost line and has the traceback as a note.
    """
    try:
        yield
    except errors.CanzonaError:
        raise
    except (Exception, SystemExit) as error:  # a module may parse a command line when it is imported
        said = f": {error}" if str(error) else ""
        failure = CannotVerify(f"{what} raised {type(error).__name__}{said}", at=place_of(error), hint=hint)
        failure.add_note("".join(traceback.format_exception(error)).rstrip())
        raise failure from error


def place_of(error: BaseException) -> str | None:
    """`file:line in function`, outside of torch and this package if there is such a frame."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(SILENT)]
    own = [f for f in frames if not f.filename.startswith(NOT_THE_USERS)]
    if not frames:
        return None
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"
