"""Which matrices to distribute as Gram products, and which to leave to owners: by simulated time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Set
from dataclasses import dataclass, replace

from canzona_compile.analysis.roofline import placed_time
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import PlanFile, PlannedTask, layout_text
from canzona_compile.ir.step import Step, Strategy, Task
from canzona_compile.ownership.jobs import Job
from canzona_compile.ownership.lpt import Joint
from canzona_compile.session.plan import lowering_passes
from canzona_compile.tools.planning.gram import BATCH_SPLIT, GRAM, ROUNDS, Gram, gram_of
from canzona_compile.tools.planning.request import Request, played, simulated
from canzona_compile.tools.simulation.rounds import Rounds

NANO = 1e9
PARTS = 10  # of the matrices that can be Gram-distributed: that many splits are tried


@dataclass(frozen=True, slots=True)
class GramTask:
    """A matrix, with its owner, that is worked on as Gram products."""

    task: Task
    form: Gram
    rounds: Rounds


@dataclass(frozen=True, slots=True)
class Mixed:
    """A scheduled step of the matrices that owners compute, and all others.

    Attributes:
        split_stacks: are entries of stacks among its tasks? No run has these.
    """

    step: Step
    gram: tuple[GramTask, ...] = ()
    split_stacks: bool = False

    @property
    def rounds(self) -> tuple[Rounds, ...]:
        return tuple(g.rounds for g in self.gram)

    def file(self) -> PlanFile:
        """The plan of both; a run refuses the Gram part."""
        own = PlanFile.of(self.step)
        if self.split_stacks:
            return replace(own, tasks=tuple(replace(t, strategy=BATCH_SPLIT) for t in own.tasks))
        if not self.gram:
            return own
        more = tuple(
            PlannedTask(g.task.name, g.task.shape, layout_text(g.task), GRAM, g.task.owner, "by simulated time")
            for g in self.gram
        )
        text = "\n".join([own.fingerprint, *map(str, more)])
        return replace(own, tasks=own.tasks + more, fingerprint=hashlib.sha256(text.encode()).hexdigest())


def candidates(owned: Step, request: Request) -> dict[str, Gram]:
    """Gram forms by name of a cut, for the tasks of the largest grid.

    None where replicas apply all updates: what a row computes would have to travel to all others in full.
    """
    grid = max((t.layout.grid for t in owned.tasks), key=lambda g: (g.size, str(g)), default=None)
    if grid is None or grid.shards == 1 or (grid.replicas > 1 and request.updates != "zero1"):
        return {}
    layouts = {t.placed: t.layout for t in owned.tasks if t.layout.grid == grid}
    found = {p.name: gram_of(p, layouts[p.name], request.hardware) for p in owned.placed if p.name in layouts}
    return {name: form for name, form in found.items() if form is not None}


def attempt(owned: Step, forms: dict[str, Gram], names: Set[str], request: Request) -> Mixed:
    """A plan in which the tasks `names` are Gram-distributed; owners of both kinds share one balance of seconds.

    Args:
        forms: by name of a cut.
    """
    hardware = request.hardware
    times = {p.name: placed_time(p, hardware) for p in owned.placed if any(t.placed == p.name for t in owned.tasks)}
    grid = next(t.layout.grid for t in owned.tasks if t.name in names)
    here = [t for t in owned.tasks if t.layout.grid == grid]

    def cost(task: Task) -> float:
        return (
            forms[task.placed].owner * ROUNDS if task.name in names else times[task.placed].compute.total(hardware)
        ) * NANO

    jobs = [Job(t.name, t.index, cost(t), math.prod(t.shape) // grid.shards) for t in here]
    owners = dict(zip((t.name for t in here), Joint()(jobs, grid.replicas, grid.shards, {}), strict=True))
    own = [
        replace(t, owner=owners[t.name], strategy=Strategy.OWNER, reason="by simulated time") if t.name in owners else t
        for t in owned.tasks
    ]
    gram = []
    for task in (t for t in own if t.name in names):
        form, time = forms[task.placed], times[task.placed]
        assert task.owner is not None
        rounds = Rounds(
            task.name,
            task.layout,
            task.owner,
            time.prepare.seconds,
            time.apply.seconds,
            form.fragment,
            form.owner,
            form.up,
            form.down,
        )
        gram.append(GramTask(task, form, rounds))
    others = replace(owned, tasks=tuple(t for t in own if t.name not in names))
    return Mixed(played(others, lowering_passes(request.options)), tuple(gram))


def best_mix(owned: Step, scheduled: Step, request: Request, forced: bool) -> Mixed:
    """The shortest simulated step, with as many of the largest matrices Gram-distributed as pay; all, if forced."""
    forms = candidates(owned, request)
    if not forms and not forced:
        return Mixed(scheduled)
    if forced:
        if not forms:
            raise CanzonaError(
                "no matrix can be Gram-distributed",
                at="plan(..., strategy='gram')",
                hint="it takes Newton-Schulz or its like, shards along the long dim, and over dp updates='zero1'",
            )
        return attempt(owned, forms, {t.name for t in owned.tasks if t.placed in forms}, request)
    # The largest matrices are the critical path; one of them alone would not shorten it.
    able = sorted((t for t in owned.tasks if t.placed in forms), key=lambda t: (-work(forms[t.placed]), t.index))
    mixes = [Mixed(scheduled)]
    for part in range(1, PARTS + 1):
        names = {t.name for t in able[: len(able) * part // PARTS]}
        mixes.append(attempt(owned, forms, names, request))
    return min(mixes, key=lambda mixed: (seconds_of(mixed, request), len(mixed.gram)))


def work(form: Gram) -> int:
    return form.m**2 * form.n


def seconds_of(mixed: Mixed, request: Request) -> float:
    return simulated(mixed.step, request, (), mixed.rounds, ROUNDS).seconds
