"""What `verify` finds: plain data, leaf by leaf."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from canzona_compile.errors import some
from canzona_compile.report.page import Block, PageModel, PageTable, Paragraph, Words, note
from canzona_compile.report.printable import Printable
from canzona_compile.report.sections import names_by_reason
from canzona_compile.report.units import format_dtype, plural
from canzona_compile.tools.verification.compare import (
    EQUAL,
    Distance,
    distance,
    dtype_name,
    relative_norm,
    unlike,
)
from canzona_compile.tools.verification.layouts import fragments
from canzona_compile.tools.verification.user_model import PARAMETER, Leaves
from canzona_compile.tools.verification.verdict import AsIs, VerdictName, verdict_parts

SCHEMA = 1
ABSENT = object()
MOST_ROWS = 40  # all leaves that differ are shown, and equal ones up to so many rows
HEADERS = ("parameter:~", "leaf:~", "shape", "dtype", "ulps:>", "relative:>", "from step:>", "ranks")


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """A parameter, or a leaf of its state, over all steps and ranks.

    Attributes:
        parameter: its name in the model; empty for state that belongs to no parameter.
        leaf: "parameter", or where it is in the state, as in "momentum_buffer" or "factors.0".
        dtype: as in "float32"; for what is no tensor its type, as in "int".
        equal: whether it had the same bits after every step on every rank.
        max_ulps, max_relative: the largest distances, see `compare.Distance`; None if no number tells it.
        first_step: the step after which it differed first, counted from 1; None if it never did.
    """

    parameter: str
    leaf: str
    shape: tuple[int, ...]
    dtype: str
    equal: bool = True
    max_ulps: int | None = 0
    max_relative: float | None = 0.0
    first_step: int | None = None
    ranks: tuple[int, ...] = ()
    remark: str = ""

    def seen(self, found: Distance, step: int | None, ranks: Iterable[int]) -> LeafDifference:
        """This leaf with one more observation."""
        if found.equal:
            return self
        worst = Distance(self.equal, self.max_ulps, self.max_relative, self.remark).worst(found)
        steps = [s for s in (self.first_step, step) if s is not None]
        return replace(
            self,
            equal=False,
            max_ulps=worst.ulps,
            max_relative=worst.relative,
            remark=worst.remark,
            first_step=min(steps),
            ranks=tuple(sorted({*self.ranks, *ranks})),
        )


@dataclass(frozen=True, slots=True)
class Verification(Printable):
    """The result of `verify`: everything about one run. Read `.ok`, print it, or save its `to_json()`.

    Attributes:
        compiled: parameters whose update ran as captured graphs, from the second step on.
        eager: parameters that a rank stepped by the optimizer's own code, and why. The state of those with an object
            of their own, which no plain optimizer has, is not compared.
        local: parameters whose ranks updated their fragments by themselves, and why.
        everywhere: matrices that every rank computed in the first of two plans; all of them had owners in the second
            one. Empty if there was one plan only.
        bits: a sentence for each optimizer that batches matrices. Its plain run steps each matrix alone.
        as_is: of an optimizer that is distributed already; None of one that `verify` wraps.
    """

    text_width = 120

    build: str
    optimizer: str
    steps: int
    ranks: int
    layout: str
    seed: int
    options: Mapping[str, Any]
    torch: str
    seconds: float
    compiled: tuple[str, ...] = ()
    eager: Mapping[str, str] = field(default_factory=dict)
    local: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    leaves: tuple[LeafDifference, ...] = ()
    everywhere: tuple[str, ...] = ()
    bits: tuple[str, ...] = ()
    as_is: AsIs | None = None

    @property
    def ok(self) -> bool:
        """Whether every bit of every leaf is equal."""
        return self.verdict == "equal bits"

    @property
    def verdict(self) -> VerdictName:
        """ "equal bits" or "different bits"; with `as_is`, in place of the latter "equal to rounding", "another
        algorithm", "error" or "hang"."""
        if self.as_is is not None:
            return self.as_is.verdict
        return "different bits" if self.differing else "equal bits"

    @property
    def differing(self) -> tuple[LeafDifference, ...]:
        """The leaves that are not equal."""
        return tuple(leaf for leaf in self.leaves if not leaf.equal)

    def to_json(self) -> str:
        """All fields and `ok` as a JSON object."""
        return json.dumps({"schema": SCHEMA, "ok": self.ok, "verdict": self.verdict, **asdict(self)}, indent=1)

    def page(self) -> PageModel:
        """Verdict, leaves, and how the parameters were updated."""
        return PageModel(tuple(findings_parts(self)))


class Tally:
    """The leaves that one rank has compared so far.

    Attributes:
        apart: the largest relative distance of a parameter's part by its norm, in whatever step.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.apart = rank, 0.0
        self._rows: dict[tuple[str, str], LeafDifference] = {}

    def add(self, step: int, found: Leaves, expected: Leaves) -> None:
        """Compare this rank's parts with the same parts of the plain run."""
        for key in {**expected, **found}:
            mine, whole = found.get(key, ABSENT), expected.get(key, ABSENT)
            if key not in self._rows:
                self._rows[key] = described(key, mine if whole is ABSENT else whole)
            difference = apart(mine, whole)
            self._rows[key] = self._rows[key].seen(difference, step, [self.rank])
            if key[1] == PARAMETER and not difference.equal:
                self.apart = max(self.apart, relative_norm(*fragments(mine, whole)))

    @property
    def rows(self) -> tuple[LeafDifference, ...]:
        """One row per leaf, in the order in which they were seen."""
        return tuple(self._rows.values())


def described(key: tuple[str, str], value: object) -> LeafDifference:
    """A row for a leaf that has not been compared yet."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    return LeafDifference(*key, shape, dtype_name(value))


def apart(found: object, expected: object) -> Distance:
    """Compare a leaf of this rank with that of the plain run; either may be missing."""
    if found is ABSENT:
        return unlike("only in the plain optimizer")
    if expected is ABSENT:
        return unlike("only in the wrapped optimizer")
    return distance(*fragments(found, expected))


def merged(ranks: Sequence[Sequence[LeafDifference]]) -> tuple[LeafDifference, ...]:
    """One row per leaf from the rows of every rank."""
    rows: dict[tuple[str, str], LeafDifference] = {}
    for own in ranks:
        for row in own:
            key = row.parameter, row.leaf
            whole = rows.setdefault(key, replace(row))
            one = EQUAL if row.equal else Distance(False, row.max_ulps, row.max_relative, row.remark)
            rows[key] = whole.seen(one, row.first_step, row.ranks)
    return tuple(rows.values())


def of_both_plans(planned: Sequence[LeafDifference], owned: Sequence[LeafDifference]) -> tuple[LeafDifference, ...]:
    """One row per leaf from those of the plan and those of owners for all matrices; none of the latter if there is one.

    A row that differs in one of them only says in which.
    """
    if not owned:
        return tuple(planned)
    first, second = ({(row.parameter, row.leaf): row for row in rows} for rows in (planned, owned))
    for rows, others, where in ((first, second, "where every rank computes"), (second, first, "where owners compute")):
        for key, row in rows.items():
            if not row.equal and key in others and others[key].equal:
                remark = f"{row.remark}, only {where}" if row.remark else f"only {where}"
                rows[key] = replace(row, remark=remark)
    return merged([tuple(first.values()), tuple(second.values())])


def findings_parts(f: Verification) -> Iterator[Block]:
    good = Words(f"{plural(len(f.leaves), 'leaf', 'leaves')}, every bit equal", "bold green")
    bad = Words(f"{len(f.differing)} of {len(f.leaves)} leaves differ", "bold red")
    where = f" on {plural(f.ranks, 'rank')} ({f.layout}) against one device, {plural(f.steps, 'step')}: "
    if f.as_is is not None:
        good, bad = (Words(f.verdict, look) for look in ("bold green", "bold red"))
    yield Paragraph((Words(f"{f.optimizer} of {f.build}", "bold"), where, good if f.ok else bad))
    yield note("")
    if f.as_is is not None:
        yield from verdict_parts(f.as_is)
        yield note("")
    equal = [leaf for leaf in f.leaves if leaf.equal]
    shown = [*f.differing, *equal[: max(0, MOST_ROWS - len(f.differing))]]
    if shown:
        yield PageTable(HEADERS, tuple(map(cells, shown)), "Leaves", least=(10, 10), indent=2)
    if hidden := len(f.leaves) - len(shown):
        yield note(f"and {hidden} more, equal", "dim", indent=2)
    yield note("")
    if f.compiled:
        yield role("compiled", len(f.compiled), "captured graphs from the second step on")
    for word, found in (("eager", f.eager), ("local", f.local)):
        for why, names in names_by_reason(found.items()).items():
            yield role(word, len(names), f"{why}: {some(names)}")
    if f.everywhere:
        every = plural(len(f.everywhere), "matrix", "matrices")
        yield role("plans", 2, f"as planned, where every rank computes {every}, and with owners for all of them")
    for said in f.bits:
        yield note(f"{said}.")
    if f.idle:
        yield role("idle", len(f.idle), f"never had a gradient: {some(f.idle)}")
    yield note(f"torch {f.torch}, seed {f.seed}, {f.seconds:.1f} s", "dim")


def cells(leaf: LeafDifference) -> tuple[Words, ...]:
    name = f"{leaf.leaf} ({leaf.remark})" if leaf.remark else leaf.leaf
    texts = [leaf.parameter, name, "x".join(map(str, leaf.shape)) or "-", format_dtype(leaf.dtype)]
    if leaf.equal:
        return tuple(map(Words, [*texts, "equal"]))
    ulps = "differs" if leaf.max_ulps is None else str(leaf.max_ulps)
    relative = "-" if leaf.max_relative is None else f"{leaf.max_relative:.1e}"
    texts += [ulps, relative, str(leaf.first_step), ",".join(map(str, leaf.ranks))]
    return tuple(Words(text, "red") for text in texts)


def role(word: str, count: int, why: str) -> Paragraph:
    return Paragraph((Words(f"{count} {word}", "bold"), f", {why}"))
