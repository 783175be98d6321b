"""Which tasks need whole matrices, and by which of their variants they are weighed."""

from __future__ import annotations

from dataclasses import replace

from canzona_compile.ir.step import Placed, Step, Task


def holistic_tasks(step: Step) -> list[Task]:
    """The tasks of a placed step that need whole matrices, each with its heaviest variant."""
    heaviest = {own.name: max(cuts, key=weight) for own, cuts in step.variants().items()}
    return [
        replace(t, placed=most.name, template=most.template.name)
        for t in step.tasks
        if not (most := heaviest[t.placed]).elementwise
    ]


def weight(placed: Placed) -> tuple[bool, int]:
    return not placed.elementwise, placed.flops
