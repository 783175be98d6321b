"""Ways to break a step, for tests of the verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.step import Exchange, Form, Phase, Step
from canzona_compile.ir.verifier import verify
from tests.harness.samples import toy_step

Change = Callable[[Step], Step]
Case = tuple[str, Change, str, str]  # what is broken, how, words of the problem, words of the place


def fires(form: Form, change: Change, message: str, at: str) -> None:
    """The toy is valid, changed it is not, and the error says what and where; also after a pass made the change."""
    step = toy_step(form)
    verify(step)
    for before in (None, step):
        with pytest.raises(InvalidStep) as caught:
            verify(change(step), before)
        assert message in caught.value.problem
        assert caught.value.at is not None
        assert at in caught.value.at


# -- small changes -----------------------------------------------------------------------------


def task(name: str, /, **changes: Any) -> Change:
    def change(step: Step) -> Step:
        tasks = [replace(t, **changes) if t.name == name else t for t in step.tasks]
        return replace(step, tasks=tuple(tasks))

    return change


def template(**changes: Any) -> Change:
    """Change the template, before any cut refers to it."""
    return lambda step: replace(step, templates=(replace(step.templates[0], **changes),))


def cut(**changes: Any) -> Change:
    def change(step: Step) -> Step:
        return replace(step, placed=(replace(step.placed[0], **changes), *step.placed[1:]))

    return change


def group(number: int, /, **changes: Any) -> Change:
    def change(step: Step) -> Step:
        groups = [replace(g, **changes) if g.index == number else g for g in step.micro_groups]
        return replace(step, micro_groups=tuple(groups))

    return change


def exchange(phase: Phase, edit: Callable[[Exchange], Exchange | None]) -> Change:
    def change(step: Step) -> Step:
        found = getattr(step.micro_groups[0], phase.value)
        return group(0, **{phase.value: edit(found)})(step)

    return change
