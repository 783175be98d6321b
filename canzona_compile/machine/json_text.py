"""Read JSON that others wrote: its texts reach terminals, so that they may hold nothing that a terminal obeys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canzona_compile.errors import CanzonaError

KEPT = "\n\t"


def parsed(text: str) -> Any:
    """Parse the text of a JSON file. Characters that are not printed are spelled in its texts and names."""
    try:
        return printable(json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, hint: str) -> Any:
    """Read a JSON file."""
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = "pass a file that exists and can be read"
        raise CanzonaError(f"it cannot be read: {error.strerror or error}", at=str(path), hint=known) from error
    except ValueError as error:
        raise CanzonaError(f"the file is not JSON: {error}", at=str(path), hint=hint) from error


def printable(value: Any) -> Any:
    """Spell the characters that are not printed, such as those of escape codes, in all texts of a JSON value."""
    match value:
        case str():
            return value if value.isprintable() else "".join(map(spelled, value))
        case dict():
            return {printable(name): printable(own) for name, own in value.items()}
        case list():
            return [printable(own) for own in value]
    return value


def spelled(character: str) -> str:
    """Return a character, or its code if it is not printed."""
    return character if character.isprintable() or character in KEPT else ascii(character)[1:-1]
