"""What one rank measures by itself: products, factorizations, elementwise work, launches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canzona_compile import instructions
from canzona_compile.calibration.clock import Clock, Work
from canzona_compile.cost import DECOMPOSITIONS

aten = torch.ops.aten
Points = tuple[tuple[float, float], ...]  # of a curve: (size, rate)

LONGEST = 0.25  # seconds of a call after which no larger size is tried
BATCH = 16  # products in a call, as plans stack them
BATCH_ELEMENTS = 2**22  # of a batch's operand at most
ASPECT = 2  # of skinny operands: dims s / 2 and 4 s have the geometric mean s
ROWS = 512  # of matrices that are copied to the other order
SMALL = 128  # products up to this size take less time than their call does


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    Attributes:
        products, factorizations, transposed: sizes.
        cold: bytes of the fragments that elementwise work goes through, many times what a core's cache holds.
        repetitions: of each measurement.
    """

    products: tuple[int, ...]
    factorizations: tuple[int, ...]
    transposed: tuple[int, ...]
    cold: int
    repetitions: int


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products of one dtype: seconds of a call beside its arithmetic, and FLOP/s of that by size."""

    call: float
    points: Points


def products(clock: Clock, dtype: torch.dtype, sizes: Sequence[int]) -> Products:
    """Times square products and skinny ones of the same number of FLOPs, plain and with a transposed factor."""
    single, batched = {}, {}
    for size in sizes:
        found = [product_seconds(clock, dtype, dims) for dims in dims_of(size)]
        single[size] = statistics.fmean(alone for alone, _ in found)
        batched[size] = statistics.fmean(each for _, each in found)
        if single[size] > LONGEST:
            break
    small = [size for size in single if size <= SMALL] or [min(single)]
    call = max(0.0, statistics.median(single[s] - batched[s] for s in small))
    return Products(call, tuple((float(s), 2.0 * s**3 / batched[s]) for s in batched))


def dims_of(size: int) -> list[tuple[int, int, int]]:
    """m, k and n of products whose dims have the geometric mean `size`: a square, and long ones of either kind."""
    short, long = max(1, size // ASPECT), size * ASPECT**2
    return [(size, size, size), (short, long, short), (short, short, long)]


def product_seconds(clock: Clock, dtype: torch.dtype, dims: tuple[int, int, int]) -> tuple[float, float]:
    """Of a call with one product, and of each product where a call has many.

    On CUDA a call with one is both: many small ones would fill a device that one alone leaves idle.
    """
    m, k, n = dims
    count = max(1, min(BATCH, BATCH_ELEMENTS // max(m * k, k * n, m * n)))
    left = torch.randn(count, m, k, device=clock.device, dtype=dtype)
    right = torch.randn(count, n, k, device=clock.device, dtype=dtype).transpose(1, 2)
    first, second = left[0], right[0]
    alone = clock.seconds(lambda: aten.mm.default(first, second))
    if clock.device.type == "cuda" or count == 1:
        return alone, alone
    return alone, clock.seconds(lambda: aten.bmm.default(left, right)) / count


def factorization(clock: Clock, operator: str, sizes: Sequence[int]) -> Points:
    """FLOP/s of "eigh" or "qr" on symmetric float32 matrices, FLOPs as the cost model counts them."""
    run = {"eigh": torch.linalg.eigh, "qr": torch.linalg.qr}[operator]
    points = []
    for size in sizes:
        matrix = torch.randn(size, size, device=clock.device)
        matrix = matrix + matrix.T
        seconds = clock.seconds(lambda m=matrix: run(m))  # type: ignore[misc]
        points.append((float(size), float(DECOMPOSITIONS[operator]) * size**3 / seconds))
        if seconds > LONGEST:
            break
    return tuple(points)


def bandwidth(clock: Clock, cold: int) -> float:
    """Bytes per second of elementwise work on lists of fragments that no cache holds.

    The operators are those of prepare, apply and packing; results are new memory where they are so in a step.
    """
    moved = seconds = 0.0
    clearing = torch.zeros(cold // 4, device=clock.device)
    for count in (8, 64):
        for work, size in elementwise(cold // 4 // 8, count, clock.device):
            seconds += clock.seconds(work, before=lambda: clearing.add_(1.0))
            moved += size
    return moved / seconds


def transposed(clock: Clock, sizes: Sequence[int]) -> Points:
    """Bytes per second that are read and written when pairs of matrices are copied to the other order.

    A matrix is as large as a square one of `size`, with few rows whose number is a power of two, as in models: columns
    then compete for the same places in a cache.
    """
    points = []
    for size in sizes:
        rows = min(size, ROWS)
        source = torch.zeros(2, size * size // rows, rows, device=clock.device, dtype=torch.bfloat16).transpose(1, 2)
        target = torch.zeros(source.shape, device=clock.device, dtype=torch.bfloat16)
        seconds = clock.seconds(lambda t=target, s=source: t.copy_(s))  # type: ignore[misc]
        points.append((float(size), 2 * target.numel() * target.element_size() / seconds))
        if seconds > LONGEST:
            break
    return tuple(points)


def elementwise(elements: int, count: int, device: torch.device) -> Iterator[tuple[Work, int]]:
    """Work on `count` fragments of together so many elements, and the bytes that it reads and writes."""

    def fragments(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.zeros(elements // count, device=device, dtype=dtype) for _ in range(count)]

    param, grad, state, low, sent = *(fragments() for _ in range(3)), *(fragments(torch.bfloat16) for _ in range(2))
    yield lambda: torch._foreach_lerp(state, grad, 0.05), 12 * elements
    yield lambda: torch._foreach_mul_(param, 1.0), 8 * elements
    yield lambda: torch._foreach_add_(param, low, alpha=0.5), 10 * elements
    yield lambda: instructions.copy(state, grad), 8 * elements
    yield lambda: instructions.copy(low, grad), 6 * elements
    yield lambda: instructions.copy(sent, low), 4 * elements


def launch(clock: Clock) -> float:
    """Seconds of an operator on next to no data, in the ways in which rank programs call them."""
    one, two = torch.ones(4, 4, device=clock.device), torch.ones(4, 4, device=clock.device)
    many, others = [one.clone() for _ in range(32)], [two.clone() for _ in range(32)]
    calls: list[tuple[Work, int]] = [
        (lambda: aten.mul.Tensor(one, two), 1),
        (lambda: aten.lerp.Scalar(one, two, 0.5), 1),
        (lambda: aten.clamp.default(one, 0.5), 1),
        (lambda: aten._to_copy.default(one, dtype=torch.bfloat16), 1),
    ]
    if clock.device.type == "cpu":  # where views and lists go the same way, one by one
        calls += [
            (lambda: aten.permute.default(one, [1, 0]), 1),
            (lambda: instructions.parts(one, [(slice(0, 2), slice(0, 2))] * 32), 32),
            (lambda: torch._foreach_lerp(many, others, 0.5), 32),
            (lambda: instructions.copy(many, others), 32),
            (lambda: instructions.each(aten.mul.Tensor, many, 0.5), 2 * 32),
        ]
    return statistics.fmean(clock.seconds(work) / count for work, count in calls)
