"""Divide the rows of a fused weight into logical matrices, such as q, k and v of qkv, or gate and up of fc1."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from canzona_compile.errors import CanzonaError, UnsupportedLayout, some
from canzona_compile.ir.canonical_names import canonical_name
from canzona_compile.ir.layout import Box, Layout

WHERE = "wrap(..., split=)"
LOOKS_FUSED = re.compile(r"qkv|query_key_value|gate_?up|up_?gate|in_proj(?!_[abz]\b)|c_attn", re.IGNORECASE)


def looks_fused(name: str) -> bool:
    """Whether a weight, or the module that has it, is named as if it held several matrices."""
    return LOOKS_FUSED.search(".".join(name.split(".")[-2:])) is not None


@dataclass(frozen=True, init=False, slots=True)
class Split:
    """The parts of a fused weight. The optimizer updates each part as a separate parameter.

    The rows of all parts, one part after the other, are numbered 0, 1, 2 and so on. `interleaved` or `order` says
    where these rows lie in the weight. Without either, row i of the parts is row i of the weight.

    Args:
        parts: the number of rows of each part by its name, in order: {"q": 4096, "k": 1024, "v": 1024}.
        interleaved: the number of equal blocks in the weight, each of which holds its share of every part:
            [q, k, v, q, k, v, ...]. A fused weight that was sharded by hand over that many tensor-parallel ranks
            has this form, and so has Megatron's qkv with that many query groups.
        order: any other arrangement: row i of the parts is row `order[i]` of the weight.
        head: the number of rows per attention head. Every part is cut further, into one matrix per head.
        dim: the dimension that is cut: 0 for the rows of torch's linear layers, 1 for the rows in a stack of them.

    Raises:
        CanzonaError: a name or a size is impossible. What depends on the weight is checked at the first step.
    """

    parts: tuple[tuple[str, int], ...]
    interleaved: int
    order: tuple[int, ...] | None
    head: int | None
    dim: int

    def __init__(
        self,
        parts: Mapping[str, int],
        *,
        interleaved: int = 1,
        order: Sequence[int] | Tensor | None = None,
        head: int | None = None,
        dim: int = 0,
    ) -> None:
        positive = {**{f"rows of {k}": v for k, v in parts.items()}, "interleaved": interleaved, "head": head or 1}
        for name, value in positive.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CanzonaError(f"{name}={value!r} is not a positive integer", at=WHERE)
        for name, rows in parts.items():
            if not isinstance(name, str) or not name or "." in name:
                raise CanzonaError(f"{name!r} cannot be the name of a part", at=WHERE)
            for what, unit in (("interleaved", interleaved), ("head", head or 1)):
                if rows % unit:
                    raise CanzonaError(f"{what}={unit} does not divide the {rows} rows of {name!r}", at=WHERE)
        if not parts:
            raise CanzonaError("there are no parts", at=WHERE, hint='name them: {"gate": 1024, "up": 1024}')
        numbers = None if order is None else tuple(int(i) for i in order)
        if numbers is not None and (interleaved > 1 or sorted(numbers) != list(range(sum(parts.values())))):
            raise CanzonaError(
                "order= is not a permutation of all rows of the parts, or interleaved= is given as well", at=WHERE
            )
        own = {"parts": tuple(parts.items()), "interleaved": interleaved, "order": numbers, "head": head, "dim": dim}
        for field, content in own.items():
            object.__setattr__(self, field, content)

    @property
    def length(self) -> int:
        """The number of rows of all parts together."""
        return sum(rows for _, rows in self.parts)

    def __str__(self) -> str:
        order = "" if self.order is None else f" order {zlib.crc32(repr(self.order).encode()):08x}"
        parts = " ".join(f"{name} {rows}" for name, rows in self.parts)
        return f"{parts} of dim {self.dim} interleaved {self.interleaved} head {self.head}{order}"


@functools.lru_cache(maxsize=64)
def rows_of(split: Split) -> dict[str, Tensor]:
    """Find the rows of each logical matrix in the weight.

    Returns:
        By the name of the logical matrix, the indices of its rows in the weight (int64), in the matrix's own order.
        With `head`, the matrices have names such as "q.0".
    """
    found: dict[str, Tensor] = {}
    start, blocks = 0, split.interleaved
    for name, rows in split.parts:
        own = torch.arange(rows, device="cpu")
        block, inside = own // (rows // blocks), own % (rows // blocks)
        lie = block * (split.length // blocks) + start // blocks + inside
        if split.order is not None:
            lie = torch.tensor(split.order[start : start + rows], device="cpu")
        if split.head is None:
            found[name] = lie
        else:
            found |= {f"{name}.{i}": part for i, part in enumerate(lie.split(split.head))}
        start += rows
    return found


def part_of_layout(layout: Layout, rows: Tensor, dim: int) -> Layout:
    """Derive the layout of a logical matrix from the layout of its weight."""
    boxes = []
    for box in layout.boxes:
        held = held_in(box, rows, dim).nonzero().flatten()
        first = int(held[0]) if len(held) else 0
        if len(held) and int(held[-1]) - first + 1 != len(held):
            raise UnsupportedLayout(
                f"a rank would hold {len(held)} rows of this part that are not consecutive",
                hint="shard the other dim, or choose order= so that rows stay on their rank",
            )
        start, size = list(box.start), list(box.size)
        start[dim], size[dim] = first, len(held)
        boxes.append(Box(tuple(start), tuple(size)))
    shape = list(layout.shape)
    shape[dim] = len(rows)
    return Layout(tuple(shape), layout.grid, tuple(boxes), layout.placements)


def entries_in(box: Box, rows: Tensor, dim: int) -> Tensor:
    """Find the entries of a fragment that are rows of a logical matrix.

    Returns:
        Indices along `dim` of the fragment (int64), in the matrix's order.
    """
    return rows[held_in(box, rows, dim)] - box.start[dim]


def held_in(box: Box, rows: Tensor, dim: int) -> Tensor:
    """Tell for each row of a logical matrix whether a region of the weight contains it, as a bool tensor."""
    return (rows >= box.start[dim]) & (rows < box.start[dim] + box.size[dim])


def chosen(splits: Sequence[tuple[str, Split]], name: str, shape: Sequence[int]) -> Split | None:
    """Return the split of a parameter; None if no pattern matches its name.

    Args:
        shape: the shape of the whole parameter.
    """
    fitting = [(pattern, split) for pattern, split in splits if fnmatchcase(name, pattern)]
    if not fitting:
        return None
    if len(fitting) > 1:
        patterns = " and ".join(repr(pattern) for pattern, _ in fitting)
        raise UnsupportedLayout(
            f"{patterns} of split= both match this parameter", at=name, hint="make the patterns narrower"
        )
    split = fitting[0][1]
    if not 0 <= split.dim < len(shape) or shape[split.dim] != split.length:
        parts = " + ".join(f"{part} {rows}" for part, rows in split.parts)
        raise UnsupportedLayout(
            f"split= says {parts} = {split.length} entries of dim {split.dim}, but the parameter has shape "
            f"{list(shape)}",
            at=name,
            hint="give the sizes of the whole weight, not of this rank's fragment",
        )
    return split


def splits_of(given: Mapping[str, Split | Mapping[str, int]] | None) -> tuple[tuple[str, Split], ...]:
    """Return what users give as `split=` as pairs of a pattern and its split."""
    pairs = (given or {}).items()
    return tuple((canonical_name(pattern), own if isinstance(own, Split) else Split(own)) for pattern, own in pairs)


def fitting(splits: Sequence[tuple[str, Split]], names: Sequence[str]) -> tuple[tuple[str, Split], ...]:
    """Return the splits whose pattern matches one of some names."""
    return tuple((pattern, split) for pattern, split in splits if any(fnmatchcase(name, pattern) for name in names))


def check_patterns(given: Sequence[tuple[str, object]], names: Sequence[str], where: str = WHERE) -> None:
    """Raise CanzonaError if a pattern, of `split=` or of another option, matches no parameter name."""
    for pattern, _ in given:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CanzonaError(
                f"{pattern!r} matches no parameter; the optimizer has {some(names)}",
                at=where,
                hint="names come from `param_names` in the parameter groups, or from wrap(..., model=model)",
            )
