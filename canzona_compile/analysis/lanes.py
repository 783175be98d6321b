"""Divide what a rank computes in one micro-group among streams of its GPU.

A product that is smaller than the GPU leaves processors idle. Products of another batch can have them if they run on
another stream. Where batches fill the GPU, streams gain nothing, and keep more intermediate values at once: so they
are taken only if they should save more than a twentieth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canzona_compile.analysis.roofline import GraphTime
from canzona_compile.ir.step import Batch
from canzona_compile.machine.hardware import Hardware

MOST_LANES = 4  # the stream of owners' work, and three more
WORTH = 0.05  # the share of the time that lanes have to save
FILLS = 1 << 60  # matrices of a stack that leaves no processor of any GPU idle
LAUNCHES = 3  # what a further lane costs: it waits, is launched by itself, and is waited for


@dataclass(frozen=True, slots=True)
class BatchTime:
    """The seconds of a batch's work.

    Attributes:
        alone: with the GPU for itself.
        full: beside so much other work that no processor is idle.
    """

    alone: float
    full: float


def batch_time(compute: GraphTime, count: int, stacked: bool, hardware: Hardware) -> BatchTime:
    """The time of a batch of `count` tasks."""
    alone = count * (compute.seconds - (compute.saves(count, hardware) if stacked else 0.0))
    return BatchTime(alone, count * (compute.seconds - compute.saves(FILLS, hardware)))


def saved(times: Sequence[BatchTime], numbers: Sequence[int], hardware: Hardware) -> float:
    """The seconds that batches in these lanes take less than one after the other."""
    ends = [0.0] * (1 + max(numbers, default=0))
    for time, number in zip(times, numbers, strict=True):
        ends[number] += time.alone
    if len(ends) == 1:
        return 0.0
    together = max(*ends, sum(time.full for time in times)) + LAUNCHES * hardware.launch * (len(ends) - 1)
    return sum(time.alone for time in times) - together


def divided(times: Sequence[BatchTime], hardware: Hardware) -> list[int]:
    """The lane of each batch, the longest first, each in the lane that ends first; all 0 if one lane is as good."""
    ends, numbers = [0.0] * min(MOST_LANES, len(times)), [0] * len(times)
    for i in sorted(range(len(times)), key=lambda i: -times[i].alone):
        numbers[i] = ends.index(min(ends))
        ends[numbers[i]] += times[i].alone
    worth = saved(times, numbers, hardware) > WORTH * sum(time.alone for time in times)
    return numbers if worth else [0] * len(times)


def batch_times(batches: Sequence[Batch], compute: Mapping[str, GraphTime], hardware: Hardware) -> list[BatchTime]:
    """The times of batches.

    Args:
        compute: what the compute graphs of cuts take, by their names.
    """
    return [batch_time(compute[b.placed], len(b.tasks), b.stacked, hardware) for b in batches]
