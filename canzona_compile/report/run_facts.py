"""The facts that a report adds to the plan: fallbacks, counts, and what the user could change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch.distributed as dist

from canzona_compile.report.schema import BufferMemory, Facts, LocalTask, ProfileReport
from canzona_compile.report.suggestions import suggestions
from canzona_compile.session.measuring import both_measured
from canzona_compile.session.program_cache import BoundProgram
from canzona_compile.session.session import Session


def facts_of(session: Session) -> Facts:
    """Collect the facts of the plan in use.

    Raises:
        CanzonaError: no step has run yet.
    """
    session.last()
    driver, options = session.driver, session.options
    assert driver is not None
    assert driver.last is not None
    plan, both = driver.plan, driver.plan.stagger
    why_local = f"elementwise: each rank updates {session.holds}"
    kinds = {id(b.kind): b.kind for b in plan.bound.values()}
    reasons = {t.name: plan.bound[t.name].kind.template.interpreted for t in plan.owned.tasks}
    return Facts(
        world_size=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        captures=session.capture.captures,
        local=tuple(LocalTask(b.task.name, b.task.shape, why_local) for b in plan.elementwise),
        fallbacks={name: why for name, why in reasons.items() if why},
        suggestions=(*(suggestions(plan, options) if session.may_move_owners else []), *eager_cuts(driver.last)),
        numerics=options.numerics,
        variants=sum(len(k.recorder.variants) for k in kinds.values() if k.recorder is not None),
        rank_programs=len(driver.programs),
        capacity=options.any_capacity,
        memory=BufferMemory(sum(driver.programs.buffer_sizes), driver.first_buffers),
        execution=driver.last.executor.how,
        profile=ProfileReport(both.together, both.apart, options.stagger) if both.together else None,
        measurement=session.measuring.found,
    )


def facts_of_all(sessions: Sequence[Session]) -> Facts:
    """Collect the facts of the plans of several optimizers that step one after the other.

    Raises:
        CanzonaError: one of them has not stepped yet.
    """
    every = [facts_of(session) for session in sessions]
    return replace(
        every[sessions.index(with_matrices(sessions))],
        captures=sum(own.captures for own in every),
        local=tuple(task for own in every for task in own.local),
        fallbacks={name: why for own in every for name, why in own.fallbacks.items()},
        suggestions=tuple(dict.fromkeys(said for own in every for said in own.suggestions)),
        variants=sum(own.variants for own in every),
        rank_programs=sum(own.rank_programs for own in every),
        memory=BufferMemory(sum(own.memory.buffers for own in every), max(own.memory.first_buffers for own in every)),
        measurement=reduce(both_measured, (own.measurement for own in every)),
    )


def with_matrices(sessions: Sequence[Session]) -> Session:
    """Find the first optimizer that has tasks which need an owner, or the first of all if none has.

    Raises:
        CanzonaError: one of them has not stepped yet.
    """
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
