"""Tables of segments, which tell a kernel how its operands lie.

A segment is the fragment of one task in one program. All operands of a segment are viewed with the shape of the tensor
that is written. Dims that are contiguous in all operands are merged, so most segments are flat. Elements are counted in
the order in which the tensor that is written lies, or row by row where each block of a row has a scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from canzona_compile.codegen.source import HEADER, WORDS, KernelForm, PointwiseProgram
from canzona_compile.codegen.values import Spread
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Shape

MOST_DIMS = 4
LARGEST_INNER = 2**31 - 2**16  # elements of an inner dim: kernels divide 32-bit integers within a block
MOST_TILES = 8  # seven eighths of the look-ups are saved; more would save little, and end less evenly
LEAST_BLOCKS = 16  # per multiprocessor: two rounds of as many blocks of eight warps as fit on one
VECTOR = 16  # for vector accesses, addresses must be multiples of 16 bytes, sizes and strides of 16 elements

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TableSegment:
    """One fragment in one program, without the addresses of its operands.

    Attributes:
        part: index of the launch part that the fragment belongs to.
        entry: index of the fragment in the lists of that part.
        sizes: sizes of the merged dims.
        strides: for each operand, its strides in the merged dims, in elements.
        form: which variant of the program's code the segment needs.
    """

    part: int
    entry: int
    sizes: Shape
    strides: tuple[Strides, ...]
    form: KernelForm


def segment_of(program: PointwiseProgram, part: int, entry: int, operands: Sequence[Tensor]) -> TableSegment | None:
    """Describe the operands of one fragment as a segment.

    Args:
        operands: tensors that are read, and then tensors that are written. `fits` must be true of them.

    Returns:
        The segment, or None if the fragment has no elements.
    """
    for operand, dtype in zip(operands, program.dtypes, strict=True):
        if operand.dtype != dtype:
            raise CanzonaError(f"an operand is {operand.dtype}, not {dtype}", at=program.name)
    shape = tuple(operands[-1].shape)
    if not math.prod(shape):
        return None
    sizes, merged = described(program, operands)
    full = [i for i, spread in enumerate(program.spreads) if spread is Spread.FULL]
    aligned = (
        math.prod(sizes) % VECTOR == 0
        and sizes[-1] % VECTOR == 0
        and all(merged[i][-1] == 1 and all(n % VECTOR == 0 for n in merged[i][:-1]) for i in full)
        and all(operands[i].data_ptr() % VECTOR == 0 for i in full)
    )
    return TableSegment(part, entry, sizes, tuple(merged), (len(sizes), aligned))


def described(program: PointwiseProgram, operands: Sequence[Tensor]) -> tuple[Shape, list[Strides]]:
    """The sizes of the merged dims, and the strides of every operand in them."""
    shape, spreads = tuple(operands[-1].shape), program.spreads

    def strides(operand: Tensor, spread: Spread) -> Strides:
        if spread is Spread.BLOCKS:  # which elements count, row by row
            return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return (0,) * len(shape) if spread is Spread.ONE else operand.expand(shape).stride()

    counted = spreads.index(Spread.BLOCKS) if Spread.BLOCKS in spreads else -1
    return merge(shape, list(map(strides, operands, spreads)), counted)


def roomy(written: Tensor) -> bool:
    """Whether a row has room for a fragment with any strides: few dims, and few elements."""
    return written.ndim <= MOST_DIMS and written.numel() <= LARGEST_INNER


def fits(program: PointwiseProgram, operands: Sequence[Tensor]) -> bool:
    """Whether a row has room for a fragment with the strides that its operands have."""
    if roomy(operands[-1]):
        return True
    sizes, _ = described(program, operands)
    return len(sizes) <= MOST_DIMS and all(n <= LARGEST_INNER for n in sizes[1:])


def merge(shape: Shape, strides: Sequence[Strides], counted: int = -1) -> tuple[Shape, list[Strides]]:
    """Merge dims that are contiguous in all operands.

    Args:
        shape: the shape of a fragment.
        strides: the strides of every operand, those of the tensor that is written last.
        counted: the operand in whose order elements are counted.

    Returns:
        The sizes of the merged dims and the strides of every operand in them. The dims are sorted by the strides of
        that operand, the smallest stride last.
    """
    order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[counted][d])
    sizes: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for d in order:
        joins = bool(sizes) and all(own[-1] == s[d] * shape[d] for own, s in zip(found, strides, strict=True))
        if joins:
            sizes[-1] *= shape[d]
        else:
            sizes.append(shape[d])
        for own, s in zip(found, strides, strict=True):
            if joins:
                own[-1] = s[d]
            else:
                own.append(s[d])
    if not sizes:
        return (1,), [(1,) for _ in strides]
    return tuple(sizes), [tuple(own) for own in found]


def tiles_per_block(tiles: int, processors: int) -> int:
    """Choose how many tiles a block computes: a power of two, more of them the more work there is.

    A block waits for three loads that depend on one another before its first element arrives: which segment it is of,
    where that lies, the element. Further tiles save the first two. But a processor has room for several blocks, which
    hide one another's waiting, so there have to be enough of them.
    """
    found = 1
    while found < MOST_TILES and tiles >= 2 * found * LEAST_BLOCKS * processors:
        found *= 2
    return found


class SegmentTable:
    """The segments of one grouped kernel: a row of words per segment, and the segment of every block.

    It stays as it is while operands have the same strides and alignment. What may change from step to step, the
    addresses of the operands and the numbers, lies beside it.

    Args:
        block: elements per tile.
        processors: how many multiprocessors the device has.

    Attributes:
        branches: the branches of the kernel: index of a program, and form.
        rows: int64 [segments, width].
        operands: the most operands of a program. So many words hold the addresses of a segment.
        tiles: how many tiles a block computes at most, one after another; a block has tiles of one segment only.
        of_block: for each block, the row of its segment; int32 [blocks].
    """

    def __init__(
        self,
        programs: Sequence[PointwiseProgram],
        parts: Sequence[int],
        segments: Sequence[TableSegment],
        block: int,
        processors: int,
    ) -> None:
        self.segments = list(segments)
        self.branches = sorted({(parts[s.part], s.form) for s in segments}, key=lambda b: (b[0], not b[1][1], b[1][0]))
        self.width = max((p.width for p in programs), default=HEADER)
        self.rows: npt.NDArray[np.int64] = np.zeros((len(self.segments), self.width), np.int64)
        self.operands = max((len(p.dtypes) for p in programs), default=0)
        read = [len(programs[number].expressions.numbers) for number in parts]
        self.numbers = sum(read)
        starts = [sum(read[:part]) for part in range(len(parts))]
        self.tiles = tiles_per_block(sum(-(-math.prod(s.sizes) // block) for s in segments), processors)
        counts = []
        first = 0
        for row, segment in zip(self.rows, self.segments, strict=True):
            elements = math.prod(segment.sizes)
            row[:3] = self.branches.index((parts[segment.part], segment.form)), first, elements
            row[HEADER - len(segment.sizes) : HEADER - 1] = segment.sizes[1:]
            row[HEADER - 1] = starts[segment.part]
            for i, strides in enumerate(segment.strides):
                end = HEADER + WORDS * (i + 1)
                row[end - len(strides) : end] = strides
            counts.append(-(-elements // (block * self.tiles)))
            first += counts[-1]
        self.blocks = first
        self.of_block = np.repeat(np.arange(len(self.segments), dtype=np.int32), counts)
        places = np.array([s.part for s in self.segments], np.int64)
        self._rows_of = [np.flatnonzero(places == part) for part in range(len(parts))]
        self._entries = [np.array([s.entry for s in self.segments if s.part == p], np.int64) for p in range(len(parts))]

    def place(
        self, into: npt.NDArray[np.int64], part: int, operand: int, addresses: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        """Write the addresses of one list of tensors to the words of their segments.

        Args:
            into: the addresses of all segments, int64 [segments, operands].
        """
        into[self._rows_of[part], operand] = np.asarray(addresses, np.int64)[self._entries[part]]
