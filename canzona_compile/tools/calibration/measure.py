"""What one rank measures by itself: products, factorizations, elementwise work, launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canzona_compile.analysis.flops import DECOMPOSITIONS
from canzona_compile.ir import program_ops
from canzona_compile.tools.calibration.clock import Clock, Work

aten = torch.ops.aten
Points = tuple[tuple[float, float], ...]  # of a curve: (size, rate)

LONGEST = 0.25  # seconds of a call after which no larger size is tried
BATCH = 16  # products in a call, as plans stack them
BATCH_ELEMENTS = 2**22  # of a batch's operand at most
ASPECT = 2  # of skinny operands: dims s / 2 and 4 s have the geometric mean s
ROWS = 512  # of matrices that are copied to the other order
SMALL = 128  # products up to this size take no more time than their call does
LIST = 32  # tensors
FACTORED = 8  # matrices in a stack, whose factorizations are one call


@dataclass(frozen=True, slots=True)
class MeasurementSizes:
    """How much is measured.

    Attributes:
        cold: bytes of other data that a rank goes through before a measurement, many times what a core's cache holds.
            Between two steps of an optimizer a model is at work, and leaves nothing of the first in the caches.
    """

    products: tuple[int, ...]
    factorizations: tuple[int, ...]
    transposed: tuple[int, ...]
    cold: int
    repetitions: int


def products(clock: Clock, dtype: torch.dtype, sizes: Sequence[int], cold: int) -> tuple[float, Points]:
    """Time square products, and skinny ones of the same number of FLOPs, one by one and in stacks.

    The products of a stack share one call; the rest of the time of a stack is arithmetic. The call is timed in a row of
    small products that find nothing in the caches, as those of a step do. On CUDA only single products are timed: a
    stack of small ones would fill a device that one of them leaves idle.

    Args:
        clock: of the device.
        sizes: ascending geometric means of the dims m, k and n; the measurement stops after a size that takes too long.
        cold: bytes to go through before the row of small products.

    Returns:
        Seconds of a call beside its arithmetic, and FLOP/s of the arithmetic by size.
    """
    stacks: dict[int, list[Stack]] = {}
    for size in sizes:
        stacks[size] = [Stack.of(dims, dtype, clock.device) for dims in dims_of(size)]
        for stack in stacks[size]:
            stack.time(clock)
        if max(stack.single for stack in stacks[size]) > LONGEST:
            break
    if clock.device.type == "cuda":
        points = {size: statistics.fmean(stack.single for stack in own) for size, own in stacks.items()}
        return 0.0, rates(points)
    small = [stack for size, own in stacks.items() if size <= max(SMALL, min(stacks)) for stack in own]
    warm = statistics.median(stack.single - stack.slope for stack in small)
    points = {size: statistics.fmean(stack.arithmetic(warm) for stack in own) for size, own in stacks.items()}
    row = clock.seconds(lambda: [stack.one() for stack in small], before=clearing(cold, clock.device))
    call = (row - sum(stack.arithmetic(warm) for stack in small)) / len(small)
    return max(0.0, call), rates(points)


def rates(seconds: Mapping[int, float]) -> Points:
    """FLOP/s of products by size."""
    return tuple((float(size), 2.0 * size**3 / taken) for size, taken in seconds.items())


def dims_of(size: int) -> list[tuple[int, int, int]]:
    """m, k and n of products whose dims have the geometric mean `size`: a square, and long ones of either kind."""
    short, long = max(1, size // ASPECT), size * ASPECT**2
    return [(size, size, size), (short, long, short), (short, short, long)]


@dataclass(slots=True)
class Stack:
    """Products of equal dims, with operands as Newton-Schulz has them.

    CPUs without instructions for 16 bits take up to ten times as long if the second factor is not transposed.

    Attributes:
        left: [count, m, k].
        right: [count, k, n], transposed in memory if it is tall, as in X X^T.
        single, whole: seconds of a call with the first product, and with all of them.
    """

    left: Tensor
    right: Tensor
    single: float = 0.0
    whole: float = 0.0

    @classmethod
    def of(cls, dims: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Stack:
        """A stack of random products with these m, k and n; one product on CUDA."""
        m, k, n = dims
        count = 1 if device.type == "cuda" else max(1, min(BATCH, BATCH_ELEMENTS // max(m * k, k * n, m * n)))
        left = torch.randn(count, m, k, device=device, dtype=dtype)
        right = torch.randn(count, n, k, device=device, dtype=dtype).transpose(1, 2)
        return cls(left, right if n < k else right.contiguous())

    def time(self, clock: Clock) -> None:
        """Measure `single` and `whole`; on CUDA as recorded steps multiply, without launches by the host."""
        if clock.device.type == "cuda":
            replay, calls, _ = clock.recorded(self.one)
            self.single = self.whole = clock.seconds(replay) / calls
            return
        self.single = self.whole = clock.seconds(self.one)
        if len(self.left) > 1:
            self.whole = clock.seconds(lambda: aten.bmm.default(self.left, self.right))

    def one(self) -> Tensor:
        """The first product."""
        return torch.mm(self.left[0], self.right[0])

    @property
    def slope(self) -> float:
        """Seconds by which one more product makes a call longer."""
        return max(0.0, self.whole - self.single) / max(1, len(self.left) - 1)

    def arithmetic(self, call: float) -> float:
        """Seconds of a product's arithmetic, where its call takes `call` seconds."""
        return max(self.whole - call, self.whole / 10) / len(self.left)


def clearing(size: int, device: torch.device) -> Work:
    """Work that fills the caches with `size` bytes of other data."""
    other = torch.zeros(size // 4, device=device)
    return lambda: other.add_(1.0)


def factorization(clock: Clock, operator: str, sizes: Sequence[int]) -> Points:
    """Time a factorization of symmetric float32 matrices.

    Args:
        clock: of the device.
        operator: "eigh" and "qr" take one matrix at a time, "eigh_batched" and "qr_batched" a stack in one call.

    Returns:
        FLOP/s by size, with FLOPs as the cost model counts them.
    """
    name = operator.removesuffix("_batched")
    run, count = getattr(torch.linalg, name), 1 if operator in ALONE else FACTORED

    def timed(size: int) -> tuple[float, float]:
        matrix = torch.randn(count, size, size, device=clock.device).squeeze(0)
        matrix = matrix + matrix.mT
        return count * float(DECOMPOSITIONS[name]) * size**3, clock.seconds(lambda: run(matrix))

    return curve(sizes, timed, LONGEST * count)


def curve(sizes: Sequence[int], timed: Callable[[int], tuple[float, float]], longest: float = LONGEST) -> Points:
    """Measure a rate by size, up to a size that takes longer than `longest` seconds.

    Args:
        timed: does the work of one size, and returns how much that is and how many seconds it took.
        longest: seconds.
    """
    points = []
    for size in sizes:
        amount, seconds = timed(size)
        points.append((float(size), amount / seconds))
        if seconds > longest:
            break
    return tuple(points)


ALONE = ("eigh", "qr")
STACKED = ("eigh_batched", "qr_batched")


def bandwidth(clock: Clock, cold: int) -> float:
    """Bytes per second of elementwise work on lists of fragments that no cache holds.

    The operators are those of prepare, apply and packing; a result is new memory where it is in a step.
    """
    moved = seconds = 0.0
    before = clearing(cold, clock.device)
    for count in (8, 64):
        for work, size in elementwise(cold // 4 // 8, count, clock.device):
            seconds += clock.seconds(work, before)
            moved += size
    return moved / seconds


def transposed(clock: Clock, sizes: Sequence[int]) -> Points:
    """Bytes per second, read and written, of copies of pairs of bfloat16 matrices to the other order, by size.

    A matrix has as many elements as a square one of `size`. It has few rows, and their number is a power of two, as in
    models: columns then compete for the same places in a cache.
    """

    def timed(size: int) -> tuple[float, float]:
        rows = min(size, ROWS)
        source = torch.zeros(2, size * size // rows, rows, device=clock.device, dtype=torch.bfloat16).transpose(1, 2)
        target = torch.zeros(source.shape, device=clock.device, dtype=torch.bfloat16)
        return 2 * target.nbytes, clock.seconds(lambda: target.copy_(source))

    return curve(sizes, timed)


def elementwise(elements: int, count: int, device: torch.device) -> Iterator[tuple[Work, int]]:
    """Elementwise work on `count` fragments of `elements` elements in all, and the bytes that it reads and writes."""

    def fragments(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.zeros(elements // count, device=device, dtype=dtype) for _ in range(count)]

    param, grad, state, low, sent = *(fragments() for _ in range(3)), *(fragments(torch.bfloat16) for _ in range(2))
    yield lambda: torch._foreach_lerp(state, grad, 0.05), 12 * elements
    yield lambda: torch._foreach_mul_(param, 1.0), 8 * elements
    yield lambda: torch._foreach_add_(param, low, alpha=0.5), 10 * elements
    yield lambda: program_ops.copy(state, grad), 8 * elements
    yield lambda: program_ops.copy(low, grad), 6 * elements
    yield lambda: program_ops.copy(sent, low), 4 * elements


def launch(clock: Clock, cold: int) -> float:
    """Seconds of an operator on next to no data, called as rank programs do: on lists, for each tensor once.

    On CPU the caches are cleared before, and views and operators on lists are measured as well: they too go through a
    list one by one.
    """
    many, others = ([torch.ones(4, 4, device=clock.device) for _ in range(LIST)] for _ in range(2))
    if clock.device.type == "cuda":
        return clock.seconds(lambda: [aten.lerp.Scalar(a, b, 0.5) for a, b in zip(many, others, strict=True)]) / LIST
    part = [(0, slice(0, 2), slice(0, 2))] * LIST
    calls: list[tuple[Work, int]] = [
        (lambda: [aten.mul.Tensor(a, b) for a, b in zip(many, others, strict=True)], 1),
        (lambda: [aten.permute.default(a, [1, 0]) for a in many], 1),
        (lambda: torch._foreach_lerp(many, others, 0.5), 1),
        (lambda: program_ops.copy(many, others), 1),
        (lambda: program_ops.parts(many, part), 1),
        (lambda: program_ops.each(aten.clamp.default, many, 0.5), 2),  # the loop counts as another operator
    ]
    before = clearing(cold, clock.device)
    return statistics.fmean(clock.seconds(work, before) / count / LIST for work, count in calls)
