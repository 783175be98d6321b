"""Plan the memory of rank programs: the slot of each buffer, its offset and alignment, and the size of each slot.

A *slot* is a piece of memory. A rank program addresses its buffers as views of slots. There are two stages:

- `plan_buffers` assigns slots to the buffers of a step by their lives in the schedule, as a linear-scan allocator
  assigns registers. The result does not depend on the rank, so all ranks number their slots alike.
- `RankMemory` lays out the buffers of one rank while its program is written, and finds the size of each slot.
  `ExchangeBuffers` says where the pieces of one exchange lie in the rank's send and receive buffers.

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
from canzona_compile.ir.program_ops import MATRIX_ALIGNMENT
from canzona_compile.ir.step import Act, BlockSlice, Buffer, BufferUse, Event, Exchange, MicroGroup, Phase, Step

# `MATRIX_ALIGNMENT` suits vector loads of any width. Whole matrices and prepared values begin at multiples of it,
# because libraries choose their kernels by the alignment of operands: on some processors MKL rounds the product of a
# matrix that begins elsewhere otherwise. The allocators of torch align slots at least as much. `Exchange` aligns the
# pieces of send and receive buffers to their element size only: gaps would be sent, and there is nothing to gain.
# Pieces are rows, whole or in part. So where dims are multiples of 8 they begin at multiples of the 16 bytes that
# vector loads and NCCL need; where columns are multiples of 64, as in every matrix of Qwen3, at multiples of 128 bytes,
# however many rows a rank has. Where dims are odd, the rows inside of a piece begin anywhere.


def aligned(offset: int) -> int:
    """Round a byte offset up to a multiple of `MATRIX_ALIGNMENT`."""
    return -(-offset // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT


# -- slots, the same on all ranks ------------------------------------------------------------------


def plan_buffers(step: Step, events: Sequence[Event], apart: bool) -> tuple[Buffer, ...]:
    """Find the buffers of a step and assign slots to them.

    Returns:
        The buffers in order of their first use. Two buffers that are in use at the same event never share a slot.
    """
    return tuple(assign_slots(lives(step, events, apart)))


def lives(step: Step, events: Sequence[Event], apart: bool) -> Iterator[Buffer]:
    """Find the life of every buffer of a step: the first event that writes it and the last one that reads it.

    Computed values may be views of gathered values. Apply uses them for tasks without a scatter, and as new resident
    state. In these cases the gathered values live until apply.

    Args:
        apart: whether one stream unpacks the next micro-group while another one computes this one. Then the gathered
            values of both live at the same time.
    """
    at = {event: i for i, event in enumerate(events)}
    following = dict(successors(step, events)) if apart else {}

    def life(micro_group: MicroGroup, phase: Phase, use: BufferUse, first: Act, last: Act) -> Buffer:
        index = micro_group.index
        return Buffer(index, phase, use, at[Event(first, index)], at[Event(last, index)], -1)

    resident = {p.name for p in step.placed if p.resident}
    for own in step.micro_groups:
        tasks = [step.task(name) for name in own.tasks]
        late = not own.scatter or any(t.owner is None or t.placed in resident for t in tasks)
        if own.gather:
            yield life(own, Phase.GATHER, BufferUse.SEND, Act.PREPARE, Act.WAIT_GATHER)
            yield life(own, Phase.GATHER, BufferUse.RECEIVE, Act.START_GATHER, Act.COMPUTE)
            last = Act.APPLY if late else Act.COMPUTE
            gathered = life(own, Phase.GATHER, BufferUse.GATHERED, Act.COMPUTE, last)
            after = at[Event(Act.COMPUTE, following.get(own.index, own.index))]
            yield replace(gathered, last=max(gathered.last, after))
        if own.scatter:
            yield life(own, Phase.SCATTER, BufferUse.SEND, Act.COMPUTE, Act.WAIT_SCATTER)
            last = Act.START_EXCHANGE if own.exchange else Act.APPLY
            yield life(own, Phase.SCATTER, BufferUse.RECEIVE, Act.START_SCATTER, last)
        if own.exchange:
            first = Act.START_EXCHANGE if own.scatter else Act.COMPUTE
            yield life(own, Phase.EXCHANGE, BufferUse.SEND, first, Act.WAIT_EXCHANGE)
            yield life(own, Phase.EXCHANGE, BufferUse.RECEIVE, Act.START_EXCHANGE, Act.APPLY)


def successors(step: Step, events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Pairs of micro-groups, by index, that the same ranks compute directly one after the other."""
    grids = {g.index: step.grid_of(g) for g in step.micro_groups}
    order = [event.micro_group for event in events if event.act is Act.COMPUTE]
    for grid in dict.fromkeys(grids.values()):
        yield from pairwise(index for index in order if grids[index] == grid)


def assign_slots(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """Assign to each buffer, in order of first use, the lowest slot that is free for its whole life."""
    ordered = sorted(buffers, key=lambda b: (b.first, b.micro_group, b.title))
    slots = lowest_free([(b.first, b.last) for b in ordered])
    return (replace(buffer, slot=slot) for buffer, slot in zip(ordered, slots, strict=True))


def prepared_slots(step: Step) -> dict[int, int]:
    """Assign slots to the values that prepare leaves to compute and apply."""
    first = 1 + max((b.slot for b in step.buffers), default=-1)
    at = {event: i for i, event in enumerate(step.schedule)}
    ordered = sorted(
        (at[Event(Act.PREPARE, g.index)], at[Event(Act.APPLY, g.index)], g.index) for g in step.micro_groups
    )
    slots = lowest_free([(start, end) for start, end, _ in ordered])
    return {index: first + slot for (*_, index), slot in zip(ordered, slots, strict=True)}


def lowest_free(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Assign to each span the lowest slot that no overlapping span before it has."""
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
        peers: the coordinates of the ranks of its process group, including the rank itself.
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
        """The size in bytes of the block of each peer, in the order of the peers."""
        return tuple(size for _, size in self._blocks[use])

    def places(self, use: BufferUse, task: str, wire: str) -> list[tuple[int, Box]]:
        """Find all pieces of a wire in one of the buffers.

        Returns:
            For each piece its offset in the buffer, in bytes, and its box in the whole value.
        """
        return self._places[use].get((task, wire), [])


class RankMemory:
    """Lays out the buffers of one rank's program."""

    def __init__(self, step: Step) -> None:
        self._sizes: dict[int, int] = {}  # bytes, by slot
        self._count = 1 + max((b.slot for b in step.buffers), default=-1)
        self._slots = {(b.micro_group, b.phase, b.use): b.slot for b in step.buffers}
        self._prepared = prepared_slots(step)
        self._filled: dict[tuple[int, int], int] = {}  # bytes in use, by micro-group and slot

    def view(
        self, micro_group: int, phase: Phase, use: BufferUse, offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> View:
        """A view of a part of a send or receive buffer.

        Args:
            offset: in bytes from the start of the buffer; see `ExchangeBuffers`.
            dtype: the dtype of the view.
            shape: the shape of the view.
        """
        return View(self._slots[micro_group, phase, use], offset, dtype, tuple(shape))

    def exchange_buffer(self, micro_group: int, phase: Phase, use: BufferUse, size: int) -> View:
        """Reserve memory for a whole send or receive buffer.

        Args:
            size: in bytes.

        Returns:
            A view uint8 [size].
        """
        view = self.view(micro_group, phase, use, 0, torch.uint8, (size,))
        self._reserve(view.slot, size)
        return view

    def gathered(self, micro_group: int, dtype: torch.dtype, shape: Shape, one_by_one: bool) -> View:
        """Reserve memory for whole values of a wire, behind the whole values that the micro-group has so far.

        Args:
            dtype: the dtype of the wire.
            shape: [n, ...], for the n tasks of a batch.
            one_by_one: whether the tasks compute one after the other. Then each value begins at a multiple of
                `MATRIX_ALIGNMENT`, as a matrix of its own does. Otherwise there are no gaps between them.
        """
        slot = self._slots[micro_group, Phase.GATHER, BufferUse.GATHERED]
        return self._append(micro_group, slot, dtype, shape, one_by_one)

    def prepared(self, micro_group: int, dtype: torch.dtype, shape: Shape) -> View:
        """Reserve memory for fragments that prepare leaves to compute or apply, behind those so far.

        Args:
            dtype: the dtype of the fragments.
            shape: the shape to reserve.
        """
        return self._append(micro_group, self._prepared[micro_group], dtype, shape)

    def slot_sizes(self) -> tuple[int, ...]:
        """The size of each slot in bytes, which is that of the largest buffer that it ever holds."""
        return tuple(self._sizes.get(slot, 0) for slot in range(max((self._count, *(s + 1 for s in self._sizes)))))

    def _append(
        self, micro_group: int, slot: int, dtype: torch.dtype, shape: Shape, align_entries: bool = False
    ) -> View:
        """Reserve memory in a slot, behind what the micro-group has in it so far."""
        entry = math.prod(shape[1:]) * dtype.itemsize
        pitch = aligned(entry) if align_entries and entry % MATRIX_ALIGNMENT else None
        view = View(slot, aligned(self._filled.get((micro_group, slot), 0)), dtype, shape, pitch=pitch)
        self._filled[micro_group, slot] = view.offset + view.nbytes
        self._reserve(slot, self._filled[micro_group, slot])
        return view

    def _reserve(self, slot: int, size: int) -> None:
        """Make a slot at least so many bytes large."""
        self._sizes[slot] = max(self._sizes.get(slot, 0), size)
