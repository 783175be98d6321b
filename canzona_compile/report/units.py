"""How counts and quantities read: one function per unit, for every text that people see."""

from __future__ import annotations

import math
from collections.abc import Sequence

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def format_flops(flops: float) -> str:
    """Two decimals and a decimal prefix: "1.23 GFLOP"."""
    size, prefix = prefixed(flops)
    return f"{flops / size:.{2 if prefix else 0}f} {prefix}FLOP"


def format_count(count: float) -> str:
    """Format a count with a decimal prefix: "440.4 M"."""
    size, prefix = prefixed(count)
    return f"{count / size:.4g} {prefix}".rstrip()


def prefixed(value: float) -> tuple[float, str]:
    """The largest decimal prefix that is not larger than a value, and what it stands for."""
    return next((unit for unit in PREFIXES if value >= unit[0]), (1.0, ""))


def format_bytes(count: float) -> str:
    """Four digits and a binary prefix: "1.5 MiB"."""
    power = min(len(BYTE_UNITS) - 1, int(math.log(count, 1024))) if count >= 1 else 0
    return f"{count / 1024**power:.4g} {BYTE_UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit, from nanoseconds up: "4.9 ms"."""
    size, unit = next((unit for unit in SECOND_UNITS if seconds >= unit[0]), SECOND_UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def format_bandwidth(bytes_per_second: float) -> str:
    """Decimal gigabytes, as data sheets count them: "350 GB/s"."""
    return f"{bytes_per_second / 1e9:g} GB/s"


def format_quantity(value: float, unit: str) -> str:
    """Format a quantity whose unit is "FLOP", "B" or "s"."""
    return {"FLOP": format_flops, "B": format_bytes, "s": format_seconds}[unit](value)


def format_shape(shape: Sequence[int]) -> str:
    """Format a tensor's shape: "64x32", or "scalar" if it has no dims."""
    return "x".join(map(str, shape)) or "scalar"


def format_dtype(dtype: str) -> str:
    """Shorten the name of a floating point dtype: "bf16" for "bfloat16", "f32" for "float32"."""
    return dtype.replace("bfloat", "bf").replace("float", "f")


def plural(count: int, one: str, many: str = "") -> str:
    """ "1 rank", "2 ranks": `many` is `one` with an s unless it is given."""
    return f"{count} {one if count == 1 else many or one + 's'}"
