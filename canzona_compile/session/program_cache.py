"""Programs by the tasks and variants that take part in a step: kept while they are used, on shared memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from canzona_compile.ir.pipeline import PassHistory
from canzona_compile.ir.step import Step
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.executor import Executor
from canzona_compile.session.variant_selection import Lineup, Names

MOST_PROGRAMS = 32  # the least recently used one is made anew when it is needed again


class ProgramKey(NamedTuple):
    """What decides the program of a step.

    Attributes:
        tasks: names of the tasks that take part, in the plan's order.
        lineup: the variants that their code takes.
    """

    tasks: Names
    lineup: Lineup


@dataclass(frozen=True, eq=False, slots=True)
class BoundProgram:
    """A rank program that is ready to run.

    Attributes:
        executor: the program, bound to this rank's memory and tensors.
        step: the step that the program was emitted from, with the program.
        history: of all passes that made it.
    """

    executor: Executor
    step: Step
    history: PassHistory


class ProgramCache:
    """Programs by their keys. All of them share one set of slots, since one runs at a time.

    Args:
        make: makes the program of a key, with buffers among the given slots.
    """

    def __init__(self, make: Callable[[ProgramKey, SharedSlots], BoundProgram]) -> None:
        self._make = make
        self._memory = SharedSlots()
        self._programs: OrderedDict[ProgramKey, BoundProgram] = OrderedDict()

    def get(self, key: ProgramKey) -> BoundProgram:
        """The program of a key, made now if it is not kept.

        The cache then holds it as the most recently used one, and gives up the least recently used one where it
        would hold more than `MOST_PROGRAMS`.
        """
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make(key, self._memory)
            if len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return program

    def forget(self) -> None:
        """Give up all programs and their buffers now, recordings included."""
        self._programs.clear()
        self._memory = SharedSlots()

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[BoundProgram]:
        """The programs, the least recently used one first."""
        return iter(self._programs.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the slots of all kept programs; a slot that several share counts once."""
        slots = {id(slot): slot.numel() for program in self for slot in program.executor.slots}
        return sum(slots.values())
