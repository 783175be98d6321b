"""The memory of programs is what `program_memory` predicts, by the stand-in's allocator."""

from __future__ import annotations

import pytest

from canzona_compile.ir.program import ScalarInput
from canzona_compile.runtime.device_scalars import with_device_numbers
from canzona_compile.runtime.program_memory import memory_of
from tests.fake_cuda.rank_programs import emitted_on, held_values
from tests.harness.marks import crossed

RECORDED = 2  # the number of the step that is recorded


@pytest.mark.parametrize(
    ("name", "grid", "graphs"),
    crossed(["muon", "soap", "shampoo"], [(1, 2), (2, 1), (2, 2), (1, 1)], [False, True], most=2),
    ids=str,
)
def test_values_hold_what_was_predicted(name: str, grid: tuple[int, int], graphs: bool) -> None:
    steps = emitted_on(grid, name, matrices=8, micro_groups=4)
    for rank, found in enumerate(held_values(steps, graphs)):
        program = steps[rank].program
        numbers = [n for n, value in program.inputs.items() if isinstance(value, ScalarInput)]
        predicted = memory_of(steps[rank], rank, with_device_numbers(program, numbers, ()) if graphs else None)
        most = sum(predicted.pool.values()) if graphs else predicted.values
        assert most > 0
        assert 0.95 * most <= found[RECORDED if graphs else 0] <= 1.05 * most
