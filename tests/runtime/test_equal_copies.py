"""Digests of copies: they depend on every bit and on its place, and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from canzona_compile.runtime import equal_copies
from canzona_compile.runtime.equal_copies import digest_of

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def numbers(dtype: torch.dtype) -> Tensor:
    """A matrix of 8 x 8 whose rows and columns differ."""
    values = (torch.arange(64).view(8, 8) * 37 % 64).to(torch.float64)
    return (values % 3 == 0) if dtype is torch.bool else values.to(dtype)


def swapped(value: Tensor) -> Tensor:
    """Two elements change places."""
    found = value.clone()
    unlike = next(i for i in range(1, 64) if value.view(-1)[i] != value.view(-1)[0])
    found.view(-1)[0], found.view(-1)[unlike] = value.view(-1)[unlike], value.view(-1)[0]
    return found


MOVES = {
    "rows": lambda value: value[torch.arange(8).roll(1)],
    "two rows": lambda value: value[[1, 0, *range(2, 8)]],
    "columns": lambda value: value[:, [1, 0, *range(2, 8)]],
    "halves": lambda value: torch.cat([value[4:], value[:4]]),
    "reversed": lambda value: value.flip(0),
    "transposed": lambda value: value.mT.contiguous(),
    "two elements": swapped,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("move", MOVES)
def test_what_moves_changes_the_digest(move: str, dtype: torch.dtype) -> None:
    value = numbers(dtype)
    moved = MOVES[move](value.view(torch.uint8) if dtype is torch.float8_e4m3fn else value).view(dtype)
    assert not torch.equal(moved.to(torch.complex128), value.to(torch.complex128))
    assert digest_of(moved) != digest_of(value)
    assert digest_of(value.clone()) == digest_of(value)


@pytest.mark.parametrize("at_once", [1, 3, 8, 64])
@pytest.mark.parametrize("move", MOVES)
def test_parts_that_are_computed_one_after_the_other_have_places(
    move: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_copies, "AT_ONCE", at_once)
    assert digest_of(MOVES[move](numbers(torch.float32))) != digest_of(numbers(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_signs_count_wherever_they_are(dtype: torch.dtype) -> None:
    """Also of zeros, and of two elements at once."""
    value = torch.zeros(5, dtype=dtype)
    found = set()
    for signs in itertools.product([1, -1], repeat=5):
        found.add(int(digest_of(value.copysign(torch.tensor(signs, dtype=dtype)))))
    assert len(found) == 32


def test_patterns_of_ones_are_all_different() -> None:
    found = {int(digest_of(torch.tensor(ones, dtype=torch.bfloat16))) for ones in itertools.product([0, 1], repeat=12)}
    assert len(found) == 2**12


def test_strides_do_not_count() -> None:
    value = numbers(torch.float32)
    assert digest_of(value.mT.contiguous().mT) == digest_of(value)
    assert digest_of(torch.stack([value, value], -1)[..., 0]) == digest_of(value)


@pytest.mark.parametrize("value", [torch.zeros(0, 3), torch.tensor(2.5), torch.zeros(3, dtype=torch.float64)])
def test_odd_shapes(value: Tensor) -> None:
    assert digest_of(value).shape == ()
    assert digest_of(value) == digest_of(value.clone())


def test_the_digest_is_the_same_everywhere() -> None:
    """Ranks compare it, whatever device and thread count they have."""
    assert int(digest_of(torch.arange(6, dtype=torch.int32))) == 7296850878447717800
