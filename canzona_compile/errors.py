"""The errors and warnings of canzona_compile.

Each has four parts: the problem, where it is, what to do about it, and where the documentation says more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

PAGE = "docs/troubleshooting.md"  # has a section per class, headed by its name


class CanzonaError(RuntimeError):
    """Base of every error that canzona_compile raises on purpose.

    Args:
        problem: what is wrong, in one sentence. It may quote another error, whose last line is left out.
        at: where it is wrong: a parameter name, a graph node or a task.
        hint: what the reader can do about it.
    """

    def __init__(self, problem: str, *, at: str | None = None, hint: str | None = None) -> None:
        self.problem, self.at, self.hint = without_pages(problem), at, hint and without_pages(hint)
        super().__init__(self.problem)  # and nothing else: pickling calls the class with it

    def __str__(self) -> str:
        lines = [self.problem]
        if self.at:
            lines.append(f"  at:   {self.at}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join([*lines, page_of(type(self))])


class UnsupportedOptimizer(CanzonaError):
    """The optimizer, an option or a parameter cannot be distributed with the results of the plain optimizer."""


class UnsupportedLayout(CanzonaError):
    """A parameter is sharded in a way that cannot be described as disjoint boxes of the tensor."""


class InvalidGradient(CanzonaError):
    """A gradient is missing, sparse, complex or of the wrong shape; nothing was updated."""


class RankMismatch(CanzonaError):
    """Ranks that must make the same call made different ones, or with different values; nothing was updated."""


class InvalidStep(CanzonaError):
    """A step breaks the rules of its form. This is a bug in a pass, never an error of the user."""


class PipelineError(CanzonaError):
    """The order of the passes does not allow one of them to run."""


# -- warnings --------------------------------------------------------------------------------------


class CanzonaWarning(UserWarning):
    """Base of every warning of canzona_compile, each given once."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)

    def __str__(self) -> str:
        return f"{super().__str__()}\n{page_of(type(self))}"


class EveryRankComputes(CanzonaWarning):
    """Every rank computes all updates, although ranks could share them, or each rank trains its own model."""


class DrawsRandomNumbers(CanzonaWarning):
    """The optimizer draws other random numbers than the plain optimizer would draw on one device."""


class MayHang(CanzonaWarning):
    """Two NCCL communicators are in use at once, and devices may run their collectives in different orders."""


class StateNotPinned(CanzonaWarning):
    """State in host memory is in pageable memory, so that copies from and to it are slower."""


class RoundsOtherwise(CanzonaWarning):
    """Results have the bits of the optimizer with another option, such as foreach=False, or of uncompiled methods."""


# -- words -----------------------------------------------------------------------------------------


def page_of(kind: type) -> str:
    """The last line of a message: the section of the documentation about this class of errors or warnings."""
    return f"  see:  {PAGE}#{kind.__name__.lower()}"


def without_pages(text: str) -> str:
    """A text without the last lines of the messages that it quotes."""
    return re.sub(rf"\n  see:  {re.escape(PAGE)}#\w+", "", text)


def some(names: Iterable[str], limit: int = 3) -> str:
    """Join the first few names and say how many more there are: "a, b, c and 4 more"."""
    listed = list(names)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"


def problem_of(check: Callable[[], None]) -> CanzonaError | None:
    """The error that a check raises, whatever it is, because other ranks must hear of it; None if it raises none."""
    try:
        check()
    except CanzonaError as error:
        return error
    except Exception as error:
        failure = CanzonaError(f"planning failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return None
