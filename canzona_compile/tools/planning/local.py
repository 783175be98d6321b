"""What each rank does by itself in the step of a chain: the elementwise updates of all but the matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from canzona_compile.analysis.roofline import graph_time
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.step import Step, Task
from canzona_compile.machine.hardware import Hardware
from canzona_compile.tools.planning.figures import LocalForecast
from canzona_compile.tools.planning.offline import Captured


def local_forecast(begun: Captured, owned: Step, buckets: Sequence[Bucket], hardware: Hardware) -> LocalForecast | None:
    """Sum up the parameters whose update is elementwise.

    Args:
        owned: the same step with owners.

    Returns:
        The figures; None if there is no such parameter.
    """
    tasks = {task.name: task for task in owned.elementwise}
    if not tasks:
        return None
    templates = {t.name: t for t in owned.templates}
    kinds = {name: templates[task.template] for name, task in tasks.items()}
    per_element = {t.name: graph_time(t.graph, hardware).seconds / max(1, math.prod(t.shape)) for t in kinds.values()}
    held: dict[int, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0])
    for name, rank, count in updated(tasks, buckets):
        own = held[rank]
        own[0] += count
        own[2] += count * per_element[kinds[name].name]
        for leaf in kinds[name].leaves if count else ():
            shared = leaf.shape == kinds[name].shape and leaf.shape
            host = leaf.stored is not None and leaf.stored.host
            own[3 if host else 1] += count * leaf.element_bytes if shared else leaf.nbytes(leaf.shape)
    elements, state, seconds, in_host = (max((own[i] for own in held.values()), default=0) for i in range(4))
    return LocalForecast(
        tuple(kind for kind, names in begun.members if names & tasks.keys()),
        len(tasks),
        sum(math.prod(task.shape) for task in tasks.values()),
        int(elements),
        int(state),
        seconds,
        int(in_host),
    )


def updated(tasks: Mapping[str, Task], buckets: Sequence[Bucket]) -> Iterator[tuple[str, int, int]]:
    """By parameter and rank, how many elements the rank updates: those that it owns in buckets, or else those it holds.

    Ranks of buckets are data-parallel ones.
    """
    if buckets:
        parts = (part for bucket in buckets for part in bucket.slices)
        yield from ((part.name, part.owner, part.length) for part in parts if part.name in tasks)
        return
    for name, task in tasks.items():
        for row in task.layout.grid.ranks:
            yield from ((name, rank, box.numel) for rank, box in zip(row, task.layout.boxes, strict=True))
