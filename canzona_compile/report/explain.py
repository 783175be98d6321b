"""`explain`: how each parameter of an optimizer is updated, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from canzona_compile.errors import some
from canzona_compile.report.page import PageModel, PageTable, Words
from canzona_compile.report.printable import Printable
from canzona_compile.report.units import format_shape
from canzona_compile.session.explained import ExplainedParameter, explained, on_rank
from canzona_compile.session.session import Session

STYLES = {
    "compiled": "green",
    "eager": "yellow",
    "local": "cyan",
    "refused": "red",
}


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Printable):
    """How each parameter of an optimizer is updated; print it: parameters of one shape and treatment share a row.

    Attributes:
        optimizer: the name of its class.
        parameters: one entry per parameter, in the optimizer's order.
    """

    text_width = 120

    optimizer: str
    parameters: tuple[ExplainedParameter, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and plain values."""
        return asdict(self)

    def page(self) -> PageModel:
        alike: dict[Any, list[ExplainedParameter]] = {}
        for row in self.parameters:
            alike.setdefault(row.treatment, []).append(row)
        rows = []
        for (shape, how, why), own in alike.items():
            ranks = sorted({row.rank for row in own if row.rank is not None})
            said = on_rank(*ranks) + why if ranks else why
            rows.append((some([row.name for row in own]), format_shape(shape), Words(how, STYLES[how]), said))
        title = f"canzona explains {self.optimizer}"
        return PageModel((PageTable(("parameter", "shape", "how", "why"), tuple(rows), title, framed=True),))

    __repr__ = Printable.__str__


def explain_all(sessions: Sequence[Session]) -> Explanation:
    """Explain how each parameter of one optimizer or of several is updated, see `explained`."""
    names = "+".join(session.optimizer_name for session in sessions)
    return Explanation(names, tuple(row for session in sessions for row in explained(session)))
