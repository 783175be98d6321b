"""Run grouped kernels: one launch for all fragments of a stage, whose addresses and numbers may change every step."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from canzona_compile.codegen.source import FLAT, PointwiseProgram, source
from canzona_compile.codegen.tables import SegmentTable, TableSegment, fits, roomy, segment_of
from canzona_compile.codegen.values import Spread
from canzona_compile.errors import CanzonaError
from canzona_compile.kernels.tensor_args import processors


class StepWords:
    """A list of int64 words on a device, and what it should hold.

    Everything that a launch reads and that may be different on the next step lies in such words: so a CUDA graph holds
    the address of the words, and neither the addresses nor the numbers in them.

    The copy is put on the current stream, after all work there that reads what the words held before. Its source is
    pinned memory that is taken anew for each copy: torch gives that memory to nobody else until the copy is done. So
    the host neither waits nor overwrites what a copy still reads.

    Args:
        device: the device that they lie on.

    Attributes:
        wanted: what the words should hold; int64 [count].
        memory: the words on the device; int64 [count].
        copied: how many bytes all copies sent.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.wanted: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.memory = torch.zeros(count, dtype=torch.int64, device=device)
        self.copies = self.copied = 0
        self._sent = self.wanted.copy()

    def changed(self, first: int = 0, last: int | None = None) -> tuple[int, int] | None:
        """Return the range of words [first, last) that hold something else than they should; None if there is none."""
        found = np.flatnonzero(self.wanted[first:last] != self._sent[first:last])
        return (first + int(found[0]), first + int(found[-1]) + 1) if found.size else None

    def send(self, first: int = 0, last: int | None = None) -> None:
        """Send the words that changed among those in [first, last), by one copy. The host does not wait."""
        changed = self.changed(first, last)
        if changed is None:
            return
        part = slice(*changed)
        source = torch.from_numpy(self.wanted[part])
        if self.memory.device.type == "cuda":
            source = source.pin_memory()
        self.memory[part].copy_(source, non_blocking=True)
        self._sent[part] = self.wanted[part]
        self.copies += 1
        self.copied += source.nbytes


def even(count: int) -> int:
    """Round a number of words up, so that what follows them begins at a multiple of 16 bytes, as Triton expects."""
    return count + count % 2


BLOCK = 2048  # elements of a tile; with eight warps every thread has eight, two vectors of float32
WARPS = 8
# The compiler must not fuse what ATen does not fuse. Library functions keep numbers below 2^-126, as with nvcc.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False, "enable_reflect_ftz": False}

LaunchPart = tuple[tuple[Sequence[Tensor], ...], Sequence[float]]


@dataclass(frozen=True, eq=False, slots=True)
class Laid:
    """A table, and the addresses of operands [segments, operands] for one recorded CUDA graph."""

    table: SegmentTable
    addresses: npt.NDArray[np.int64]


def available() -> bool:
    """Whether Triton is installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def loaded(text: str) -> Any:
    """Compile a source text and return its kernel.

    Debuggers and Triton find the source under a file name that is made of its hash.
    """
    name = f"canzona_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    file = f"<{name}.py>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    module = ModuleType(name)
    module.__file__ = file
    exec(compile(text, file, "exec"), module.__dict__)
    return module.__dict__["kernel"]


class GroupedKernel(torch.nn.Module):
    """Runs several pointwise programs over lists of tensors in one launch.

    The module takes one `LaunchPart` per entry of `parts`. A part has a list of tensors per operand of its program,
    and the numbers that the program reads. The lists of tensors that are read come before those that are written, and
    the i-th entries of all lists belong to one fragment. Addresses and numbers lie in `StepWords`, of which a call
    sends what differs from the call before it. The host never waits for the device.

    Attributes:
        uploads: how often the table was sent to the device.
        table: how the operands of the last call lie; None before the first one.
        words: addresses and numbers, those of this kernel alone or also those of others; None before the first call.
        odd: whether the last call worked on copies of fragments.
        writes: how often anything was written to its words; who wrote last may see that somebody did so since.
    """

    def __init__(self, title: str, programs: Sequence[PointwiseProgram], parts: Sequence[int]) -> None:
        super().__init__()
        self.title, self.programs, self.parts = title, tuple(programs), tuple(parts)
        self.launches = self.uploads = self.writes = 0
        self.odd = False
        self._kernel: Any = None
        self.table: SegmentTable | None = None
        self.words: StepWords | None = None
        self._geometry: list[Any] = []
        self._last: Any = None  # the addresses of the last call, if the words are to hold them
        self._ranges: list[tuple[int, int]] = []  # of the words
        self._numbers = np.zeros(0, np.int64)
        self._places = np.zeros((0, 0), np.int64)
        self._on_device: tuple[Tensor, ...] = ()  # blocks, rows, addresses and numbers
        self._device = torch.device("cpu")

    @property
    def source(self) -> str:
        """The source text of the kernel. Before the first call it assumes contiguous and aligned operands."""
        branches = [(i, FLAT) for i in range(len(self.programs))] if self.table is None else self.table.branches
        return source(self.title, self.programs, branches)

    def print_readable(self, print_output: bool = True, **_: Any) -> str:
        """Return the source, and print it if asked, as `torch.fx.GraphModule.print_readable` does."""
        text = self.source
        if print_output:
            print(text)
        return text

    @property
    def room(self) -> tuple[int, int]:
        """How many words the numbers and the addresses of the last call need."""
        assert self.table is not None
        return even(self.table.numbers), even(len(self.table.segments) * self.table.operands)

    def attach(self, words: StepWords, numbers: int, addresses: int) -> None:
        """Keep numbers and addresses in some words from now on, with what they are."""
        assert self.table is not None
        shape = len(self.table.segments), self.table.operands
        values = words.wanted[numbers : numbers + self.table.numbers]
        places = words.wanted[addresses : addresses + shape[0] * shape[1]].reshape(shape)
        if self.words is not None and self._places.shape == shape:
            values[:], places[:] = self._numbers, self._places
        self.words, self._numbers, self._places = words, values, places
        ends = numbers + self.room[0], addresses + self.room[1]
        on_device = words.memory[addresses : ends[1]], words.memory[numbers : ends[0]]
        self._on_device = (*self._on_device[:2], *on_device)
        # Side by side they need one copy.
        self._ranges = [(numbers, ends[1])] if ends[0] == addresses else [(numbers, ends[0]), (addresses, ends[1])]

    def laid(self) -> Laid:
        """The table and the addresses of the last `refresh`."""
        assert self.table is not None
        return Laid(self.table, self._places.copy())

    def resume(self, laid: Laid) -> bool:
        """Restore earlier addresses before a recorded launch is replayed. Nothing is sent yet.

        Returns:
            Whether that worked. It fails if the table was built again since then, because the recorded launch would
            read memory that is gone.
        """
        if self.table is not laid.table:
            return False
        self._last = None
        self.writes += 1
        self._places[:] = laid.addresses
        return True

    def place(self, part: int, operand: int, addresses: Sequence[int]) -> None:
        """Let the tensors of one list of a part be elsewhere. Nothing is sent yet."""
        assert self.table is not None
        self._last = None
        self.writes += 1
        self.table.place(self._places, part, operand, addresses)

    def number(self, values: Sequence[float]) -> None:
        """Let the numbers of all parts have these values. Nothing is sent yet."""
        self.writes += 1
        self._numbers[:] = np.array(values, np.float64).view(np.int64)

    def flush(self) -> None:
        """Send the addresses and numbers of the last call that are not on the device. Nothing is sent while a CUDA
        graph is recorded."""
        for own in self._ranges if self.words is not None else ():
            assert self.words is not None
            if self.words.changed(*own) and not self._recording:
                self.words.send(*own)

    def forward(self, *parts: LaunchPart) -> None:
        """Run the kernel on all parts. The results are written in place."""
        within, copied = self._within(parts)
        self.odd = within is not parts
        if self.refresh(within):
            self.launch()
        for target, value in copied:
            target.copy_(value)

    def _within(self, parts: Sequence[LaunchPart]) -> tuple[Sequence[LaunchPart], list[tuple[Tensor, Tensor]]]:
        """Replace the fragments for which a row has no room by contiguous copies.

        Such a fragment is strided in more than four dims, as a slice of a weight of a 3-d convolution may be, or is
        very large.

        Returns:
            The parts with the copies, and (target, copy) for each copy that must be copied back after the launch.
        """
        if all(roomy(written) for lists, _ in parts for written in lists[-1]):
            return parts, []
        made: list[LaunchPart] = []
        back: list[tuple[Tensor, Tensor]] = []
        for (lists, numbers), number in zip(parts, self.parts, strict=True):
            program = self.programs[number]
            odd = [e for e, operands in enumerate(zip(*lists, strict=True)) if not fits(program, operands)]
            if odd:
                shapes = {e: lists[-1][e].shape for e in odd}
                columns = tuple(list(own) for own in lists)
                lists = columns
                for i, (own, spread) in enumerate(zip(columns, program.spreads, strict=True)):  # scales lie in a row
                    for e, shape in shapes.items() if spread not in (Spread.ONE, Spread.BLOCKS) else ():
                        whole = own[e].expand(shape).contiguous()
                        if i >= program.reads and whole.data_ptr() != own[e].data_ptr():
                            back.append((own[e], whole))
                        own[e] = whole
            made.append((lists, numbers))
        return made, back

    def refresh(self, parts: Sequence[LaunchPart]) -> bool:
        """Send the addresses of the operands and the numbers that changed, and a new table if operands lie otherwise.

        Returns:
            Whether there is anything to launch: False if no operand has elements.
        """
        addresses = [[[t.data_ptr() for t in own] for own in lists] for lists, _ in parts]
        numbers = [float(value) for _, own in parts for value in own]
        geometry = [[(t.stride(), t.data_ptr() % 16) for t in own] for lists, _ in parts for own in lists]
        if self.table is None or geometry != self._geometry:
            self._build(parts)
            self._geometry, self._last = geometry, None
        assert self.table is not None
        if self._last != addresses:
            for part, lists in enumerate(addresses):
                for operand, own in enumerate(lists):
                    self.place(part, operand, own)
            self._last = addresses
        self.number(numbers)
        self.flush()
        return bool(self.table.blocks)

    def launch(self) -> None:
        """Launch the kernel on the operands of the last `refresh`."""
        table = self.table
        assert table is not None
        if self._kernel is None:
            self._kernel = loaded(self.source)
        where = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with where, np.errstate(all="ignore"):  # the interpreter computes with numpy
            self._kernel[(table.blocks,)](
                *self._on_device,
                tiles=table.tiles,
                WIDTH=table.width,
                OPERANDS=table.operands,
                BLOCK=BLOCK,
                **OPTIONS,
            )
        self.launches += 1

    def _build(self, parts: Sequence[LaunchPart]) -> None:
        if self._recording:
            raise RuntimeError(f"{self.title}: operands lie otherwise than on the step before")
        segments: list[TableSegment] = []
        for number, ((lists, _), program) in enumerate(zip(parts, self.parts, strict=True)):
            for entry, operands in enumerate(zip(*lists, strict=True)):
                self._device = operands[-1].device
                segment = segment_of(self.programs[program], number, entry, operands)
                if segment is not None:
                    segments.append(segment)
        count = processors(self._device)  # none on CPU, so that the interpreter's blocks have several tiles
        self.table = SegmentTable(self.programs, self.parts, segments, BLOCK, count)
        self._kernel = None
        if self._device.type == "cpu" and segments:
            interpreted(self.title)
        self._upload()

    @property
    def _recording(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _upload(self) -> None:
        """Send the table through pinned memory, which torch keeps until the copy is done. The host does not wait."""
        assert self.table is not None
        self.uploads += 1
        found = [torch.from_numpy(own) for own in (self.table.of_block, self.table.rows)]
        if self._device.type == "cuda":
            found = [own.pin_memory().to(self._device, non_blocking=True) for own in found]
        self._on_device = tuple(found)
        numbers, addresses = self.room
        self.words = None
        self.attach(StepWords(numbers + addresses, self._device), 0, numbers)


def interpreted(title: str) -> None:
    """Check that kernels run in Triton's interpreter, as they must on CPU."""
    from canzona_compile.codegen.arithmetic import INTERPRETED

    if not INTERPRETED:
        raise CanzonaError("a generated kernel cannot run on CPU tensors", at=title, hint="set TRITON_INTERPRET=1")
