"""Which matrices a benchmark updates."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """A list of matrices, all of them sharded along dim 0 over all ranks, as `fully_shard` does."""

    name: str
    about: str
    shapes: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)


def one_per_shape(rows: range, columns: range) -> tuple[Shape, ...]:
    """One matrix of every combination; no two alike, not even transposed."""
    return tuple((m, n) for n in columns for m in rows)


def qwen_layer(hidden: int, intermediate: int, q: int, kv: int) -> tuple[Shape, ...]:
    """The seven matrices of a decoder layer: q, k, v, o, gate, up, down."""
    attention = ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q))
    return (*attention, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate))


CASES = {
    case.name: case
    for case in (
        Case(
            "even",
            "shards of equal size",
            ((1024, 1024), (1024, 1024), (1536, 1024), (1024, 1536)) * 2,
        ),
        Case("uneven", "odd dim 0", ((1023, 1024), (1025, 1024), (1537, 1024), (1021, 1536)) * 2),
        Case(
            "one-per-shape",
            "8 matrices, 8 shapes",
            one_per_shape(range(1024, 1217, 64), range(1280, 1409, 128)),
        ),
        Case("many-small", "128 matrices", ((64, 64), (128, 64), (64, 192), (192, 64)) * 32),
        Case("tall-wide", "aspect ratio 8", ((4096, 512), (512, 4096)) * 2),
    )
}

# Qwen3-32B has 64 layers, hidden 5120, intermediate 25600, q 64 x 128 wide, k and v 8 x 128.
QWEN = Case(
    "qwen3-32b/64",
    "Qwen3-32B's layout, every dim divided by 64",
    qwen_layer(hidden=80, intermediate=400, q=128, kv=16) * 64,
)
# The same tasks and templates with next to nothing to compute: what is left is the host's work.
QWEN_HOST = Case(
    "qwen3-32b/160",
    "the same layout, dims of 32 to 160: kernels cost next to nothing",
    qwen_layer(hidden=32, intermediate=160, q=64, kv=32) * 64,
)
