"""The errors of canzona_compile. Each has three parts: the problem, where it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class CanzonaError(RuntimeError):
    """Base of every error that canzona_compile raises on purpose.

    Args:
        problem: what is wrong, in one sentence.
        at: where it is wrong: a parameter name, a graph node or a task.
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
    """A step breaks the invariants of its form. This is a bug in a pass and never an error of the user."""


class PipelineError(CanzonaError):
    """The passes are in an order in which one of them cannot run."""


def some(names: Iterable[str], limit: int = 3) -> str:
    """Join the first few names and say how many more there are: "a, b, c and 4 more"."""
    listed = list(names)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"


def problem_of(check: Callable[[], None]) -> CanzonaError | None:
    """The error that a check raises; None if it raises none."""
    try:
        check()
    except CanzonaError as error:
        return error
    return None
