"""Take a schedule back, so that the same tasks can be lowered in another way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.ir.step import Form, Step


@dataclass(frozen=True, slots=True)
class Reopen:
    """Drop micro-groups, schedule and buffers; owners stay, and so do graphs as they were rewritten.

    Forecasts compare schedules of one step with this. No run needs it.
    """

    name: ClassVar[str] = "reopen"
    requires: ClassVar[Form] = Form.SCHEDULED
    ensures: ClassVar[Form] = Form.OWNED

    def __call__(self, step: Step) -> Step:
        return replace(step, form=Form.OWNED, micro_groups=(), schedule=(), buffers=())
