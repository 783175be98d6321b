"""How many programs of a kernel fit on a multiprocessor at the same time, by what each of them takes of it.

Source: the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the occupancy calculator
of the toolkit for the units in which registers and shared memory are handed out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessorLimits:
    """What a multiprocessor has.

    Attributes:
        shared: bytes of shared memory for all programs.
        shared_program: bytes that one program may have.
        columns: of tensor memory; 0 where there is none.
        warps, programs: the most that may be there at once.
    """

    shared: int
    shared_program: int
    columns: int
    warps: int = 64
    programs: int = 32


LIMITS = {
    80: ProcessorLimits(164 << 10, 163 << 10, 0),
    90: ProcessorLimits(228 << 10, 227 << 10, 0),
    100: ProcessorLimits(228 << 10, 227 << 10, 512),
}
REGISTERS = 65536  # of a multiprocessor, a quarter for each of its four parts
PARTS = 4
REGISTER_UNIT = 256  # registers are handed out to a warp in these
SHARED_UNIT = 128
RESERVED = 1024  # bytes of shared memory that the system takes for every program


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many programs fit, and what keeps more from it: registers, shared memory, tensor memory or warps."""

    programs: int
    limit: str


def occupancy(arch: int, registers: int, threads: int, shared: int, columns: int = 0) -> Occupancy:
    """Count the programs that fit on a multiprocessor.

    Args:
        arch: ten times the compute capability's major number plus the minor one.
        registers: of a thread.
        threads: of a program, a multiple of 32.
        shared: bytes of shared memory of a program.
        columns: of tensor memory of a program.
    """
    limits, warps = LIMITS[arch], threads // 32
    of_warp = rounded(registers * 32, REGISTER_UNIT)
    fits = {
        "registers": REGISTERS // PARTS // of_warp * PARTS // warps,
        "shared memory": limits.shared // rounded(shared + RESERVED, SHARED_UNIT),
        "warps": min(limits.warps // warps, limits.programs),
    }
    if columns:
        fits["tensor memory"] = limits.columns // columns
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit], limit)


def rounded(amount: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-amount // unit) * unit
