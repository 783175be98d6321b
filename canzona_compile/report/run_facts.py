"""The facts that a report adds to the plan: fallbacks, counts, and what the user could change."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.errors import some
from canzona_compile.ir.layout import Grid
from canzona_compile.ir.options import Options
from canzona_compile.ir.split import looks_fused
from canzona_compile.ir.step import Step, Task
from canzona_compile.ir.storage import Stored
from canzona_compile.ownership.jobs import Job, loads, makespan
from canzona_compile.ownership.lpt import LptSwap
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.report.explain import bits_of
from canzona_compile.report.schema import BufferMemory, Facts, LocalTask, ProfileReport, StateFigure
from canzona_compile.report.units import format_flops, plural
from canzona_compile.session.measuring import both_measured
from canzona_compile.session.plan import Plan
from canzona_compile.session.program_cache import BoundProgram
from canzona_compile.session.session import SKIPPED, Session
from canzona_compile.tensors import local_part


def facts_of(session: Session) -> Facts:
    """Collect the facts of the plan in use."""
    session.last()
    driver, options = session.driver, session.options
    assert driver is not None
    assert driver.last is not None
    plan, both = driver.plan, driver.plan.stagger
    why_local = f"elementwise: each rank updates {session.holds}"
    kinds = {id(b.kind): b.kind for b in plan.bound.values()}
    reasons = {t.name: plan.bound[t.name].kind.template.interpreted for t in plan.owned.tasks}
    said = [*fused_and_whole(plan, options), *eager_cuts(driver.last)]
    return Facts(
        world_size=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        captures=session.capture.captures,
        local=tuple(LocalTask(b.task.name, b.task.shape, why_local) for b in plan.elementwise),
        fallbacks={name: why for name, why in reasons.items() if why},
        bits=tuple(filter(None, [bits_of(session)])),
        suggestions=(*(suggestions(plan, options) if session.may_move_owners else []), *said),
        numerics=options.numerics,
        variants=sum(len(k.recorder.variants) for k in kinds.values() if k.recorder is not None),
        rank_programs=len(driver.programs),
        capacity=options.any_capacity,
        memory=BufferMemory(sum(driver.programs.buffer_sizes), driver.first_buffers),
        execution=driver.last.executor.how,
        profile=ProfileReport(both.together, both.apart, options.stagger) if both.together else None,
        measurement=session.measuring.found,
        state=state_figures(session) if plan.rules is not None else (),
        skipped_steps=session.optimizer.param_groups[0].get(SKIPPED, 0) if options.skip_nonfinite else None,
    )


def facts_of_all(sessions: Sequence[Session]) -> Facts:
    """Collect the facts of the plans of several optimizers that step one after the other."""
    every = [facts_of(session) for session in sessions]
    return replace(
        every[sessions.index(with_matrices(sessions))],
        captures=sum(own.captures for own in every),
        local=tuple(task for own in every for task in own.local),
        fallbacks={name: why for own in every for name, why in own.fallbacks.items()},
        bits=tuple(said for own in every for said in own.bits),
        state=tuple(figure for own in every for figure in own.state),
        suggestions=tuple(dict.fromkeys(said for own in every for said in own.suggestions)),
        variants=sum(own.variants for own in every),
        rank_programs=sum(own.rank_programs for own in every),
        memory=BufferMemory(sum(own.memory.buffers for own in every), max(own.memory.first_buffers for own in every)),
        measurement=reduce(both_measured, (own.measurement for own in every)),
    )


def state_figures(session: Session) -> tuple[StateFigure, ...]:
    """Sum up the leaves of the state on this rank by name, and by how they are stored."""
    found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    states = (state for param, state in session.optimizer.state.items() if isinstance(param, Tensor))
    for state in states:
        for name, value in state_leaves(state):
            if not isinstance(value, Tensor | Stored):
                continue
            own = value if isinstance(value, Stored) else local_part(value)
            how = str(own.storage) if isinstance(own, Stored) else ""
            row = found[name, str(own.dtype).removeprefix("torch."), how]
            row[0] += 1
            row[1] += own.nbytes
            row[2] += math.prod(own.shape) * own.dtype.itemsize
    return tuple(StateFigure(*key, *row) for key, row in sorted(found.items()))


def with_matrices(sessions: Sequence[Session]) -> Session:
    """Find the first optimizer that has tasks which need an owner, or the first of all if none has."""
    for session in sessions:
        session.last()
    plans = [(session, session.driver.plan) for session in sessions if session.driver is not None]
    return next((session for session, plan in plans if plan.owned.tasks), sessions[0])


def eager_cuts(program: BoundProgram) -> list[str]:
    """List, in sentences, the elementwise work of a program that has no generated kernel."""
    return [
        f"Elementwise work of {name} runs operator by operator, without a kernel: {why}."
        for name, why in program.step.program.eager.items()
    ]


def fused_and_whole(plan: Plan, options: Options) -> list[str]:
    """Name weights that look fused and are one matrix each, where ranks may have packed their parts."""
    whole = [name for t in plan.owned.tasks if not (name := t.name).endswith("]") and looks_fused(name)]
    marked = any("tensor_model_parallel" in vars(plan.bound[name].origin) for name in whole)
    says = f"Fused by name, but updated as one matrix: {some(whole)}. Only split= says which parts such a weight has."
    return [says] if whole and (marked or options.layout is not None) else []


def suggestions(plan: Plan, options: Options) -> tuple[str, ...]:
    """List, in sentences, what the user could change so that ranks share work that each of them repeats now."""
    if not (dist.is_available() and dist.is_initialized()) or options.replicate is not None:
        return ()
    return (*plain_copies(plan), *copies_along_a_dim(plan))


def plain_copies(plan: Plan) -> list[str]:
    """Suggest to share plain tensors, as under DistributedDataParallel."""
    alone = [t for t in plan.owned.tasks if t.layout.grid.size == 1 and t.layout.placements == "local"]
    if not alone or dist.get_world_size() == 1:
        return []
    return [
        f"{len(alone)} matrices are plain tensors, computed on their rank alone. If ranks hold equal "
        "copies of them (DDP), wrap(..., replicate=group) shares the work."
    ]


def copies_along_a_dim(plan: Plan) -> list[str]:
    """Suggest to share matrices that lie on all mesh dims but one, where that makes the busiest rank's load smaller.

    Under FSDP2 on tensor parallelism these are the weights that the latter does not cut: the ranks of its dim hold
    equal copies, of which DTensors do not tell.
    """
    step = plan.owned
    meshes = {t.name: p.device_mesh for t in step.tasks if isinstance(p := plan.bound[t.name].param, DTensor)}
    whole = max(meshes.values(), key=lambda mesh: mesh.ndim, default=None)
    if whole is None or not whole.mesh_dim_names:
        return []
    found: dict[str, list[Task]] = defaultdict(list)
    for task in step.tasks:
        own = meshes[task.name].mesh_dim_names or () if task.name in meshes else ()
        lacking = [name for name in whole.mesh_dim_names if name not in own]
        if own and len(lacking) == 1 and set(task.layout.grid.members()) < set(whole.mesh.flatten().tolist()):
            found[lacking[0]].append(task)
    sentences = []
    for dim, tasks in found.items():
        now, shared = busiest(step, tasks[0].layout.grid), busiest_of(step, whole.size())
        if shared < now:
            count = plural(len(tasks), "matrix lies", "matrices lie")
            sentences.append(
                f"{count} on no mesh dim {dim!r}, so that its ranks repeat each other's work. If they hold equal "
                f"copies, wrap(..., replicate=mesh[{dim!r}]) shares it: the busiest rank computes "
                f"{format_flops(shared)} then instead of {format_flops(now)}."
            )
    return sentences


def busiest(step: Step, grid: Grid) -> int:
    """The FLOPs of the busiest rank of a grid, by the plan."""
    total = dict.fromkeys(grid.members(), 0)
    for task in step.tasks:
        for rank in task.ranks:
            if rank in total:
                total[rank] += step.placed_of(task).flops
    return max(total.values())


def busiest_of(step: Step, ranks: int) -> float:
    """The FLOPs of the busiest of so many ranks, if they share all matrices that have an owner."""
    jobs = [Job(t.name, t.index, step.placed_of(t).flops, 1) for t in step.tasks if t.owner is not None]
    every = sum(step.placed_of(task).flops for task in step.tasks if task.owner is None)
    return every + makespan(loads(jobs, LptSwap()(jobs, 1, ranks, {}), 1, ranks))
