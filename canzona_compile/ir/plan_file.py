"""A plan as a file: the owner rank of each task, and the tasks of each micro-group.

A run, or a forecast without ranks, makes the file. Another run can follow it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.printer import parts, text_of
from canzona_compile.ir.step import Step, Strategy, Task
from canzona_compile.machine.hardware import Hardware, hardware_from, read_json

SCHEMA = 1
KIND = "canzona plan"
MAKE_ANEW = "make a new plan"


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """What a plan decided about one matrix.

    Attributes:
        layout: the placements, replicas and shards of the parameter for which the plan was made.
        strategy: "owner", "replicated" or "local". A run refuses other strategies, which old files may have.
        owner: (replica, shard) coordinate of the owner rank; None if every rank computes the matrix.
        replica: the data-parallel rank that updates it, under ZeRO-1; `layout` and `owner` are then those among the
            ranks beside that one. None without ZeRO-1.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    strategy: str
    owner: tuple[int, int] | None
    reason: str
    replica: int | None = None


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The decisions of a plan, and hashes of the resulting step.

    Attributes:
        depth: how many micro-groups are in flight at once.
        groups: names of the tasks of each micro-group.
        digests: hashes of the printed graphs, tasks, micro-groups and schedule. They tell which part differs.
        fingerprint: a hash of all of these. It is equal if two runs do the same in the same order.
        replicas: the number of data-parallel ranks that share the matrices, under ZeRO-1; None without it.
        rates: those that ranks measured before they planned; None for others, which the run is given again.
    """

    optimizer: str
    depth: int
    tasks: tuple[PlannedTask, ...]
    groups: tuple[tuple[str, ...], ...]
    digests: tuple[tuple[str, str], ...]
    fingerprint: str
    replicas: int | None = None
    rates: Hardware | None = None

    @classmethod
    def of(cls, step: Step) -> PlanFile:
        """The plan of a step of form SCHEDULED."""
        printed = parts(step, reasons=False)
        replica = {part.name: part.owner for bucket in step.buckets for part in bucket.slices}
        tasks = (
            PlannedTask(t.name, t.shape, layout_text(t), str(t.strategy), t.owner, t.reason, replica.get(t.name))
            for t in step.tasks
        )
        return cls(
            step.optimizer,
            step.depth,
            tuple(tasks),
            tuple(group.tasks for group in step.micro_groups),
            tuple(digests(printed).items()),
            fingerprint(printed),
            len(step.buckets[0].lengths) if step.buckets else None,
            rates if (rates := step.machine.rates) is not None and rates.here else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file as plain lists, dicts, strings and numbers."""
        found = {"schema": SCHEMA, "kind": KIND, **asdict(self), "digests": dict(self.digests)}
        del found["rates"]
        return found if self.rates is None else {**found, "rates": self.rates.to_dict()}

    def to_json(self) -> str:
        """Return the content of the file, to be saved and passed as `plan=`."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def task(self, task: Task) -> PlannedTask:
        """What is planned for a task of a run.

        Args:
            task: PLACED; under ZeRO-1 its grid has the rows of all data-parallel ranks.

        Returns:
            The decisions, with the owner as a coordinate of the task's grid.

        Raises:
            CanzonaError: the plan lacks the task, or has it for another layout.
        """
        found = self._by_name().get(task.name)
        hint = "make the plan for this model and mesh, with the same parameter names"
        if found is None:
            raise CanzonaError("the plan does not have this parameter", at=task.name, hint=hint)
        here = (task.shape, layout_text(task, self.replicas or 1))
        if here != (found.shape, found.layout):
            raise CanzonaError(
                f"the plan is for {list(found.shape)} on {found.layout}, but the run has {list(task.shape)} on "
                f"{here[1]}",
                at=task.name,
                hint=hint,
            )
        if found.strategy not in set(Strategy):
            raise CanzonaError(
                f"a run cannot execute the strategy {found.strategy!r} of this plan",
                at=task.name,
                hint="make a new plan with strategy auto, owner or replicated",
            )
        if self.replicas is None or found.replica is None or found.owner is None:
            return found
        grid, (row, shard) = task.layout.grid, found.owner
        strategy = str(Strategy.LOCAL if grid.size == 1 else Strategy.OWNER)
        return replace(found, owner=(found.replica * (grid.replicas // self.replicas) + row, shard), strategy=strategy)

    def check_replicas(self, replicas: int | None) -> None:
        """Raise CanzonaError unless the plan is for so many data-parallel ranks; None: for a run without ZeRO-1."""
        if self.replicas == replicas:
            return
        if self.replicas is None:
            raise CanzonaError(
                "the plan was made for wrap, so it does not say which data-parallel rank updates this matrix",
                at="zero1(..., plan=)",
                hint='plan with updates="zero1", or save optimizer.canzona.plan() of a run under zero1',
            )
        if replicas is None:
            raise CanzonaError(
                "the plan was made for zero1, where the owner holds this matrix whole before the step",
                at="wrap(..., plan=)",
                hint='plan with updates="ddp", or save optimizer.canzona.plan() of a run under wrap',
            )
        raise CanzonaError(
            f"the plan is for {self.replicas} data-parallel ranks, but the mesh has {replicas}",
            at="zero1(..., plan=)",
            hint="make the plan for this mesh",
        )

    def check_complete(self, names: Iterable[str]) -> None:
        """Raise CanzonaError if the plan has tasks that a run lacks."""
        if missing := sorted({task.name for task in self.tasks} - set(names)):
            raise CanzonaError("the plan has a parameter that the optimizer does not have", at=missing[0])

    def check_followed(self, step: Step) -> None:
        """Raise CanzonaError if a scheduled step differs from the plan. The message names the part that differs."""
        printed = parts(step, reasons=False)
        if fingerprint(printed) == self.fingerprint:
            return
        here = digests(printed)
        different = [name for name, digest in self.digests if here.get(name) != digest]
        raise CanzonaError(
            f"the run would differ from the plan in its {' and '.join(different) or 'text'}",
            at=f"plan {self.fingerprint[:12]}",
            hint="make the plan with the torch version, optimizer and hyperparameters of the run, on which graphs "
            "depend",
        )

    def _by_name(self) -> Mapping[str, PlannedTask]:
        return {task.name: task for task in self.tasks}


def layout_text(task: Task, replicas: int = 1) -> str:
    """The layout of a task on one of so many replicas."""
    grid = task.layout.grid
    return f"{task.layout.placements} on {grid.replicas // replicas}x{grid.shards}"


def fingerprint(printed: Mapping[str, Sequence[str]]) -> str:
    """A hash of all decisions in a printed step. `printer.parts` prints steps."""
    return hashlib.sha256(text_of(printed).encode()).hexdigest()


def digests(printed: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Short hashes of the parts of a printed step: graphs, tasks, micro-groups and schedule."""
    cuts = dict(printed)
    if not cuts["groups"]:  # keeps the hash that plans without matrices always had
        cuts["tasks"] = [*cuts["tasks"], *cuts["schedule"]]
    return {name: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for name, lines in cuts.items()}


def read_plan(given: str | Path | PlanFile | Mapping[str, Any]) -> PlanFile:
    """Read a plan from a file or from plain objects, and check every field."""
    if isinstance(given, PlanFile):
        return given
    at = "plan" if isinstance(given, Mapping) else str(given)
    found = dict(given) if isinstance(given, Mapping) else read_json(Path(given), MAKE_ANEW)
    if not isinstance(found, Mapping) or found.get("kind") != KIND:
        raise CanzonaError(
            "the file is not a plan", at=at, hint="write a plan with `canzona-compile plan --format json -o plan.json`"
        )
    if found.get("schema") != SCHEMA:
        raise CanzonaError(f"schema is {found.get('schema')!r}, not {SCHEMA}", at=at, hint=MAKE_ANEW)
    if missing := [f.name for f in fields(PlanFile) if f.default is MISSING and f.name not in found]:
        raise CanzonaError(f"the field {missing[0]!r} is missing", at=at, hint=MAKE_ANEW)
    try:
        tasks = tuple(
            PlannedTask(
                str(t["name"]),
                tuple(map(whole, t["shape"])),
                str(t["layout"]),
                str(t["strategy"]),
                None if t["owner"] is None else coordinate(t["owner"]),
                str(t["reason"]),
                None if t.get("replica") is None else whole(t["replica"]),
            )
            for t in found["tasks"]
        )
        groups = tuple(tuple(map(str, group)) for group in found["groups"])
        known = dict(found["digests"])
        depth = whole(found["depth"])
        if len({task.name for task in tasks}) < len(tasks):
            raise ValueError("two tasks have one name")
        replicas = None if found.get("replicas") is None else whole(found["replicas"])
        ranks = {None} if replicas is None else set(range(replicas))
        if astray := [task.name for task in tasks if task.replica not in ranks]:
            raise ValueError(f"the owner of {astray[0]} is not a data-parallel rank of the plan")
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CanzonaError(f"an entry is wrong: {type(error).__name__}: {error}", at=at, hint=MAKE_ANEW) from error
    named = str(found["optimizer"]), depth, tasks, groups, tuple(known.items()), str(found["fingerprint"])
    rates = found.get("rates")
    if rates is not None and not isinstance(rates, Mapping):
        raise CanzonaError("rates is not an object", at=at, hint=MAKE_ANEW)
    return PlanFile(*named, replicas, None if rates is None else hardware_from(rates, at))


def whole(value: Any) -> int:
    """Return an integer of a plan; a float or a truth value is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not an integer")
    return value


def coordinate(value: Any) -> tuple[int, int]:
    """Return the coordinate (replica, shard) of an owner rank."""
    replica, shard = value
    return whole(replica), whole(shard)
