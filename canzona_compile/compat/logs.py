"""`CANZONA_LOGS`: which parts of canzona_compile log how much to standard error, as TORCH_LOGS does for torch."""

from __future__ import annotations

import logging
import os

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
