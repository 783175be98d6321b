"""Our own traps: optimizers, and edits between steps, that a wrapper has to follow bit for bit or refuse by name."""

from __future__ import annotations

from tests.harness.traps import (
    aliases,
    asking,
    attributes,
    calls,
    counters,
    gradients,
    groups,
    habits,
    harmless,
    harmless_edits,
    late_counters,
    later,
    missing,
    modules,
    places,
    sizes,
    standing,
    states,
    surroundings,
    swallowed,
)
from tests.harness.traps.trap import Trap

TRAPS: tuple[Trap, ...] = (
    *standing.TRAPS,
    *places.TRAPS,
    *groups.TRAPS,
    *later.TRAPS,
    *attributes.TRAPS,
    *surroundings.TRAPS,
    *counters.TRAPS,
    *late_counters.TRAPS,
    *states.TRAPS,
    *gradients.TRAPS,
    *missing.TRAPS,
    *modules.TRAPS,
    *calls.TRAPS,
    *harmless.TRAPS,
    *harmless_edits.TRAPS,
    *aliases.TRAPS,
    *swallowed.TRAPS,
    *sizes.TRAPS,
    *habits.TRAPS,
    *asking.TRAPS,
)
NAMED = {trap.name: trap for trap in TRAPS}
FAMILIES = tuple(dict.fromkeys(trap.family for trap in TRAPS))

assert len(NAMED) == len(TRAPS), "two traps have one name"
