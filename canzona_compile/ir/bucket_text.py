"""Print the buckets of a step: a line per bucket, short enough to read for hundreds of owners."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from canzona_compile.ir.bucket import Bucket


def show_buckets(buckets: Sequence[Bucket], dtypes: Sequence[str]) -> Iterator[str]:
    """Print buckets.

    The digest at the end of a line stands for all slices: names, elements, owners and positions.

    Args:
        buckets: those of a step, in order.
        dtypes: the short name of the dtype of each.
    """
    yield "buckets {"
    for bucket, dtype in zip(buckets, dtypes, strict=True):
        kind = "uniform" if bucket.uniform else "uneven"
        yield (
            f"  {bucket.index} {dtype} elements={bucket.elements} padding={bucket.padding} {kind} "
            f"shards {show_shards(bucket.lengths)} slices={digest(bucket)}"
        )
    yield "}"


def show_shards(lengths: Sequence[int]) -> str:
    """The shards that hold something, as owner:length. Consecutive owners with equal shards share an entry."""
    entries: list[str] = []
    first = 0
    for owner in range(1, len(lengths) + 1):
        if owner < len(lengths) and lengths[owner] == lengths[first]:
            continue
        owners = str(first) if owner == first + 1 else f"{first}-{owner - 1}"
        if lengths[first]:
            entries.append(f"{owners}:{lengths[first]}")
        first = owner
    return " ".join(entries)


def digest(bucket: Bucket) -> str:
    """A short hash of the slices of a bucket."""
    lines = (f"{p.name} {p.start} {p.length} {p.owner} {p.offset}\n" for p in bucket.slices)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
