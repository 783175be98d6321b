"""The programs of a plan: lowered, emitted for this rank, bound to memory, and kept for the steps that need them again.

They are kept by the tasks and variants of a step. All of them share their memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from canzona_compile.compat.telling import tell
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import Observer, PassHistory
from canzona_compile.ir.step import Step
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.executor import Executor, Sources
from canzona_compile.session.plan import emit, lower, taking
from canzona_compile.session.state import StateStore
from canzona_compile.session.variant_selection import Names, VariantAssignment

MOST_PROGRAMS = 32  # beyond this the least recently used one is dropped, and rebuilt when needed


class ProgramKey(NamedTuple):
    """What decides the program of a step.

    Attributes:
        tasks: names of the tasks that take part, in the plan's order.
    """

    tasks: Names
    assignment: VariantAssignment


@dataclass(frozen=True, eq=False, slots=True)
class BoundProgram:
    """A rank program that is ready to run.

    Attributes:
        executor: the program, bound to this rank's memory and tensors.
        step: the step that the program was emitted from, with the program.
    """

    executor: Executor
    step: Step
    history: PassHistory


class ProgramCache:
    """Programs by their keys. All of them share one set of slots, because only one runs at a time."""

    def __init__(self) -> None:
        self._memory = SharedSlots()
        self._programs: OrderedDict[ProgramKey, BoundProgram] = OrderedDict()

    def get(self, key: ProgramKey, make: Callable[[ProgramKey, SharedSlots], BoundProgram]) -> BoundProgram:
        """Return the program of a key; make it now if the cache does not hold it.

        The program becomes the most recently used one. If the cache holds more than `MOST_PROGRAMS` then, it drops
        the least recently used one.
        """
        program = self._programs.get(key)
        if program is None:
            program = make(key, self._memory)
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


class ProgramMaker:
    """Makes the programs of one plan on one rank.

    Args:
        store: the tensors of the plan's tasks on this rank; it tells which state is symmetric.
    """

    def __init__(self, options: Options, observers: Sequence[Observer], store: StateStore, sources: Sources) -> None:
        self.options, self.observers, self.store, self.sources = options, observers, store, sources
        self.plan, self.rank = store.plan, store.rank

    def of_variants(self, key: ProgramKey, memory: SharedSlots) -> BoundProgram:
        """Make the program of some tasks and the variants that their code takes."""
        made = self._make(taking(self.plan.owned, key.assignment), key.tasks, memory)
        return BoundProgram(made.executor, made.step, PassHistory((*self.plan.history.records, *made.history.records)))

    def of_first_steps(self, tasks: Names) -> BoundProgram:
        """Make the program in which some tasks take their first step, by the optimizer's own eager code.

        Its buffers are large and are not shared with other programs.
        """
        return self._make(self.plan.first, tasks, SharedSlots())

    def _make(self, owned: Step, tasks: Names, memory: SharedSlots) -> BoundProgram:
        tell(f"making the program of {len(tasks)} matrices")
        symmetric = self.store.symmetric() if owned.machine.device == "cuda" else frozenset[tuple[str, str]]()
        scheduled, history = lower(owned, tasks, self.options, self.observers, symmetric)
        emitted, last = emit(scheduled, self.rank, self.observers)
        executor = Executor(emitted.program, self.sources, memory, self.options.cuda_graphs)
        return BoundProgram(executor, emitted, PassHistory((*history.records, *last.records)))
