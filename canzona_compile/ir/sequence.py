"""The step of optimizers that step one after the other, as reports show it and plan files keep it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from canzona_compile.ir.step import Batch, MicroGroup, Step, Task


def in_sequence(steps: Sequence[Step]) -> Step:
    """Put the scheduled steps of several optimizers together.

    Args:
        steps: SCHEDULED or beyond, in the order in which they run. No two of them have a task in common.

    Returns:
        A SCHEDULED step whose events are those of all steps in order. Names of templates and cuts that several steps
        have get numbers.
    """
    found, *others = steps
    found = replace(found, program=None)
    for number, step in enumerate(others, 1):
        found = followed(found, told_apart(step, found, number))
    return replace(found, optimizer="+".join(step.optimizer for step in steps))


def names_in_sequence(steps: Sequence[Step]) -> dict[str, tuple[int, str]]:
    """By the name of a template or a cut as `in_sequence` shows it: which step has it, and its name there."""
    found: dict[str, tuple[int, str]] = {}
    for names in ([[t.name for t in s.templates] for s in steps], [[p.name for p in s.placed] for s in steps]):
        taken: set[str] = set()
        for number, own in enumerate(names):
            shown = fresh(own, taken, number)
            taken |= set(shown.values())
            found |= {shown[name]: (number, name) for name in own}
    return found


def told_apart(step: Step, before: Step, number: int) -> Step:
    """A step with names and labels that the one before it does not have."""
    templates = fresh([t.name for t in step.templates], {t.name for t in before.templates}, number)
    families = fresh([t.family for t in step.templates], {t.family for t in before.templates} - {""}, number)
    placed = fresh([p.name for p in step.placed], {p.name for p in before.placed}, number)
    label = 1 + max((task.param_group for task in before.tasks), default=-1)
    index = 1 + max((task.index for task in before.tasks), default=-1)
    kept = {t.name: replace(t, name=templates[t.name], family=families[t.family]) for t in step.templates}

    def renamed(task: Task) -> Task:
        return replace(
            task,
            index=task.index + index,
            param_group=task.param_group + label,
            template=templates[task.template],
            placed=placed[task.placed],
        )

    def labelled(batch: Batch) -> Batch:
        return replace(batch, placed=placed[batch.placed], param_group=batch.param_group + label)

    return replace(
        step,
        templates=tuple(kept.values()),
        placed=tuple(replace(p, name=placed[p.name], template=kept[p.template.name]) for p in step.placed),
        tasks=tuple(map(renamed, step.tasks)),
        micro_groups=tuple(replace(g, batches=tuple(map(labelled, g.batches))) for g in step.micro_groups),
    )


def fresh(names: Sequence[str], taken: Collection[str], number: int) -> dict[str, str]:
    """New names for those that are taken."""
    return {name: f"{name}_{number}" if name in taken else name for name in names}


def followed(one: Step, two: Step) -> Step:
    """Two steps without a name in common, the second after the first; each has memory slots of its own."""
    groups = 1 + max((group.index for group in one.micro_groups), default=-1)
    slots = 1 + max((buffer.slot for buffer in one.buffers), default=-1)
    begin = len(one.schedule)

    def later(group: MicroGroup) -> MicroGroup:
        return replace(group, index=group.index + groups)

    events = tuple(replace(event, micro_group=event.micro_group + groups) for event in two.schedule)
    buffers = tuple(
        replace(
            buffer,
            micro_group=buffer.micro_group + groups,
            first=buffer.first + begin,
            last=buffer.last + begin,
            slot=buffer.slot + slots,
        )
        for buffer in two.buffers
    )
    return replace(
        one,
        templates=(*one.templates, *two.templates),
        placed=(*one.placed, *two.placed),
        tasks=(*one.tasks, *two.tasks),
        micro_groups=(*one.micro_groups, *map(later, two.micro_groups)),
        schedule=(*one.schedule, *events),
        buffers=(*one.buffers, *buffers),
        depth=max(one.depth, two.depth),
        elementwise=(*one.elementwise, *two.elementwise),
    )
