"""Make programs: lower some tasks of an owned step, emit this rank's program, and bind it to memory."""

from __future__ import annotations

from collections.abc import Sequence

from canzona_compile.ir.pipeline import Observer, PassHistory
from canzona_compile.ir.step import Step
from canzona_compile.options import Options
from canzona_compile.progress.telling import tell
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.executor import Executor, Sources
from canzona_compile.session.plan import Plan, emit, lower
from canzona_compile.session.program_cache import BoundProgram, ProgramKey
from canzona_compile.session.state import StateStore
from canzona_compile.session.variant_selection import Names


class ProgramMaker:
    """Makes the programs of one plan on one rank.

    Args:
        plan: the plan.
        options: the options of the wrapped optimizer.
        rank: this rank, global.
        observers: see every pass that runs; the list may grow later.
        store: the tensors of the tasks; it tells which state is symmetric.
        sources: what the inputs of programs are bound to.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        rank: int,
        observers: Sequence[Observer],
        store: StateStore,
        sources: Sources,
    ) -> None:
        self.plan, self.options, self.rank, self.observers = plan, options, rank, observers
        self.store, self.sources = store, sources

    def of_variants(self, key: ProgramKey, memory: SharedSlots) -> BoundProgram:
        """Make the program of some tasks and the variants that their code takes.

        Args:
            key: the tasks and their variants.
            memory: the slots from which the program takes its buffers.

        Returns:
            The program. Its history begins with the passes that made the plan.
        """
        made = self._make(self.plan.taking(key.lineup), key.tasks, memory)
        return BoundProgram(made.executor, made.step, PassHistory((*self.plan.history.records, *made.history.records)))

    def of_first_steps(self, tasks: Names) -> BoundProgram:
        """Make the program in which some tasks take their first step, by the optimizer's own eager code.

        Its buffers are large and are not shared with other programs.

        Args:
            tasks: the names of the tasks.
        """
        return self._make(self.plan.first, tasks, SharedSlots())

    def _make(self, owned: Step, tasks: Names, memory: SharedSlots) -> BoundProgram:
        tell(f"making the program of {len(tasks)} matrices")
        symmetric = self.store.symmetric() if owned.machine.device == "cuda" else frozenset[tuple[str, str]]()
        scheduled, history = lower(owned, tasks, self.options, self.observers, symmetric)
        emitted, last = emit(scheduled, self.rank, self.observers)
        executor = Executor(emitted.program, self.sources, memory, self.options.cuda_graphs)
        return BoundProgram(executor, emitted, PassHistory((*history.records, *last.records)))
