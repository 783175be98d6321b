"""All steps in their order: what says the most comes first, and what may leave a machine in disorder last."""

from __future__ import annotations

from canzona_compile.tools.acceptance.step import AcceptanceStep
from canzona_compile.tools.acceptance.steps_audit import audit, last_audit
from canzona_compile.tools.acceptance.steps_layouts import first_layouts, other_layouts
from canzona_compile.tools.acceptance.steps_machine import checked_memory, gpu_tests, machine_works, measured
from canzona_compile.tools.acceptance.steps_zero1 import data_parallel


def all_steps(folder: str) -> list[AcceptanceStep]:
    """The steps of a whole run.

    Without the machine nothing works, and without `layouts` no number means anything. Then come cases that were found
    by reading to hang or to corrupt, then other layouts, then what takes long.

    Args:
        folder: for results of steps.
    """
    return [
        *machine_works(),
        *first_layouts(),
        *audit(),
        *other_layouts(),
        *data_parallel(),
        *gpu_tests(),
        *measured(folder),
        *checked_memory(),
        *last_audit(),
    ]
