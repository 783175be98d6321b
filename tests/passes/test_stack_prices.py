"""What a stack of matrices alike saves on a GPU, by the rates of larger products."""

from __future__ import annotations

from itertools import pairwise

import pytest

from canzona_compile.analysis.roofline import GraphTime, NodeWork
from canzona_compile.analysis.step_time import SharedLaunches, rates_of
from canzona_compile.machine.hardware import Hardware, Machine, hardware_of

CUDA, CPU = Machine("cuda", "nccl", 1), Machine("cpu", "gloo", 1)


def product(size: int, hardware: Hardware, own: bool = True) -> NodeWork:
    """A square product of one matrix."""
    flops = 2.0 * size**3
    rate = hardware.product_rate("bfloat16", size)
    return NodeWork(flops / rate, 6 * size * size, 0, product="bfloat16", flops=flops, size=size, own=own)


@pytest.mark.parametrize("size", [256, 1024, 2048, 4096, 8192])
def test_a_stack_has_the_rate_of_a_larger_product_and_never_a_lower_one(size: int) -> None:
    hardware = hardware_of(CUDA)
    work = product(size, hardware)
    saved = [work.saves(count, hardware) for count in (1, 2, 4, 8, 64)]
    assert saved[0] == pytest.approx(0, abs=1e-12)
    assert all(0 <= a <= b + 1e-12 for a, b in pairwise(saved[:4]))
    larger = max(hardware.product_rate("bfloat16", 2 * size), hardware.product_rate("bfloat16", size))
    least = work.bytes / hardware.bandwidth
    assert work.lasts(hardware) - saved[3] == pytest.approx(max(work.flops / larger, least))


def test_a_stack_saves_nothing_on_a_cpu_or_of_products_that_loop() -> None:
    assert product(1024, hardware_of(CPU)).saves(8, hardware_of(CPU)) == 0
    assert product(1024, hardware_of(CUDA), own=False).saves(8, hardware_of(CUDA)) == 0


def test_micro_groups_that_keep_matrices_alike_together_are_shorter() -> None:
    hardware, rates = hardware_of(CUDA), rates_of(CUDA)
    works = tuple(product(1024, hardware) for _ in range(15))
    compute = GraphTime(sum(work.seconds for work in works), 0, works=works)
    stacked, looped = (SharedLaunches(0.0, compute, 0, hardware, stacks) for stacks in (True, False))
    assert stacked.uneven(8, rates) < 8 * stacked.uneven(1, rates)
    assert looped.uneven(8, rates) == pytest.approx(8 * looped.uneven(1, rates))
    assert SharedLaunches(0.0, compute, 0, hardware_of(CPU), True).uneven(8, rates) == 0
