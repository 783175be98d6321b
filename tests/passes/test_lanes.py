"""Which batches of a micro-group compute side by side on a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_compile.analysis.lanes import MOST_LANES, WORTH, BatchTime, batch_time, divided, saved
from canzona_compile.analysis.roofline import GraphTime
from canzona_compile.machine.hardware import hardware_of
from tests.passes.test_stack_prices import CPU, CUDA, product

HARDWARE = hardware_of(CUDA)

milliseconds = st.floats(1e-4, 1e-2)
times = st.builds(lambda alone, share: BatchTime(alone, alone * share), milliseconds, st.floats(0, 1))


@given(st.lists(times, max_size=12))
def test_lanes_save_what_they_cost_or_are_not_taken(batches: list[BatchTime]) -> None:
    found = divided(batches, HARDWARE)
    gained = saved(batches, found, HARDWARE)
    alone, full = sum(time.alone for time in batches), sum(time.full for time in batches)
    assert len(found) == len(batches)
    if not any(found):
        assert gained == 0
        return
    lanes = set(found)
    ends = [sum(t.alone for t, n in zip(batches, found, strict=True) if n == lane) for lane in lanes]
    assert lanes == set(range(min(MOST_LANES, len(batches))))
    assert WORTH * alone < gained <= alone - max(*ends, full)
    assert found[max(range(len(batches)), key=lambda i: batches[i].alone)] == 0


def test_batches_that_fill_the_gpu_have_one_lane() -> None:
    busy = [BatchTime(1.0, 1.0)] * 4
    assert divided(busy, HARDWARE) == [0] * 4
    assert divided([], HARDWARE) == []


@pytest.mark.parametrize(("count", "lanes"), [(1, (1, 0)), (2, (1, 0)), (64, (0, 0))])
def test_few_matrices_of_a_layer_leave_processors_idle_and_many_do_not(count: int, lanes: tuple[int, ...]) -> None:
    graphs = [GraphTime(0.0, 0, works=tuple(product(size, HARDWARE) for _ in range(15))) for size in (1024, 2048)]
    seconds = [sum(work.lasts(HARDWARE) for work in graph.works) for graph in graphs]
    batches = [GraphTime(s, 0, works=graph.works) for s, graph in zip(seconds, graphs, strict=True)]
    found = divided([batch_time(own, count, True, HARDWARE) for own in batches], HARDWARE)
    assert tuple(found) == lanes


def test_what_has_the_processors_of_a_cpu_or_is_no_product_of_ours_gains_nothing() -> None:
    for own, hardware in ((True, hardware_of(CPU)), (False, HARDWARE)):
        compute = GraphTime(1.0, 0, works=(product(256, hardware, own),))
        assert batch_time(compute, 2, True, hardware) == BatchTime(2.0, 2.0)
