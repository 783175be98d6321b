"""A cache of programs, keyed by the tasks and variants of a step. All of its programs share their memory."""

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

MOST_PROGRAMS = 32  # beyond this the least recently used one is dropped, and made anew when needed


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
        history: the record of all passes that made it.
    """

    executor: Executor
    step: Step
    history: PassHistory


class ProgramCache:
    """Programs by their keys. All of them share one set of slots, because only one runs at a time.

    Args:
        make: makes the program of a key, with buffers among the given slots.
    """

    def __init__(self, make: Callable[[ProgramKey, SharedSlots], BoundProgram]) -> None:
        self._make = make
        self._memory = SharedSlots()
        self._programs: OrderedDict[ProgramKey, BoundProgram] = OrderedDict()

    def get(self, key: ProgramKey) -> BoundProgram:
        """Return the program of a key; make it now if the cache does not hold it.

        The program becomes the most recently used one. If the cache holds more than `MOST_PROGRAMS` then, it drops
        the least recently used one.
        """
        program = self._programs.get(key)
        if program is None:
            program = self._make(key, self._memory)
            for other in self:
                other.executor.follow()
            self._programs[key] = program
            if len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return program

    def forget(self) -> None:
        """Drop all programs, their buffers and their recordings."""
        self._programs.clear()
        self._memory = SharedSlots()

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[BoundProgram]:
        """Iterate over the programs, the least recently used one first."""
        return iter(self._programs.values())

    @property
    def buffer_sizes(self) -> list[int]:
        """The bytes of each slot that programs share."""
        return self._memory.sizes
