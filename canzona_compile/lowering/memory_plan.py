"""Plan the memory of rank programs: the slot of each buffer, its offset and alignment, and the size of each slot.

A rank program addresses all of its buffers as views of *slots*, each a piece of memory of its own. Two stages decide:

- `plan_buffers` gives the buffers of a scheduled step slots by their lives in the schedule, as a linear-scan register
  allocator gives registers. It asks no rank, so all ranks number their slots alike.
- `RankMemory` lays out one rank's buffers while its program is written, and adds up the bytes of every slot.
  `ExchangeBuffers` says where the pieces of one exchange lie in that rank's send and receive buffers.

The runtime allocates slots of these sizes (`Program.slots`) and decides nothing about what lies in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from canzona_compile.ir.layout import Box, Shape
from canzona_compile.ir.program import View
from canzona_compile.ir.step import Act, BlockSlice, Buffer, BufferUse, Event, Exchange, MicroGroup, Phase, Step

# In bytes. Whole matrices and prepared values are aligned for vector loads of any width. The allocators of torch align
# slots at least as much. The pieces of send and receive buffers are aligned to their element size: see `Exchange`.
ALIGNMENT = 64


def aligned(offset: int) -> int:
    """Round a byte offset up to a multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


# -- slots, the same on all ranks ------------------------------------------------------------------


def plan_buffers(step: Step, events: Sequence[Event], apart: bool) -> tuple[Buffer, ...]:
    """The buffers of a step, with slots.

    Args:
        step: a step of form BATCHED or later.
        events: the schedule of its micro-groups.
        apart: whether one stream copies to and from buffers while another one computes.

    Returns:
        The buffers in order of their first use. Two buffers that are in use at the same event never share a slot.
    """
    return tuple(assign_slots(lives(step, events, apart)))


def lives(step: Step, events: Sequence[Event], apart: bool) -> Iterator[Buffer]:
    """Every buffer of a step, with the first event that writes it and the last event that reads it, without a slot.

    Computed values may be views of gathered values. If apply uses them (for tasks without a scatter, or as new
    resident state), the gathered values live until apply. If one stream unpacks the next micro-group while another one
    computes this one (`apart`), the gathered values of both live at the same time.
    """
    at = {event: i for i, event in enumerate(events)}
    following = dict(successors(step, events)) if apart else {}

    def life(group: MicroGroup, phase: Phase, use: BufferUse, first: Act, last: Act) -> Buffer:
        return Buffer(group.index, phase, use, at[Event(first, group.index)], at[Event(last, group.index)], -1)

    resident = {p.name for p in step.placed if p.resident}
    for group in step.micro_groups:
        tasks = [step.task(name) for name in group.tasks]
        late = not group.scatter or any(t.owner is None or t.placed in resident for t in tasks)
        if group.gather:
            yield life(group, Phase.GATHER, BufferUse.SEND, Act.PREPARE, Act.WAIT_GATHER)
            yield life(group, Phase.GATHER, BufferUse.RECEIVE, Act.START_GATHER, Act.COMPUTE)
            last = Act.APPLY if late else Act.COMPUTE
            gathered = life(group, Phase.GATHER, BufferUse.GATHERED, Act.COMPUTE, last)
            after = at[Event(Act.COMPUTE, following.get(group.index, group.index))]
            yield replace(gathered, last=max(gathered.last, after))
        if group.scatter:
            yield life(group, Phase.SCATTER, BufferUse.SEND, Act.COMPUTE, Act.WAIT_SCATTER)
            last = Act.START_EXCHANGE if group.exchange else Act.APPLY
            yield life(group, Phase.SCATTER, BufferUse.RECEIVE, Act.START_SCATTER, last)
        if group.exchange:
            first = Act.START_EXCHANGE if group.scatter else Act.COMPUTE
            yield life(group, Phase.EXCHANGE, BufferUse.SEND, first, Act.WAIT_EXCHANGE)
            yield life(group, Phase.EXCHANGE, BufferUse.RECEIVE, Act.START_EXCHANGE, Act.APPLY)


def successors(step: Step, events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Pairs of indices of micro-groups that the same ranks compute one directly after the other."""
    grids = {group.index: step.task(group.tasks[0]).layout.grid for group in step.micro_groups}
    order = [event.micro_group for event in events if event.act is Act.COMPUTE]
    for grid in dict.fromkeys(grids.values()):
        yield from pairwise(index for index in order if grids[index] == grid)


def assign_slots(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """Give every buffer, in order of first use, the lowest slot that is free for its whole life."""
    ordered = sorted(buffers, key=lambda b: (b.first, b.micro_group, b.title))
    slots = lowest_free([(b.first, b.last) for b in ordered])
    return (replace(buffer, slot=slot) for buffer, slot in zip(ordered, slots, strict=True))


def prepared_slots(step: Step) -> dict[int, int]:
    """For each micro-group, by index, the slot for the values that prepare leaves to compute and apply.

    These slots come after those of the buffers.
    """
    first = 1 + max((b.slot for b in step.buffers), default=-1)
    at = {event: i for i, event in enumerate(step.schedule)}
    ordered = sorted(
        (at[Event(Act.PREPARE, g.index)], at[Event(Act.APPLY, g.index)], g.index) for g in step.micro_groups
    )
    slots = lowest_free([(start, end) for start, end, _ in ordered])
    return {group: first + slot for (*_, group), slot in zip(ordered, slots, strict=True)}


def lowest_free(spans: Sequence[tuple[int, int]]) -> list[int]:
    """The lowest slot of each span, such that spans which overlap have different slots.

    Args:
        spans: (first, last) positions of events, both included, sorted by `first`.
    """
    busy_until: list[int] = []
    slots = []
    for first, last in spans:
        slot = next((i for i, end in enumerate(busy_until) if end < first), len(busy_until))
        busy_until[slot : slot + 1] = [last]
        slots.append(slot)
    return slots


# -- offsets and sizes, on one rank ------------------------------------------------------------------


class ExchangeBuffers:
    """Says where the pieces of one exchange lie in a rank's send and receive buffers.

    A buffer holds one block per rank of the process group, in the order of the process group and without gaps.

    Args:
        exchange: an exchange of one micro-group.
        at: (replica, shard) coordinate of the rank.
        peers: coordinates of the ranks of its process group, including the rank itself.
    """

    def __init__(self, exchange: Exchange, at: tuple[int, int], peers: Sequence[tuple[int, int]]) -> None:
        self._blocks: dict[BufferUse, list[tuple[tuple[BlockSlice, ...], int]]] = {
            BufferUse.SEND: [exchange.block(at, peer) for peer in peers],
            BufferUse.RECEIVE: [exchange.block(peer, at) for peer in peers],
        }
        self._places: dict[BufferUse, dict[tuple[str, str], list[tuple[int, Box]]]] = {}
        for use, blocks in self._blocks.items():
            places = self._places.setdefault(use, {})
            start = 0
            for pieces, size in blocks:
                for piece in pieces:
                    places.setdefault((piece.task, piece.wire.name), []).append((start + piece.offset, piece.box))
                start += size

    def byte_counts(self, use: BufferUse) -> tuple[int, ...]:
        """The size of the block of each peer in bytes, in the order of the peers."""
        return tuple(size for _, size in self._blocks[use])

    def places(self, use: BufferUse, task: str, wire: str) -> list[tuple[int, Box]]:
        """All pieces of a task's wire: byte offsets in the buffer, and boxes in the whole value."""
        return self._places[use].get((task, wire), [])


class RankMemory:
    """Lays out the buffers of one rank's program.

    Args:
        step: a step of form SCHEDULED.
    """

    def __init__(self, step: Step) -> None:
        self._sizes: dict[int, int] = {}  # bytes, by slot
        self._count = 1 + max((b.slot for b in step.buffers), default=-1)
        self._slots = {(b.micro_group, b.phase, b.use): b.slot for b in step.buffers}
        self._prepared = prepared_slots(step)
        self._filled: dict[tuple[int, int], int] = {}  # bytes in use, by micro-group and slot

    def view(
        self, group: int, phase: Phase, use: BufferUse, offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> View:
        """A view of a send or receive buffer of a micro-group.

        Args:
            group: index of the micro-group.
            phase: the phase of the exchange.
            use: SEND or RECEIVE.
            offset: in bytes from the start of the buffer, see `ExchangeBuffers`.
            dtype: dtype of the view.
            shape: shape of the view.
        """
        return View(self._slots[group, phase, use], offset, dtype, tuple(shape))

    def exchange_buffer(self, group: int, phase: Phase, use: BufferUse, size: int) -> View:
        """A view of the whole send or receive buffer of a micro-group: uint8 [size]."""
        view = self.view(group, phase, use, 0, torch.uint8, (size,))
        self._reserve(view.slot, size)
        return view

    def gathered(self, group: int, dtype: torch.dtype, shape: Shape) -> View:
        """Reserve memory for the whole wire values [n, ...] of a batch, behind that of the micro-group's other ones."""
        return self._append(group, self._slots[group, Phase.GATHER, BufferUse.GATHERED], dtype, shape)

    def prepared(self, group: int, dtype: torch.dtype, shape: Shape) -> View:
        """Reserve memory for a fragment that prepare leaves to compute or apply, behind those of the micro-group."""
        return self._append(group, self._prepared[group], dtype, shape)

    def slot_sizes(self) -> tuple[int, ...]:
        """The size of every slot in bytes: that of the largest buffer that it ever holds."""
        return tuple(self._sizes.get(slot, 0) for slot in range(max((self._count, *(s + 1 for s in self._sizes)))))

    def _append(self, group: int, slot: int, dtype: torch.dtype, shape: Shape) -> View:
        view = View(slot, aligned(self._filled.get((group, slot), 0)), dtype, shape)
        self._filled[group, slot] = view.offset + math.prod(shape) * dtype.itemsize
        self._reserve(slot, self._filled[group, slot])
        return view

    def _reserve(self, slot: int, size: int) -> None:
        self._sizes[slot] = max(self._sizes.get(slot, 0), size)
