"""What steps need beside parameters, gradients and state, in words that say what bounds it."""

from __future__ import annotations

from collections.abc import Sequence

from canzona_compile.report.schema import Figures
from canzona_compile.report.units import format_bytes, plural
from canzona_compile.session.step_memory import StepMemory


def memory_caption(memory: StepMemory) -> str:
    """Say the most that a step needs."""
    return f"a step needs at most {format_bytes(memory.most)} beside parameters, gradients and state"


def memory_sentences(report: Figures) -> Sequence[str]:
    """Say what that consists of, and what bounds it; nothing on devices for which nothing is predicted."""
    if report.machine.device != "cuda":
        return ()
    memory, programs = report.memory, plural(report.rank_programs, "program")
    sentences = (
        (
            memory.buffers,
            f"of buffers, which stay and serve {programs}: for {plural(report.depth, 'micro-group')} in flight, of "
            f"which each gathers at most {format_bytes(report.capacity)} to a rank, or one matrix",
        ),
        (
            memory.values,
            "of computed values, which are given back: of the program that takes most while it runs call by call",
        ),
        (memory.recordings, "that recordings keep: one pool, as large as the program needs that takes most"),
        (memory.tables, "of tables of kernels and of numbers, which stay"),
        (memory.first_buffers, "of buffers in a first step, which gave them back, beside what its own code took"),
    )
    return [f"{format_bytes(size)} {words}" for size, words in sentences if size]
