"""Measures the distance of two values: in units in the last place, and relative to their size.

`torch.testing.assert_close` does not serve here: it takes 0.0 and -0.0 for equal, though their bits differ, and it does
not count units in the last place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from canzona_compile.tensors import bytes_of

MOST = 2**63 - 1  # the largest distance that is told apart
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two values are apart at most.

    Attributes:
        equal: both have the same bits, or NaNs in the same places. What is no tensor is equal if `==` says so.
        ulps: the largest distance in units in the last place, 0 only if `equal`. None if no number tells it, because
            shapes or dtypes differ, or only one side is NaN.
        relative: the largest |a - b| / max(|a|, |b|), at most 2. None as for `ulps`, and beside an infinity.
    """

    equal: bool
    ulps: int | None
    relative: float | None
    remark: str = ""

    def worst(self, other: Distance) -> Distance:
        """The larger of two distances, number by number."""
        if self.equal or other.equal:
            return other if self.equal else self
        return Distance(
            False,
            None if self.ulps is None or other.ulps is None else max(self.ulps, other.ulps),
            None if self.relative is None or other.relative is None else max(self.relative, other.relative),
            self.remark or other.remark,
        )


EQUAL = Distance(True, 0, 0.0)


def unlike(remark: str) -> Distance:
    """The distance of values that differ in a way that no number tells."""
    return Distance(False, None, None, remark)


def distance(found: object, expected: object) -> Distance:
    """Compare two leaves: tensors by their bits, everything else by `==`."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return between(found, expected)
    if isinstance(found, Tensor) or isinstance(expected, Tensor) or not equal_values(found, expected):
        return unlike(f"{brief(found)}, expected {brief(expected)}")
    return EQUAL


def between(found: Tensor, expected: Tensor) -> Distance:
    """Compare two tensors of any real or complex dtype."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return unlike(f"{brief(found)}, expected {brief(expected)}")
    if found.is_complex():
        return between(torch.view_as_real(found), torch.view_as_real(expected))
    found, expected = found.detach(), expected.detach()
    if torch.equal(bytes_of(found), bytes_of(expected)):
        return EQUAL
    steps = ulps(found, expected)
    if not steps.any():
        return EQUAL  # NaNs with other bits
    if bool((is_nan(found) ^ is_nan(expected)).any()):
        return unlike("NaN on one side only")
    errors = relative_errors(found, expected)
    finite = bool(errors.isfinite().all())
    return Distance(
        False,
        int(steps.max()),
        float(errors.max()) if finite else None,
        "" if finite else "infinity on one side only",
    )


def ulps(left: Tensor, right: Tensor) -> Tensor:
    """How many representable numbers lie from each element of one tensor to that of the other.

    The distance is 0 for equal bits and for two NaNs only: -0.0 and 0.0 are neighbours. The largest finite number and
    infinity are neighbours too. For integers the distance is the difference.

    Args:
        left, right: of the same shape and real dtype.

    Returns:
        int64, of their shape. 2^63 - 1 stands for a NaN on one side, and for every larger distance.
    """
    a, b = ordinals(left), ordinals(right)
    gap = torch.maximum(a, b) - torch.minimum(a, b)
    gap = torch.where(gap < 0, MOST, gap)  # it went around: only numbers of 64 bits are so far apart
    nan, other = is_nan(left), is_nan(right)
    return torch.where(nan & other, 0, torch.where(nan ^ other, MOST, gap))


def ordinals(values: Tensor) -> Tensor:
    """Integers in the order of the values, neighbours next to one another; 0.0 is 0, -0.0 is -1."""
    if not values.is_floating_point():
        return values.long()
    bits = values.contiguous().view(INTEGERS[values.dtype.itemsize])
    lowest = torch.iinfo(bits.dtype).min
    wide = bits.long()
    # The bits of negative numbers are a sign and a magnitude: they count away from zero.
    return torch.where(wide < 0, lowest - wide - 1, wide)


def relative_errors(left: Tensor, right: Tensor) -> Tensor:
    """|a - b| / max(|a|, |b|) in float64, 0 where both are equal or NaN, not finite beside one infinity."""
    a, b = left.double(), right.double()
    alike = (a == b) | (a.isnan() & b.isnan())
    return torch.where(alike, 0.0, (a - b).abs() / torch.maximum(a.abs(), b.abs()))


def relative_norm(found: object, expected: object) -> float:
    """|a - b| / |b| by the norms of two tensors; infinite if it is not finite, or if no number tells it."""
    apart = norm_apart(found, expected)
    whole = float(wide(expected).norm()) if isinstance(expected, Tensor) else math.inf
    return apart / max(whole, 1e-30) if math.isfinite(whole) else math.inf


def norm_apart(found: object, expected: object) -> float:
    """The norm of the difference, with NaN equal to itself; infinite as for `relative_norm`."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or found.shape != expected.shape:
        return math.inf
    a, b = wide(found), wide(expected)
    apart = float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm())
    return apart if math.isfinite(apart) else math.inf


def wide(values: Tensor) -> Tensor:
    """In float64."""
    return torch.view_as_real(values).double() if values.is_complex() else values.double()


def is_nan(values: Tensor) -> Tensor:
    """As torch.isnan, also of 8-bit floats."""
    return (values.float() if values.dtype.itemsize == 1 else values).isnan()


def equal_values(found: object, expected: object) -> bool:
    """`==`, with NaN equal to itself. Values that `==` cannot compare are equal if their texts are."""
    try:
        return bool(found == expected) or bool(found != found and expected != expected)
    except Exception:
        return repr(found) == repr(expected)


def brief(value: object) -> str:
    """A leaf in a few words."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value)} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def dtype_name(value: object) -> str:
    """float32 for a tensor, int for a counter."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
