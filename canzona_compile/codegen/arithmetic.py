"""The Triton functions that generated kernels call: memory access, and arithmetic with the bits of eager ATen on CUDA.

Only generated sources import this module (and `launch.interpreted`), so an installation without Triton never imports
it. Kernels are compiled with `enable_fp_fusion=False`, because the product of one ATen operator and the sum of another
one must not become one fused operation. Within one operator nvcc does fuse them; the functions here then call `fma`.

Tests run these kernels in Triton's interpreter. The interpreter truncates when it converts a float to bfloat16, and it
has neither fused operations nor CUDA's library functions. The branches of `INTERPRETED` compute these in other ways.
They follow ATen's CPU kernels where the CPU kernels differ from the CUDA kernels.

Each segment has a row of int64 words. The row holds the branch of the kernel, the segment's first program, the
number of elements, the sizes of the three inner dims, and the place of its first number. Four words per operand follow:
its strides, the innermost one last. What may change from step to step lies elsewhere: the addresses of the segment's
operands, one word each, and the numbers, each as the bits of a float64. A block can load addresses as soon as it knows
its segment, and a row at the same time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"
# ruff: noqa: SIM300 (DTYPE is a compile-time argument of the kernel and so in capitals; it is no constant)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

HEADER = tl.constexpr(7)
WORDS = tl.constexpr(4)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# -- operands --------------------------------------------------------------------------------------


@triton.jit
def inside(end, start, lanes, ALIGNED: tl.constexpr):
    """The mask of a tile's lanes that are elements of this block's part of the segment, which ends before `end`."""
    left = tl.minimum(end - start, lanes.shape[0]).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    return lanes < left


@triton.jit
def sizes(row, DIMS: tl.constexpr, ALIGNED: tl.constexpr):
    """The sizes of the segment's dims but the outermost one, the innermost first."""
    inner = 1
    middle = 1
    outer = 1
    if DIMS > 1:
        inner = tl.load(row + 5)
        if ALIGNED:  # said here, since what is said of an argument is lost when a function is inlined
            inner = tl.multiple_of(inner, 16)
    if DIMS > 2:
        middle = tl.load(row + 4)
    if DIMS > 3:
        outer = tl.load(row + 3)
    return inner, middle, outer


@triton.jit
def place(row, own, OPERAND: tl.constexpr, DTYPE: tl.constexpr, DIMS: tl.constexpr, ALIGNED: tl.constexpr):
    """The address of an operand, and the strides of its dims that are not known, the innermost first.

    A program loads this once, for all of its tiles. ALIGNED promises that the innermost stride is one, that the address
    is a multiple of 16 bytes, and that the innermost size and the outer strides are multiples of 16 elements. Memory
    can then be accessed in vectors.
    """
    at = row + (HEADER + OPERAND * WORDS)
    base = tl.load(own + OPERAND).to(tl.pointer_type(DTYPE))
    inner = 1
    second = 1
    third = 1
    outer = 1
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    else:
        inner = tl.load(at + 3)
    if DIMS > 1:
        second = tl.load(at + 2)
        if ALIGNED:
            second = tl.multiple_of(second, 16)
    if DIMS > 2:
        third = tl.load(at + 1)
        if ALIGNED:
            third = tl.multiple_of(third, 16)
    if DIMS > 3:
        outer = tl.load(at)
        if ALIGNED:
            outer = tl.multiple_of(outer, 16)
    return base, inner, second, third, outer


@triton.jit
def pointers(place, sizes, start, lanes, DIMS: tl.constexpr, ALIGNED: tl.constexpr):
    """The addresses of the elements `start` + `lanes`, counted in row-major order over the last DIMS dims.

    Offsets are int64, and quotients within a tile are int32.
    """
    outer = start
    inner = lanes
    offsets = lanes.to(tl.int64) * 0
    for dim in tl.static_range(DIMS - 1):
        size = sizes[dim]
        first = (outer % size).to(tl.int32)
        if ALIGNED and dim == 0:
            first = tl.multiple_of(first, 16)
        inner = first + inner
        outer = outer // size
        part = (inner % size.to(tl.int32)).to(tl.int64)
        if ALIGNED and dim == 0:
            offsets += part
        else:
            offsets += part * place[dim + 1]
        inner = inner // size.to(tl.int32)
    if ALIGNED and DIMS == 1:
        offsets = outer + inner
    else:
        offsets += (outer + inner) * place[DIMS]
    return place[0] + offsets


@triton.jit
def load(place, sizes, DTYPE: tl.constexpr, start, lanes, inside, DIMS: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the elements of an operand. 16-bit floats are returned as float32."""
    return widened(tl.load(pointers(place, sizes, start, lanes, DIMS, ALIGNED), mask=inside), DTYPE)


@triton.jit
def load_one(own, OPERAND: tl.constexpr, DTYPE: tl.constexpr):
    """Load an operand that has one element for the whole segment. A 16-bit float is returned as float32."""
    return widened(tl.load(address(own, OPERAND, DTYPE)), DTYPE)


@triton.jit
def address(own, OPERAND: tl.constexpr, DTYPE: tl.constexpr):
    """The address of an operand."""
    return tl.load(own + OPERAND).to(tl.pointer_type(DTYPE))


@triton.jit
def load_scales(base, start, lanes, inside, SCALED: tl.constexpr):
    """Load the scale of each element: one for every SCALED of them, of which tiles hold a whole number."""
    return tl.load(base + start // SCALED + lanes // SCALED, mask=inside)


@triton.jit
def store(place, sizes, DTYPE: tl.constexpr, value, start, lanes, inside, DIMS: tl.constexpr, ALIGNED: tl.constexpr):
    """Write a value that is already rounded to DTYPE into the elements of an operand."""
    at = pointers(place, sizes, start, lanes, DIMS, ALIGNED)
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store(at, bits.to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(at, value.to(DTYPE), mask=inside)


@triton.jit
def number(numbers, WORD: tl.constexpr, DTYPE: tl.constexpr):
    """Load a number: a hyperparameter, or a value that the host computed from hyperparameters."""
    return tl.load(numbers + WORD).to(tl.float64, bitcast=True).to(DTYPE)


@triton.jit
def widened(value, DTYPE: tl.constexpr):
    """Convert a loaded value to its arithmetic type: 16-bit floats to float32."""
    if DTYPE == tl.bfloat16:
        if INTERPRETED:
            return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            return value.to(tl.float32)
    elif DTYPE == tl.float16:
        return value.to(tl.float32)
    else:
        return value


# -- rounding --------------------------------------------------------------------------------------


@triton.jit
def bfloat16(x):
    """Round a float32 to the nearest bfloat16, ties to even, and return it as a float32."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        nearest = (((bits + 0x7FFF + odd) >> 16) << 16).to(tl.float32, bitcast=True)
        return tl.where(x == x, nearest, x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def float16(x):
    """Round a float32 to the nearest float16, and return it as a float32."""
    return x.to(tl.float16).to(tl.float32)


# -- operators -------------------------------------------------------------------------------------


@triton.jit
def fma(x, y, z):
    """x * y + z, rounded once."""
    if INTERPRETED:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to((x * y + z).dtype)
    else:
        return tl.fma(x, y, z)


@triton.jit
def fma_bfloat16(x, y, z):
    """x * y + z, rounded once, for bfloat16 y and z. ATen on CPU rounds the factor x to bfloat16 as well."""
    if INTERPRETED:
        return fma(bfloat16(x), y, z)
    else:
        return tl.fma(x, y, z)


@triton.jit
def fma_float16(x, y, z):
    """x * y + z, rounded once, for float16 y and z. ATen on CPU rounds the factor x to float16 as well."""
    if INTERPRETED:
        return fma(float16(x), y, z)
    else:
        return tl.fma(x, y, z)


@triton.jit
def lerp(start, end, weight):
    """Interpolate by ATen's formula, which starts from the nearer end, so that a weight of one gives exactly `end`."""
    span = end - start
    near = fma(weight, span, start)
    far = fma(weight - 1.0, span, end)
    return tl.where(tl.abs(weight) < 0.5, near, far)


@triton.jit
def div(x, y):
    """Divide with correct rounding. Triton's `/` on float32 is not correctly rounded."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def div_by_number(x, y):
    """Divide by a number. ATen on CUDA multiplies by the reciprocal of a number on the host; ATen on CPU divides."""
    if INTERPRETED:
        return div(x, y)
    else:
        return x * reciprocal(y)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded."""
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def sqrt(x):
    """The square root, correctly rounded in float32."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def rsqrt(x):
    if INTERPRETED:
        return reciprocal(sqrt(x))
    else:
        return libdevice.rsqrt(x)


@triton.jit
def addcmul(x, y, z, value):
    """x + value * y * z. ATen on CPU multiplies from the left; ATen on CUDA rounds only once if `value` is one."""
    if INTERPRETED:
        return fma(value * y, z, x)
    else:
        return tl.where(value == 1.0, tl.fma(y, z, x), tl.fma(value, y * z, x))


@triton.jit
def addcdiv(x, y, z, value):
    """x + value * y / z. ATen on CPU multiplies before it divides, and does not fuse the sum."""
    if INTERPRETED:
        return x + div(value * y, z)
    else:
        return tl.fma(value, div(y, z), x)


@triton.jit
def exp(x):
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def exp2(x):
    return tl.exp2(x) if INTERPRETED else libdevice.exp2(x)


@triton.jit
def log(x):
    return tl.log(x) if INTERPRETED else libdevice.log(x)


@triton.jit
def log2(x):
    return tl.log2(x) if INTERPRETED else libdevice.log2(x)


@triton.jit
def sin(x):
    return tl.sin(x) if INTERPRETED else libdevice.sin(x)


@triton.jit
def cos(x):
    return tl.cos(x) if INTERPRETED else libdevice.cos(x)


@triton.jit
def erf(x):
    return tl.erf(x) if INTERPRETED else libdevice.erf(x)


@triton.jit
def tanh(x):
    if INTERPRETED:
        small = tl.exp(-2.0 * tl.abs(x.to(tl.float64)))
        size = (1.0 - small) / (1.0 + small)
        return tl.where(x < 0, -size, size).to(x.dtype)
    else:
        return libdevice.tanh(x)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp(-x))


@triton.jit
def power(x, y):
    """x ** y. In the interpreter x must not be negative."""
    if INTERPRETED:
        return tl.exp2(y.to(tl.float64) * tl.log2(x.to(tl.float64))).to((x * y).dtype)
    else:
        return libdevice.pow(x, y)


@triton.jit
def sign(x):
    """1 where x > 0, -1 where x < 0, else 0, in the dtype of x."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def maximum(x, y):
    """The greater of x and y, or NaN if either is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    """The smaller of x and y, or NaN if either is NaN."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
