"""Decide how an optimizer runs: each matrix on a twin, each by an object of its own, or several together.

The first way whose steps have the plain optimizer's bits is taken. One for which none has is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.rehearsal.diagnosis import NamesByGroup
from canzona_compile.rehearsal.own_objects import HidesValues, rehearse_objects
from canzona_compile.rehearsal.rehearsal import Rehearsal, habits_of, rehearse
from canzona_compile.rehearsal.whole_model import rehearse_coupled
from canzona_compile.replica.construction import beginnings
from canzona_compile.replica.homes import advice


class Ways:
    """Decides in which way the parameters of an optimizer run.

    Args:
        optimizer: the optimizer, not yet stepped.

    Attributes:
        began: the hyperparameters of its groups, as its constructor saw them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.began = optimizer, beginnings(optimizer)
        self._drawing: dict[Any, Rehearsal] = {}
        self._counting: set[str] = set()  # the attributes of the optimizer that show what objects count

    def rehearse(self, names: NamesByGroup = ()) -> Rehearsal:
        """Rehearse the optimizer; where it is refused, rehearse objects of their own, and then parameters together.

        Args:
            names: those of its parameters by group, for errors.

        Raises:
            UnsupportedOptimizer: it is refused, and neither is a way out.
        """
        try:
            return rehearse(self.optimizer, names)
        except UnsupportedOptimizer as refused:
            hides = False
            try:
                return self._rehearse_objects(refused, names)
            except HidesValues as unseen:
                twice, hides = unseen.refusal, True
            except UnsupportedOptimizer as problem:
                twice = problem
            try:
                return rehearse_coupled(self.optimizer, twice, names, refused.hint or "")
            except UnsupportedOptimizer as last:
                if hides:  # no option that users have set
                    return self._rehearse_objects(refused, names, showing_all=False)
                raise advised(self.optimizer, last) from refused

    def of(self, manner: Any, known: Iterable[Rehearsal]) -> Rehearsal | None:
        """Find the rehearsal by which parameters have objects of their own, or step together; None if neither.

        Args:
            manner: the key of what these parameters have in common.
            known: the rehearsals of the whole optimizer.
        """
        shown = (rehearsal for rehearsal in known if rehearsal.resident or rehearsal.coupled is not None)
        return next(shown, None) or self._drawing.get(manner)

    def check_rehearsed(self, manner: Any, name: str, rehearsal: Rehearsal) -> Rehearsal | None:
        """Raise unless a rehearsal has shown that parameters are independent, which no graph shows.

        Args:
            manner: the key of what these parameters have in common.
            name: the name of one of them, for the error.
            rehearsal: that of the whole optimizer.

        Returns:
            The rehearsal of objects of their own if that is what shows it; None otherwise.

        Raises:
            UnsupportedOptimizer: nothing shows it.
        """
        if rehearsal.resident or not rehearsal.draws:
            return rehearsal if rehearsal.resident else None
        refused = UnsupportedOptimizer(
            f"{plain_class(self.optimizer).__name__} draws random numbers in code that cannot be traced, so "
            "canzona_compile cannot check whether parameters depend on one another",
            at=name,
            hint="use a variant of the optimizer without random numbers",
        )
        self._drawing[manner] = found = self._rehearse_objects(refused, (), showing_all=False)
        return found

    def _rehearse_objects(
        self, refused: UnsupportedOptimizer, names: NamesByGroup, showing_all: bool = True
    ) -> Rehearsal:
        found = rehearse_objects(self.optimizer, refused, names, self.began, self._counting, showing_all)
        if found.recipe is not None:
            self._counting |= {path.split("/")[1] for path in found.recipe.shared}
        return found

    def with_habits(self, rehearsal: Rehearsal) -> Rehearsal:
        """Add to the habits of a whole optimizer those of its parameters that have objects of their own."""
        own = [replace(one, drops_gradients=False, draws=False) for one in self._drawing.values()]
        both = habits_of([rehearsal, *own])
        return replace(
            both,
            skipped=rehearsal.skipped,
            resident=rehearsal.resident,
            recipe=rehearsal.recipe,
            coupled=rehearsal.coupled,
        )


def advised(optimizer: Optimizer, refused: UnsupportedOptimizer) -> UnsupportedOptimizer:
    """Add the remedy to a refusal if the optimizer holds another one, whose steps it may take."""
    hint = advice(optimizer)
    if not hint:
        return refused
    return UnsupportedOptimizer(refused.problem, at=refused.at, hint=f"{hint}; {refused.hint or ''}".rstrip("; "))
