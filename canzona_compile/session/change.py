"""The changes that a rank finds before a step, and that the other ranks must have found as well."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)


class ChangeKind(enum.Enum):
    """What a change requires before the step can run."""

    REPLAN = enum.auto()  # it requires a new plan
    PRESENCE = enum.auto()  # it requires a program for other tasks
    VARIANTS = enum.auto()  # it requires a program for other variants


@dataclass(frozen=True, slots=True)
class StepChange:
    """A change that ranks compare before they go on.

    Attributes:
        kind: what the change requires.
        text: what changed. Ranks compare it, and errors show it. Ranks that saw the same change have the same text.
    """

    kind: ChangeKind
    text: str

    @classmethod
    def replan(cls, reason: str) -> StepChange:
        """Make the change that requires a new plan, for this reason."""
        log.info("a new plan: %s", reason)
        return cls(ChangeKind.REPLAN, f"re-plan: {reason}")
