"""Run grouped kernels: one launch for all fragments of a stage, with a table that is uploaded when it changes."""

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
import torch
from torch import Tensor

from canzona_compile.codegen.source import FLAT, HEADER, PointwiseProgram, source
from canzona_compile.codegen.tables import SegmentTable, TableSegment, fits, roomy, segment_of
from canzona_compile.codegen.values import Spread
from canzona_compile.errors import CanzonaError
from canzona_compile.kernels.tensor_args import processors

BLOCK = 2048  # elements of a tile; with eight warps every thread has eight, two vectors of float32
WARPS = 8
# The compiler must not fuse what ATen does not fuse. Library functions keep numbers below 2^-126, as with nvcc.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False, "enable_reflect_ftz": False}

LaunchPart = tuple[tuple[Sequence[Tensor], ...], Sequence[float]]
Addresses = list[np.ndarray[Any, Any]]  # for each part, int64 [operands, entries]


@dataclass(frozen=True, eq=False, slots=True)
class Laid:
    """A table, and the addresses that it holds for one recorded CUDA graph."""

    table: SegmentTable
    addresses: Addresses


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
    the i-th entries of all lists belong to one fragment. A call whose addresses and numbers are those of the call
    before it uploads nothing. The host never waits for the device.

    Args:
        title: the first line of the source.
        programs: the programs that the kernel can run, without duplicates.
        parts: for each argument of a call, the index of its program.

    Attributes:
        launches: how often the kernel was launched.
        uploads: how often the table was sent to the device.
    """

    def __init__(self, title: str, programs: Sequence[PointwiseProgram], parts: Sequence[int]) -> None:
        super().__init__()
        self.title, self.programs, self.parts = title, tuple(programs), tuple(parts)
        self.launches = self.uploads = 0
        self._kernel: Any = None
        self.table: SegmentTable | None = None
        self._geometry: list[Any] = []
        self._addresses: Addresses = []
        self._unsent = False
        self._numbers: list[tuple[float, ...]] = []
        self._on_device: tuple[Tensor, Tensor] | None = None
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

    def laid(self) -> Laid:
        """The table and the addresses of the last `refresh`."""
        assert self.table is not None
        return Laid(self.table, self._addresses)

    def resume(self, laid: Laid, numbers: Sequence[Sequence[float]]) -> bool:
        """Restore earlier addresses, with new numbers, before a recorded launch is replayed.

        Args:
            laid: the table and the addresses at the time of the recording.
            numbers: for each part, its numbers for this step.

        Returns:
            Whether that worked. It fails if the table was built again since then, because the recorded launch would
            read memory that is gone.
        """
        if self.table is not laid.table:
            return False
        self._write(laid.addresses, [tuple(map(float, own)) for own in numbers])
        return True

    def flush(self) -> None:
        """Upload the table if it changed while a CUDA graph was recorded. Nothing can be uploaded then."""
        if self._unsent:
            self._upload()

    def forward(self, *parts: LaunchPart) -> None:
        """Run the kernel on all parts. The results are written in place."""
        within, copied = self._within(parts)
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
                for i, (own, spread) in enumerate(zip(columns, program.spreads, strict=True)):
                    for e, shape in shapes.items() if spread is not Spread.ONE else ():
                        whole = own[e].expand(shape).contiguous()
                        if i >= program.reads and whole.data_ptr() != own[e].data_ptr():
                            back.append((own[e], whole))
                        own[e] = whole
            made.append((lists, numbers))
        return made, back

    def table_bytes(self, parts: Sequence[LaunchPart]) -> tuple[int, int]:
        """Bound the sizes of both tensors of the table, for operands that need not have any memory.

        Returns:
            The bytes of the rows, and of the row of each block, as if every tile had a block of its own.
        """
        sizes = [t.numel() for lists, _ in parts for t in lists[-1] if t.numel()]
        width = max((p.width for p in self.programs), default=HEADER)
        return len(sizes) * width * 8, sum(-(-size // BLOCK) for size in sizes) * 4

    def refresh(self, parts: Sequence[LaunchPart]) -> bool:
        """Write the addresses of the operands and the numbers into the table, and upload it if it changed.

        Returns:
            Whether there is anything to launch: False if no operand has elements.

        Raises:
            CanzonaError: the operands do not fit their programs.
        """
        addresses = [
            np.array([[t.data_ptr() for t in own] for own in lists], np.int64).reshape(len(lists), -1)
            for lists, _ in parts
        ]
        numbers = [tuple(map(float, own)) for _, own in parts]
        geometry = [[(t.stride(), t.data_ptr() % 16) for t in own] for lists, _ in parts for own in lists]
        if self.table is None or geometry != self._geometry:
            self._build(parts)
            self._geometry, self._addresses = geometry, []
        assert self.table is not None
        self._write(addresses, numbers)
        return bool(self.table.blocks)

    def launch(self) -> None:
        """Launch the kernel on the operands of the last `refresh`."""
        assert self.table is not None
        assert self._on_device is not None
        if self._kernel is None:
            self._kernel = loaded(self.source)
        where = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with where, np.errstate(all="ignore"):  # the interpreter computes with numpy
            self._kernel[(self.table.blocks,)](
                *self._on_device, tiles=self.table.tiles, WIDTH=self.table.width, BLOCK=BLOCK, **OPTIONS
            )
        self.launches += 1

    def _write(self, addresses: Addresses, numbers: list[tuple[float, ...]]) -> None:
        """Write addresses and numbers into the table and upload it, if they differ from those in it."""
        same = len(addresses) == len(self._addresses) and all(map(np.array_equal, addresses, self._addresses))
        if same and numbers == self._numbers and not self._unsent:
            return
        assert self.table is not None
        for part, (own, values) in enumerate(zip(addresses, numbers, strict=True)):
            self.table.fill(part, own, values)
        self._addresses, self._numbers = addresses, numbers
        self._upload()

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
        count = processors(self._device, interpreted=0)  # none, so that the interpreter's blocks have several tiles
        self.table = SegmentTable(self.programs, self.parts, segments, BLOCK, count)
        self._kernel = self._on_device = None
        if self._device.type == "cpu" and segments:
            interpreted(self.title)

    @property
    def _recording(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _upload(self) -> None:
        """Upload the table through pinned memory, which torch keeps until the copy is done. The host does not wait."""
        assert self.table is not None
        self._unsent = self._recording
        if self._unsent:
            return
        self.uploads += 1
        if self._device.type == "cpu":
            self._on_device = torch.from_numpy(self.table.of_block), torch.from_numpy(self.table.rows)
            return
        if self._on_device is None:
            blocks = torch.from_numpy(self.table.of_block).pin_memory().to(self._device, non_blocking=True)
            self._on_device = blocks, torch.empty(self.table.rows.shape, dtype=torch.int64, device=self._device)
        self._on_device[1].copy_(torch.from_numpy(self.table.rows).pin_memory(), non_blocking=True)


def interpreted(title: str) -> None:
    """Check that kernels run in Triton's interpreter, as they must on CPU.

    Args:
        title: the name of the kernel in the error.

    Raises:
        CanzonaError: the interpreter is off.
    """
    from canzona_compile.codegen.arithmetic import INTERPRETED

    if not INTERPRETED:
        raise CanzonaError("a generated kernel cannot run on CPU tensors", at=title, hint="set TRITON_INTERPRET=1")
