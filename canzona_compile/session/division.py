"""The division of a fused parameter into its logical matrices: which rows this rank holds, and how state divides.

Portable state is held under the fused parameter. Leaves that have the shape of their pieces are joined into one leaf
with the shape of the fused parameter. All other leaves are kept once per piece, with keys such as "q.left" and
"k.left".

A piece of a DTensor is a DTensor of the piece's shape. Its fragments follow the layout of the piece, not its
placements, so no DTensor operation may run on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.capture.leaves import LeafPath, paths_of, read, structure_of, write
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Box, Shape, local_part
from canzona_compile.split import Split, entries_in, rows_of

State = dict[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """One logical matrix of a fused parameter, on this rank.

    Attributes:
        name: its name within the fused parameter, such as "q".
        task: the name of the task that updates it, such as "layers.0.qkv.weight[q]".
        shape: of the whole matrix.
        dim: the dimension of the fused parameter that is cut.
        rows: the rows of the fused parameter that it consists of, in its own order (int64), see `split.rows_of`.
        entries: the rows that this rank holds, as indices into the fused fragment (int64).
        first: the first of `entries` if they are consecutive; None otherwise.
    """

    name: str
    task: str
    shape: Shape
    dim: int
    rows: Tensor
    entries: Tensor
    first: int | None

    def of(self, values: Tensor) -> Tensor:
        """This rank's rows of the piece in a fused fragment: as a view if that view is contiguous, else as a copy."""
        if self.first is None:
            return values.index_select(self.dim, self.entries)
        return values.narrow(self.dim, self.first, len(self.entries)).contiguous()

    def put(self, values: Tensor, local: Tensor) -> None:
        """Write this rank's rows of the piece into a fused fragment, unless `local` is a view of that fragment.

        Args:
            values: the fused fragment.
            local: the rows, in any shape.
        """
        if not local.numel() or shares_memory(local, values):
            return
        local = local.reshape(*values.shape[: self.dim], len(self.entries), *values.shape[self.dim + 1 :])
        if self.first is None:
            values.index_copy_(self.dim, self.entries, local)
        else:
            values.narrow(self.dim, self.first, len(self.entries)).copy_(local)


class Division:
    """A fused parameter, and what this rank holds of its pieces.

    Attributes:
        name: the name of the fused parameter.
        whole: the fused parameter.
        dim: the dimension that is cut.
        pieces: the logical matrices, in order.
    """

    def __init__(self, name: str, whole: Tensor, split: Split, box: Box) -> None:
        """Find the pieces.

        Args:
            name: the name of the fused parameter.
            whole: the fused parameter.
            split: how its rows divide into logical matrices.
            box: the region of `whole` that this rank holds.
        """
        self.name, self.whole, self.dim = name, whole, split.dim
        self.pieces: list[Piece] = []
        for piece, rows in rows_of(split).items():
            entries = entries_in(box, rows, self.dim)
            shape = list(whole.shape)
            shape[self.dim] = len(rows)
            first = first_of_run(entries)
            task = f"{name}[{piece}]"
            self.pieces.append(Piece(piece, task, tuple(shape), self.dim, rows, entries.to(whole.device), first))

    def param_of(self, piece: Piece) -> torch.nn.Parameter:
        """Make a parameter that stands for a piece; it shares the memory of the fused fragment if `Piece.of` does."""
        return torch.nn.Parameter(self.like(piece.of(local_part(self.whole)), piece.shape))

    def like(self, local: Tensor, shape: Sequence[int]) -> Tensor:
        """Make a fragment a DTensor of this shape if the fused parameter is a DTensor."""
        if not isinstance(self.whole, DTensor):
            return local
        mesh, placements = self.whole.device_mesh, self.whole.placements
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    # -- state -------------------------------------------------------------------------------------

    def piece_in(self, path: LeafPath) -> str:
        """The name of the piece that alone has a leaf of portable state; empty for a leaf of the fused parameter."""
        prefix = str(path[0]).rpartition(".")[0]
        return prefix if any(piece.name == prefix for piece in self.pieces) else ""

    def taken(self, state: Mapping[str, Any], piece: Piece) -> State:
        """Take the portable state of one piece out of that of the fused parameter.

        Args:
            state: the portable state of the fused parameter.
            piece: the piece.

        Raises:
            CanzonaError: the state holds statistics of the fused matrix as a whole, or a plain tensor beside a
                sharded parameter.
        """
        made: State = {}
        for path in paths_of(state).values():
            value, own = read(state, path), self.piece_in(path)
            if own and own != piece.name:
                continue
            key = str(path[0])[len(own) + 1 :] if own else path[0]
            value = value if own else self._rows(value, piece, path)
            write(made, (key, *path[1:]), value, {key: structure_of(state)[path[0]]})
        return made

    def _rows(self, value: Any, piece: Piece, path: Sequence[Any]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 0:
            return value.clone()
        if value.shape != self.whole.shape:
            raise CanzonaError(
                f"state {'.'.join(map(str, path))!r} of shape {list(value.shape)} belongs to the fused matrix, "
                "not to its pieces",
                at=self.name,
                hint="load a checkpoint that was made with the same split=",
            )
        if isinstance(self.whole, DTensor):
            if not isinstance(value, DTensor):
                raise CanzonaError(
                    f"state {'.'.join(map(str, path))!r} is a plain tensor; its parameter is sharded",
                    at=self.name,
                    hint="load through torch.distributed.checkpoint",
                )
            if value.placements != self.whole.placements:
                value = value.redistribute(self.whole.device_mesh, self.whole.placements)
        local = piece.of(local_part(value))
        if shares_memory(local, local_part(value)):
            local = local.clone()
        return self.like(local, piece.shape)

    def merged(self, states: Sequence[State], whole_of: Callable[[Piece, str, DTensor], Tensor]) -> State:
        """Join the portable states of the pieces, the inverse of `taken`.

        Args:
            states: one portable state per piece.
            whole_of: gathers a leaf. It takes the piece, the name of the leaf and the leaf, and returns the whole
                tensor.

        Returns:
            The portable state of the fused parameter.
        """
        made: State = {}
        paths = {name: path for state in states for name, path in paths_of(state).items()}
        for name, path in paths.items():
            values = [read(state, path) for state in states]
            if all(self._alike(v, p) for v, p in zip(values, self.pieces, strict=True)):
                write(made, path, self._together(values), structure_of(states[0]))
                continue
            for piece, state, value in zip(self.pieces, states, values, strict=True):
                if path[0] in state:
                    value = whole_of(piece, name, value) if isinstance(value, DTensor) else value
                    key = f"{piece.name}.{path[0]}"
                    write(made, (key, *path[1:]), value, {key: structure_of(state)[path[0]]})
        return made

    def _alike(self, value: Any, piece: Piece) -> bool:
        """Tell whether a leaf has the shape and the layout of its piece."""
        if not isinstance(value, Tensor) or tuple(value.shape) != piece.shape:
            return False
        return isinstance(value, DTensor) == isinstance(self.whole, DTensor)

    def _together(self, values: Sequence[Tensor]) -> Tensor:
        local = torch.empty_like(local_part(self.whole), dtype=values[0].dtype)
        for piece, value in zip(self.pieces, values, strict=True):
            piece.put(local, local_part(value))
        return self.like(local, self.whole.shape)


def first_of_run(entries: Tensor) -> int | None:
    """Return the first of some indices if they are consecutive (0 if there are none); None otherwise."""
    first = int(entries[0]) if len(entries) else 0
    return first if torch.equal(entries, torch.arange(first, first + len(entries), device="cpu")) else None


def shares_memory(part: Tensor, whole: Tensor) -> bool:
    """Tell whether two tensors have the same storage."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
