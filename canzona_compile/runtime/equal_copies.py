"""Are the copies equal that ranks hold of one parameter, and of its gradient? Digests of bits tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from canzona_compile.errors import RankMismatch
from canzona_compile.ir.layout import Grid
from canzona_compile.tensors import is_expert, local_part

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
AT_ONCE = 2**20  # elements; the integers that are computed with take 8 bytes each
HINT_EXPERTS = (
    "where ranks hold different experts (allreduce=False), wrap an optimizer of experts alone, with replicate= over "
    "ranks that hold the same ones or without it: chain(wrap(Muon(experts)), wrap(Muon(others), replicate=dp))"
)
FACTOR = 0x1E3779B97F4A7C15  # odd, so that multiplying by it loses nothing


class Copy(NamedTuple):
    """A parameter of which several ranks hold copies.

    Attributes:
        grid: its ranks; those of a column hold equal copies.
        param: the parameter, with its gradient if it has one.
    """

    name: str
    grid: Grid
    param: Tensor


class Digest(NamedTuple):
    """Digests of the bits of a parameter and of its gradient; None without a gradient."""

    param: int
    grad: int | None


def digests(copies: Sequence[Copy]) -> dict[str, Digest]:
    """Compute the digests of what this rank holds, by name. The host waits for the device once."""
    sums = [digest_of(t) for copy in copies for t in (copy.param, copy.param.grad) if t is not None]
    values = iter(torch.stack(sums).tolist() if sums else [])
    return {c.name: Digest(next(values), None if c.param.grad is None else next(values)) for c in copies}


def digest_of(tensor: Tensor) -> Tensor:
    """A digest of the bits of a tensor's part on this rank and of the places where they are: a 0-d int64 tensor.

    It is computed in integers, so that it is the same on all devices, and does not depend on strides. Sums wrap around.
    """
    part = local_part(tensor)
    if part.element_size() not in INTEGERS or part.is_complex():
        part = torch.view_as_real(part)
    flat = part.view(INTEGERS[part.element_size()]).reshape(-1)
    weights = mixed(torch.arange(1, min(len(flat), AT_ONCE) + 1, device=flat.device) * FACTOR) | 1
    digest = torch.zeros((), dtype=torch.int64, device=flat.device)
    for values in flat.split(AT_ONCE):
        digest = mixed(digest + (mixed(values.to(torch.int64)) * weights[: len(values)]).sum()) * FACTOR
    return digest


def mixed(values: Tensor) -> Tensor:
    """Return integers that are scattered over all bits. Equal ones stay equal, and unequal ones unequal."""
    values = (values ^ shifted(values, 32)) * FACTOR
    return values ^ shifted(values, 29)


def shifted(values: Tensor, by: int) -> Tensor:
    """Shift integers to the right, as if they had no sign."""
    found: Tensor = (values >> by) & (2 ** (64 - by) - 1)
    return found


def unequal_copy(copies: Sequence[Copy], found: Mapping[int, Mapping[str, Digest]]) -> RankMismatch | None:
    """The error that names the first parameter of which ranks hold unequal copies, by the digests of each rank.

    A gradient that only some ranks have is not a difference: that is found where ranks compare what they have.
    """
    for kind in Digest._fields:
        for copy in copies:
            for column in zip(*copy.grid.ranks, strict=True):
                seen = {r: getattr(found[r][copy.name], kind) for r in column if copy.name in found[r]}
                seen = {r: value for r, value in seen.items() if value is not None}
                if len(set(seen.values())) > 1:
                    first, *others = seen
                    other = next(r for r in others if seen[r] != seen[first])
                    return unequal(copy, kind, first, other)
    return None


def unequal(copy: Copy, kind: str, first: int, other: int) -> RankMismatch:
    """Make the error of two ranks with unequal copies."""
    what, hint = (
        ("the parameter", "broadcast the parameters from one rank, or load the same checkpoint on all ranks")
        if kind == "param"
        else (
            "the gradient",
            "average gradients over the ranks before step(), with DistributedDataParallel or all_reduce",
        )
    )
    if is_expert(copy.param):
        hint = HINT_EXPERTS if kind == "param" else f"{hint}; or, {HINT_EXPERTS}"
    return RankMismatch(
        f"{what} differs between rank {first} and rank {other}, but replicate= needs identical copies; nothing was "
        "updated",
        at=copy.name,
        hint=hint,
    )
