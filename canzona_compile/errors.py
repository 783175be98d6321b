"""What can go wrong, said in three parts: the problem, where it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable


class CanzonaError(RuntimeError):
    """Base of every error that canzona_compile raises on purpose.

    Args:
        problem: what is wrong, one sentence.
        at: where: a parameter name, a graph node, a task.
        hint: what the reader can do about it.
    """

    def __init__(self, problem: str, *, at: str | None = None, hint: str | None = None) -> None:
        self.problem, self.at, self.hint = problem, at, hint
        lines = [problem]
        if at:
            lines.append(f"  at:   {at}")
        if hint:
            lines.append(f"  hint: {hint}")
        super().__init__("\n".join(lines))


class UnsupportedOptimizer(CanzonaError):
    """The optimizer, one of its options or one of its parameters cannot be distributed faithfully."""


class UnsupportedLayout(CanzonaError):
    """A parameter is sharded in a way that this package cannot describe as boxes of a matrix."""


class InvalidGradient(CanzonaError):
    """A gradient is missing, sparse, complex or of the wrong shape; nothing was updated."""


class RankMismatch(CanzonaError):
    """Ranks that must run the same plan disagree; nothing was updated."""


class InvalidStep(CanzonaError):
    """A step does not keep the promises of its form: a bug in a pass, never of the user."""


class PipelineError(CanzonaError):
    """Passes were put in an order in which one of them cannot run."""


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first few names and how many more there are: "a, b, c and 4 more"."""
    listed = list(names)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
