"""What a rank finds changed before a step, so that the other ranks must have seen it as well."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ChangeKind(enum.Enum):
    """What a change asks for."""

    REPLAN = enum.auto()  # a new plan
    PRESENCE = enum.auto()  # a program for other tasks
    VARIANTS = enum.auto()  # a program for other variants


@dataclass(frozen=True, slots=True)
class StepChange:
    """A change that ranks compare before they go on.

    Attributes:
        kind: what the change asks for.
        text: what changed, for comparison and for people. Ranks that saw the same change have the same text.
    """

    kind: ChangeKind
    text: str

    @classmethod
    def replan(cls, reason: str) -> StepChange:
        """The plan does not fit any more, for this reason."""
        return cls(ChangeKind.REPLAN, f"re-plan: {reason}")
