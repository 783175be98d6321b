"""What a report says beside the plan itself: fallbacks, counts, and what the user could change."""

from __future__ import annotations

import torch.distributed as dist

from canzona_compile.options import Options
from canzona_compile.report.schema import Facts, LocalTask, ProfileReport
from canzona_compile.session.plan import Plan
from canzona_compile.session.plan_execution import Running


def facts_of(running: Running, captures: int) -> Facts:
    """The facts of a plan at work."""
    plan, both = running.plan, running.plan.stagger
    kinds = {id(b.kind): b.kind for b in plan.bound.values()}
    reasons = {t.name: plan.bound[t.name].kind.template.interpreted for t in plan.owned.tasks}
    return Facts(
        world_size=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        captures=captures,
        local=tuple(
            LocalTask(b.task.name, b.task.shape, "elementwise: each rank updates its fragment")
            for b in plan.elementwise
        ),
        interpreted={name: why for name, why in reasons.items() if why},
        suggestions=(*suggestions(plan, running.options), *eager_cuts(running)),
        numerics=running.options.numerics,
        variants=sum(len(k.oracle.variants) for k in kinds.values() if k.oracle is not None),
        rank_programs=len(running.programs),
        buffer_bytes=running.buffer_bytes,
        execution="" if running.executor is None else running.executor.how,
        profile=ProfileReport(both.together, both.apart, running.options.stagger) if both.together else None,
    )


def eager_cuts(running: Running) -> list[str]:
    """Elementwise work that no kernel was generated for."""
    eager = running.last[0].program.eager if running.last is not None else {}
    return [
        f"Elementwise work of {name} runs operator by operator, without a kernel: {why}." for name, why in eager.items()
    ]


def suggestions(plan: Plan, options: Options) -> tuple[str, ...]:
    """What the user could change to share work that every rank repeats now."""
    if not (dist.is_available() and dist.is_initialized()) or options.replicate is not None:
        return ()
    alone = [t for t in plan.owned.tasks if t.layout.grid.size == 1 and t.layout.placements == "local"]
    if not alone or dist.get_world_size() == 1:
        return ()
    return (
        f"{len(alone)} matrices are plain tensors, computed on their rank alone. If ranks hold equal "
        "copies of them (DDP), wrap(..., replicate=group) shares the work.",
    )
