"""The passes of a step, for people to read."""

from __future__ import annotations

from dataclasses import dataclass

from canzona_compile.errors import some
from canzona_compile.ir.pipeline import PassHistory, PassRecord
from canzona_compile.report.page import PageModel, PageTable
from canzona_compile.report.printable import Printable


@dataclass(frozen=True, slots=True)
class PassTable(PassHistory, Printable):
    """What each pass did, in order; print it."""

    text_width = 120

    def page(self) -> PageModel:
        rows = tuple(
            (
                *(record.name, record.after.form.name.lower(), f"{record.seconds * 1e3:.1f}"),
                *(f"{record.nodes:+d}" if record.nodes else "", operators(record)),
            )
            for record in self.records
        )
        return PageModel((PageTable(("pass", "form", "ms:>", "nodes:>", "operators"), rows, "passes", framed=True),))


def operators(record: PassRecord) -> str:
    """Say which operators a pass added and removed, by short names: mm for aten.mm.default."""
    changed = sorted(record.ops.items(), key=lambda op: (-abs(op[1]), op[0]))
    return some(f"{count:+d} {name.removeprefix('aten.').removesuffix('.default')}" for name, count in changed)
