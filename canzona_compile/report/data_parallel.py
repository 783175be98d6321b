"""What ZeRO-1 moves and where it puts it: the buckets of a plan, as figures and as a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import RenderableType
from rich.text import Text

from canzona_compile.ir.bucket import Bucket
from canzona_compile.report.schema import BucketReport, DataParallelReport
from canzona_compile.report.sections import MOST_ROWS, columns
from canzona_compile.report.units import format_bytes, plural


def data_parallel_report(buckets: Sequence[Bucket]) -> DataParallelReport | None:
    """Work out the figures of the buckets of a step.

    Args:
        buckets: all buckets; their gradients travel in their own dtype.

    Returns:
        The figures; None if there are no buckets.
    """
    if not buckets:
        return None
    owners = len(buckets[0].lengths)
    found = tuple(
        BucketReport(
            b.index,
            str(b.dtype).removeprefix("torch."),
            len(b.names),
            b.elements,
            b.padding,
            b.uniform,
            b.lengths,
        )
        for b in buckets
    )
    moved = sum(b.starts[-1] * b.dtype.itemsize for b in buckets) * (owners - 1) // owners
    return DataParallelReport(owners, found, moved, 0, moved)


def bucket_table(report: DataParallelReport | None) -> list[RenderableType]:
    """Show what each bucket holds and how even its shards are; nothing without ZeRO-1."""
    if report is None:
        return []
    table = columns(">#", "dtype", ">parameters", ">size", ">padding", "shards", ">shortest", ">longest")
    for row in report.buckets[:MOST_ROWS]:
        size = itemsize(row.dtype)
        table.add_row(
            Text(str(row.index)),
            Text(row.dtype),
            Text(str(row.parameters)),
            Text(format_bytes(row.elements * size)),
            Text(f"{row.padding / max(1, row.elements):.1%}"),
            Text("equal" if row.uniform else "uneven"),
            Text(format_bytes(min(row.shards) * size)),
            Text(format_bytes(max(row.shards) * size)),
        )
    elements = sum(row.elements for row in report.buckets)
    padding = sum(row.padding for row in report.buckets)
    lines: list[RenderableType] = [table]
    if hidden := report.buckets[MOST_ROWS:]:
        lines.append(Text(f"and {len(hidden)} more", "dim"))
    lines.append(
        Text(
            f"each of {plural(report.owners, 'owner')} sends {format_bytes(report.backward_bytes)} in backward, "
            f"{report.step_bytes} B in the step, {format_bytes(report.forward_bytes)} after it; "
            f"padding {padding / max(1, elements):.1%}"
        )
    )
    return lines


def itemsize(dtype: str) -> int:
    """Bytes of an element of a dtype with this name."""
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize
