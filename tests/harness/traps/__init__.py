"""Our own traps: optimizers, and edits between steps, that a wrapper has to follow bit for bit or refuse by name."""

from __future__ import annotations

from tests.harness.traps.asking import asking
from tests.harness.traps.attributes import attributes
from tests.harness.traps.calls import calls
from tests.harness.traps.counters import counters, late
from tests.harness.traps.gradients import gradients, missing
from tests.harness.traps.groups import others
from tests.harness.traps.habits import habits
from tests.harness.traps.harmless import harmless
from tests.harness.traps.later import later
from tests.harness.traps.modules import modules
from tests.harness.traps.sizes import sizes
from tests.harness.traps.standing import standing
from tests.harness.traps.states import aliases, states
from tests.harness.traps.surroundings import surroundings
from tests.harness.traps.swallowed import swallowed
from tests.harness.traps.trap import Trap

IN_ORDER = (
    *(standing, others, later, attributes, surroundings, counters, late, states, gradients, missing, modules, calls),
    *(harmless, aliases, swallowed, sizes, habits, asking),
)
TRAPS: tuple[Trap, ...] = tuple(trap for family in IN_ORDER for trap in family.traps)
FAMILIES = tuple(family.name for family in IN_ORDER)
NAMED = {trap.name: trap for trap in TRAPS}

assert len(NAMED) == len(TRAPS), "two traps have one name"
