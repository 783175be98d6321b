"""What the survey finds out, as plain data; `asdict` of it is the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SCHEMA = 2

REFUSED, PLAIN_FAILS, WRONG, ERROR = "refused", "plain fails", "WRONG", "error"
FAILURES = (REFUSED, PLAIN_FAILS, WRONG, ERROR)


def severity(outcome: str) -> int:
    """How bad an outcome is; 0 for the ways in which matrices are updated, which `explain` names."""
    return FAILURES.index(outcome) + 1 if outcome in FAILURES else 0


@dataclass(frozen=True, slots=True)
class Nature:
    """What an optimizer is, found by running it plainly, without canzona_compile.

    Attributes:
        matrix: rows, or columns, updated alone end up otherwise than in their matrix. None for random ones:
            parts draw other numbers.
        coupled: a matrix alone ends up otherwise than beside others. None for random ones.
        random: `step` draws random numbers.
    """

    matrix: bool | None
    coupled: bool | None
    random: bool

    @property
    def text(self) -> str:
        known = "elementwise" if self.matrix is False else "matrix" if self.matrix else ""
        words = [known, "coupled" if self.coupled else "", "random" if self.random else ""]
        return " ".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class Difference:
    """How far parameters, or leaves of the state, are from those of the plain optimizer, at the worst.

    Attributes:
        where: the first leaf that differs, with the step for parameters. State is compared at the end only.
        ulps, relative: None: no number tells it; `where` says why.
    """

    equal: bool
    ulps: int | None = 0
    relative: float | None = 0.0
    where: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank saw of one optimizer.

    Attributes:
        package, layout: where it is from, and how its matrices lie: "fsdp", "ddp" or "tp".
        outcome: the same as `mode` if all bits are equal, else one of `FAILURES`.
        mode: how its matrices were updated, also where the result is wrong.
        captures: graphs that Dynamo was asked for.
        variants: of the code of all kinds of matrix.
        seconds: of the wrapped optimizer's first step.
    """

    name: str
    outcome: str
    reason: str = ""
    nature: Nature | None = None
    mode: str = ""
    params: Difference | None = None
    state: Difference | None = None
    captures: int = 0
    variants: int = 0
    seconds: float = 0.0
    package: str = ""
    layout: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.outcome}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Survey:
    """A whole run."""

    schema: int
    torch: str
    packages: Mapping[str, str]
    ranks: int
    steps: int
    findings: Sequence[Finding] = ()
