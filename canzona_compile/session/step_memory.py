"""Predict the memory that the steps of a plan need on this rank, over all programs that were made so far.

Programs never run at the same time. They share their buffers, and their recordings share one pool; each has tables of
its own. While one program runs call by call, the recordings of the others stay, and so does the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from canzona_compile.runtime.program_memory import ProgramMemory, blocks, memory_of, runs_own_code
from canzona_compile.session.program_cache import BoundProgram, ProgramCache


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The bytes that steps need in addition to parameters, gradients and state.

    Attributes:
        buffers: of send, receive and gathered buffers, which stay between steps.
        tables: of tables of generated kernels and of numbers on the device, which stay.
        recordings: of the pool of all recordings, which keeps them as long as there is any.
        values: the most bytes of computed values of a program that runs call by call. It gives them back.
        gradients: of copies of gradients that recordings read, which stay. There are none before gradients have moved.
        most: the most bytes that are held at one time, first steps left aside.
        first_buffers: of the buffers of first steps, which gave them back. What the optimizer's own code takes there
            comes beside them.
    """

    buffers: int = 0
    tables: int = 0
    recordings: int = 0
    values: int = 0
    gradients: int = 0
    most: int = 0
    first_buffers: int = 0


def one_after_the_other(one: StepMemory, two: StepMemory) -> StepMemory:
    """The memory of two optimizers that step one after the other. What each keeps between steps is there twice."""
    kept = (one.buffers + one.tables + one.gradients, two.buffers + two.tables + two.gradients)
    return StepMemory(
        one.buffers + two.buffers,
        one.tables + two.tables,
        one.recordings + two.recordings,
        max(one.values, two.values),
        one.gradients + two.gradients,
        max(one.most + kept[1] + two.recordings, two.most + kept[0] + one.recordings),
        max(one.first_buffers, two.first_buffers),
    )


def step_memory(programs: ProgramCache, rank: int, first_buffers: int = 0) -> StepMemory:
    """Predict the memory of all programs of a cache on CUDA.

    A program that nothing keeps from being recorded counts as recorded once gradients have stayed where they are. What
    the optimizer's own code takes in a program is not counted, nor is scratch memory of libraries.

    Args:
        programs: the programs.
        rank: the global rank that they are for.
        first_buffers: the bytes of the buffers of first steps.

    Returns:
        The prediction. On other devices it has the buffers alone.
    """
    buffers = sum(map(blocks, programs.buffer_sizes))
    predicted = {p: memory_on_cuda(p, rank) for p in programs if p.executor.replay is not None}
    tables, gradients = sum(own.tables for own in predicted.values()), sum(map(blocks, programs.gradient_sizes))
    recordings = pool_of(predicted.values())
    beside = [recordings]
    for program, own in predicted.items():
        replay = program.executor.replay
        others = (m for p, m in predicted.items() if p is not program or (replay is not None and replay.wandered))
        beside.append(pool_of(others) + own.values)
    values = max((own.values for own in predicted.values()), default=0)
    most = buffers + tables + gradients + max(beside)
    return StepMemory(buffers, tables, recordings, values, gradients, most, first_buffers)


def memory_on_cuda(program: BoundProgram, rank: int) -> ProgramMemory:
    """Predict the memory of one program, none if the optimizer's own code runs in it."""
    if runs_own_code(program.step.program):
        return ProgramMemory(0, {}, 0)
    replay = program.executor.replay
    return memory_of(program.step, rank, None if replay is None else replay.recorded())


def pool_of(programs: Iterable[ProgramMemory]) -> int:
    """The bytes of the pool of the recordings of programs: of each stream, those of the program that takes most."""
    most: Counter[str] = Counter()
    for own in programs:
        most |= Counter(own.pool)
    return most.total()
