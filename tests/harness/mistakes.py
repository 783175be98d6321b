"""Mistakes, a row each: the course of a driver on a layout, what goes wrong on it, and what every rank says then.

    MISTAKES = Mistakes(__name__, driver=Trainer, after=ready())

    @MISTAKES("lr=0.5", "lr=0.02", when="fed", on=[1])
    def another_rate(trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.5

    MISTAKES.check("another_rate", Case("fsdp", (3,)))

A driver is made of layouts and options, and goes through moments that it names; at one of them a row's edit is made. A
file has one table, as ranks find it by the file's name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.errors import CanzonaError
from tests.harness.layouts import Case
from tests.harness.marks import full
from tests.harness.ranks import run

Edit = Callable[[Any], object]


# -- what comes of a call --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call on a rank.

    Attributes:
        error: name of the exception's class, empty if there was none; `said`: its text.
        ours: is it one that canzona_compile raises on purpose?
        changed: names of tensors of this rank with other bits than before.
        later: what was wrong when ranks went on.
    """

    error: str = ""
    said: str = ""
    ours: bool = False
    changed: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)


def attempt(call: Callable[[], object], held: Callable[[], Mapping[str, Tensor]] = dict) -> Outcome:
    """What comes of a call that is expected to fail, and which of the tensors that are held it changed."""
    before = {name: value.clone() for name, value in held().items()}
    error: BaseException | None = None
    try:
        call()
    except (Exception, KeyboardInterrupt) as found:
        error = found
    after = held()
    changed = [n for n in before.keys() | after.keys() if n not in before or n not in after]
    changed += [n for n in before.keys() & after.keys() if not torch.equal(before[n], after[n])]
    kind = "" if error is None else type(error).__name__
    return Outcome(kind, "" if error is None else str(error), isinstance(error, CanzonaError), sorted(changed))


@contextlib.contextmanager
def refused(
    *says: str,
    kind: type[Exception] = CanzonaError,
    at: str | None = None,
    hint: str = "",
    unchanged: Iterable[Tensor] = (),
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """What is inside is refused.

    Args:
        says: patterns that the text has.
        kind: the class of the error.
        at: the place that it names.
        hint: a pattern of the hint.
        unchanged: tensors that have the bits from before.
    """
    tensors = list(unchanged)
    before = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    for pattern in says:
        assert re.search(pattern, str(error), re.DOTALL), error
    assert at is None or error.at == at
    assert not hint or re.search(hint, error.hint or "", re.DOTALL), error
    assert all(map(torch.equal, tensors, before))


# -- the table -------------------------------------------------------------------------------------


class Driver(Protocol):
    """What a row is played on."""

    def course(self) -> Iterator[str]:
        """Train; the names of the moments at which something may go wrong."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What this rank holds, which no step that is refused may change."""
        ...

    def go_on(self) -> list[str]:
        """Train on after an error: what is wrong then."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A mistake, and what is right.

    Attributes:
        edit: makes it.
        says: patterns that what a rank says has; by rank if ranks say other things.
        driver: what it is made on, of layouts and options.
        cases: the layouts, unless a test names others.
        after: what ranks have behind them, see `run`.
        when: the moment at which it is made; the first one if it is not named.
        on: the ranks that make it, also counted from the last one; all if there are none.
        errors: the classes that ranks may raise, "" if they may raise nothing; any one if there are none.
        odd: options of the driver on the ranks that make it.
        options: of the driver on every rank.
        last: whether the course ends with it.
        goes_on: whether ranks train on afterwards.
        fresh: whether it leaves a collective that one rank started and the other did not.
        dying: ranks that end their process; what they say is not looked at.
        group: of rows that one test plays.
        full: whether only `make test-all` runs it: others that are alike say the same, or it is rare.
    """

    edit: Edit
    says: tuple[str, ...] | Mapping[int, str]
    driver: Callable[..., Driver]
    cases: Sequence[Case] = ()
    after: functools.partial[Any] | None = None
    when: str = ""
    on: Collection[int] = ()
    errors: Collection[str] = ()
    odd: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False
    goes_on: bool = False
    fresh: bool = False
    dying: Collection[int] = ()
    group: str = ""
    full: bool = False

    @property
    def is_made_here(self) -> bool:
        return not self.on or bool({dist.get_rank(), dist.get_rank() - dist.get_world_size()} & {*self.on})

    def play(self, *cases: Case, **options: Any) -> Outcome:
        """What comes of it on this rank."""
        own = self.driver(*cases, **{**self.options, **options, **(self.odd if self.is_made_here else {})})
        course = own.course()

        def make() -> None:
            assert any(self.when in ("", moment) for moment in course), f"there is no moment {self.when}"
            if self.is_made_here:
                self.edit(own)

        found = attempt(make)
        if not found.error and not self.last:
            found = attempt(lambda: list(course), own.tensors)
        if self.goes_on:
            found.later.extend(own.go_on())
        return found

    def check(self, rank: int, found: Outcome) -> None:
        """The error that this row asks for, and nothing half done."""
        said = "\n".join([f"{found.error}: {found.said}", *found.later])
        for pattern in (self.says[rank],) if isinstance(self.says, Mapping) else self.says:
            assert re.search(pattern, said, re.DOTALL), said
        assert found.error in self.errors if self.errors else found.error, said
        assert found.changed == [] or not found.error


def nothing(_: Any) -> None:
    """The edit of a row that is wrong by its options."""


class Mistakes:
    """The rows of a file, by name.

    Args:
        module: the file.
        alike: what rows have that do not say it.
    """

    def __init__(self, module: str, **alike: Any) -> None:
        self.module, self.alike = module, alike
        self.rows: dict[str, Row] = {}

    def __call__(self, *says: str, name: str = "", **fields: Any) -> Callable[..., Edit]:
        """A function that takes the edit of a row, or nothing if it is all in its options, and adds the row."""

        def add(edit: Edit = nothing) -> Edit:
            self.rows[name or edit.__name__] = Row(edit=edit, **{"says": says, **self.alike, **fields})
            return edit

        return add

    def names(self, group: str = "") -> list[Any]:
        """The rows of a group, or all, for `parametrize`."""
        return [full(name) if row.full else name for name, row in self.rows.items() if group in ("", row.group)]

    def check(self, name: str, *cases: Case, world: int = 2, **options: Any) -> list[Outcome]:
        """Play a row on ranks, and check what each of them says; what came of it.

        Args:
            cases: other layouts than the row's.
            world: how many ranks, if there are no layouts.
            options: of the driver, beside those of the row.
        """
        row = self.rows[name]
        cases = cases or tuple(row.cases)
        world = cases[0].world if cases else world
        how: Any = {"fresh": row.fresh, "dying": row.dying, "after": row.after}
        found = run(world, play, self.module, name, *cases, **how, **options)
        for rank, outcome in enumerate(found):
            if rank not in row.dying:
                row.check(rank, outcome)
        return found


def play(module: str, name: str, *cases: Case, **options: Any) -> Outcome:
    """Play a row of a file's table on this rank."""
    rows: dict[str, Row] = importlib.import_module(module).MISTAKES.rows
    return rows[name].play(*cases, **options)
