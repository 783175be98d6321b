"""Grouped kernels at work: one launch for all fragments of a stage, with a table that is uploaded when it changes."""

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

from canzona_compile.codegen.source import FLAT, PointwiseProgram, source
from canzona_compile.codegen.tables import Table, TableSegment, fits, roomy, segment_of
from canzona_compile.codegen.values import Spread
from canzona_compile.errors import CanzonaError

BLOCK = 2048  # elements; with eight warps every thread has eight, two vectors of float32
WARPS = 8
# Nothing is fused that ATen does not fuse, and functions of the library keep numbers below 2^-126, as nvcc's do.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False, "enable_reflect_ftz": False}

LaunchPart = tuple[tuple[Sequence[Tensor], ...], Sequence[float]]
Addresses = list[np.ndarray[Any, Any]]  # by part: [operands, entries]


@dataclass(frozen=True, eq=False, slots=True)
class Laid:
    """A table, and the addresses that it holds for one recording."""

    table: Table
    addresses: Addresses


def available() -> bool:
    """Is Triton installed?"""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def loaded(text: str) -> Any:
    """The kernel of a source text, which debuggers and Triton find under a file name made of its hash."""
    name = f"canzona_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    file = f"<{name}.py>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    module = ModuleType(name)
    module.__file__ = file
    exec(compile(text, file, "exec"), module.__dict__)
    return module.__dict__["kernel"]


class GroupedKernel(torch.nn.Module):
    """Several pointwise programs over lists of tensors, in one launch.

    Called with one `LaunchPart` per entry of `parts`: a list of tensors per operand of its program (tensors read before
    tensors written, entry i of all of them being one fragment), and the numbers that it reads. Steady calls compare
    addresses and numbers with those of the call before; the host never waits for the device.

    Args:
        title: first line of the source.
        programs: what can be run, each once.
        parts: which program each argument is for.
        names: for every part, what its numbers are called, for people.

    Attributes:
        launches: how often the kernel was launched.
        uploads: how often the table was sent to the device.
    """

    def __init__(self, title: str, programs: Sequence[PointwiseProgram], parts: Sequence[int]) -> None:
        super().__init__()
        self.title, self.programs, self.parts = title, tuple(programs), tuple(parts)
        self.launches = self.uploads = 0
        self._kernel: Any = None
        self.table: Table | None = None
        self._geometry: list[Any] = []
        self._addresses: Addresses = []
        self._unsent = False
        self._numbers: list[tuple[float, ...]] = []
        self._on_device: tuple[Tensor, Tensor] | None = None
        self._device = torch.device("cpu")

    @property
    def source(self) -> str:
        """What runs; before the first call, as if every operand were contiguous and aligned."""
        branches = [(i, FLAT) for i in range(len(self.programs))] if self.table is None else self.table.branches
        return source(self.title, self.programs, branches)

    def print_readable(self, print_output: bool = True, **_: Any) -> str:
        """The source, as `torch.fx.GraphModule.print_readable`."""
        text = self.source
        if print_output:
            print(text)
        return text

    def laid(self) -> Laid:
        """Where everything lies, as the last `refresh` was given it."""
        assert self.table is not None
        return Laid(self.table, self._addresses)

    def resume(self, laid: Laid, numbers: Sequence[Sequence[float]]) -> bool:
        """Have the table say again what it said once, with other numbers, for a recording of that launch.

        False if it has been made anew since then: what was recorded reads memory that is gone.
        """
        if self.table is not laid.table:
            return False
        self._write(laid.addresses, [tuple(map(float, own)) for own in numbers])
        return True

    def flush(self) -> None:
        """Send the table, if it was written while a CUDA graph was recorded, in which nothing can be sent."""
        if self._unsent:
            self._upload()

    def forward(self, *parts: LaunchPart) -> None:
        within, copied = self._within(parts)
        if self.refresh(within):
            self.launch()
        for target, value in copied:
            target.copy_(value)

    def _within(self, parts: Sequence[LaunchPart]) -> tuple[Sequence[LaunchPart], list[tuple[Tensor, Tensor]]]:
        """The parts, with contiguous copies of fragments that a row has no room for, and which go back where.

        Such are strided in more than four dims, as a slice of a weight of a 3-d convolution may be.
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

    def refresh(self, parts: Sequence[LaunchPart]) -> bool:
        """Have the table say where the operands lie; false if they have no elements.

        Raises:
            CanzonaError: if they do not fit their programs.
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
        """Run the kernel on what the last `refresh` was given."""
        assert self.table is not None
        assert self._on_device is not None
        if self._kernel is None:
            self._kernel = loaded(self.source)
        where = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with where, np.errstate(all="ignore"):  # the interpreter computes with numpy
            self._kernel[(self.table.blocks,)](*self._on_device, WIDTH=self.table.width, BLOCK=BLOCK, **OPTIONS)
        self.launches += 1

    def _write(self, addresses: Addresses, numbers: list[tuple[float, ...]]) -> None:
        """Change the table, and send it, where it says something else."""
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
        self.table = Table(self.programs, self.parts, segments, BLOCK)
        self._kernel = self._on_device = None
        if self._device.type == "cpu" and segments:
            interpreted(self.title)

    @property
    def _recording(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _upload(self) -> None:
        """Through pinned memory, which torch keeps until the copy is done; the host goes on at once."""
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
    """Raise CanzonaError unless kernels run in Triton's interpreter, which they must on CPU."""
    from canzona_compile.codegen.arithmetic import INTERPRETED

    if not INTERPRETED:
        raise CanzonaError("a generated kernel cannot run on CPU tensors", at=title, hint="set TRITON_INTERPRET=1")
