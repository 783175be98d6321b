"""Fused parameters: the optimizer sees each of their logical matrices as a parameter of its own.

The parameter of a piece holds this rank's rows of the piece. If these rows are contiguous in the fused fragment, it
is a view of that fragment; otherwise it is a copy that is written back after the step. A piece of a DTensor is a
DTensor of the piece's shape. Its fragments follow the layout of the piece, not its placements, so no DTensor
operation may run on it.

While a plan is in use, `optimizer.state` holds the state of a piece under the piece's parameter. Portable state is
held under the fused parameter. Leaves that have the shape of their pieces are joined into one leaf with the shape
of the fused parameter. All other leaves are kept once per piece, with keys such as "q.left" and "k.left".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.capture.leaves import paths_of, read, structure_of, write
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Box, local_part
from canzona_compile.split import Split, entries_in, rows_of

State = dict[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """One logical matrix of a fused parameter, on this rank.

    Attributes:
        name: its name within the fused parameter, such as "q".
        rows: the rows of the fused parameter that it consists of, in its own order (int64), see `split.rows_of`.
        entries: the rows that this rank holds, as indices into the fused fragment (int64).
        first: the first of `entries` if they are consecutive; None otherwise.
        param: this rank's fragment of the matrix, as a parameter.
    """

    name: str
    rows: Tensor
    entries: Tensor
    first: int | None
    param: Tensor


class Fused:
    """A parameter that holds several logical matrices, and the parameters that stand for them."""

    def __init__(self, name: str, whole: Tensor, split: Split, box: Box) -> None:
        """Make the pieces.

        Args:
            name: the name of the fused parameter.
            whole: the fused parameter.
            split: how its rows divide into logical matrices.
            box: the region of `whole` that this rank holds.
        """
        self.name, self.whole, self.dim = name, whole, split.dim
        self.pieces: list[Piece] = []
        for name, rows in rows_of(split).items():
            entries = entries_in(box, rows, self.dim)
            first = first_of_run(entries)
            entries = entries.to(whole.device)
            local = self._part(local_part(whole), entries, first)
            shape = list(whole.shape)
            shape[self.dim] = len(rows)
            self.pieces.append(Piece(name, rows, entries, first, torch.nn.Parameter(self._like(local, shape))))

    # -- around a step -----------------------------------------------------------------------------

    def take(self) -> None:
        """Give the pieces the current values of the fused parameter and of its gradient."""
        values, grad = local_part(self.whole), self.whole.grad
        for piece in self.pieces:
            local = self._part(values, piece.entries, piece.first)
            if isinstance(piece.param, DTensor):
                piece.param._local_tensor = local
            else:
                piece.param.data = local
            if grad is None:
                piece.param.grad = None
                continue
            if grad.dtype != piece.param.dtype:
                piece.param.grad_dtype = grad.dtype
            piece.param.grad = self._like(self._part(local_part(grad), piece.entries, piece.first), piece.param.shape)

    def give_back(self) -> None:
        """Write pieces that are copies back to the fused parameter, and drop the gradients of all pieces."""
        values = local_part(self.whole)
        for piece in self.pieces:
            piece.param.grad = None
            local = local_part(piece.param)
            if not shares_memory(local, values) and local.numel():
                values.index_copy_(self.dim, piece.entries, local)

    def _part(self, values: Tensor, entries: Tensor, first: int | None) -> Tensor:
        """Take some entries of a fragment: as a view if that view is contiguous, else as a copy."""
        if first is None:
            return values.index_select(self.dim, entries)
        return values.narrow(self.dim, first, len(entries)).contiguous()

    def _like(self, local: Tensor, shape: Sequence[int]) -> Tensor:
        """Make a fragment a DTensor of this shape if the fused parameter is a DTensor."""
        if not isinstance(self.whole, DTensor):
            return local
        mesh, placements = self.whole.device_mesh, self.whole.placements
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    # -- state -------------------------------------------------------------------------------------

    def taken(self, state: Mapping[str, Any]) -> list[State]:
        """Divide portable state of the fused parameter among its pieces.

        Args:
            state: the portable state of the fused parameter.

        Returns:
            The portable state of each piece.

        Raises:
            CanzonaError: the state holds statistics of the fused matrix as a whole, or a plain tensor beside a
                sharded parameter.
        """
        return [self._taken(state, piece) for piece in self.pieces]

    def _taken(self, state: Mapping[str, Any], piece: Piece) -> State:
        made: State = {}
        names = [other.name for other in self.pieces]
        for path in paths_of(state).values():
            value, owner = read(state, path), str(path[0]).rpartition(".")[0]
            if owner in names:
                key, mine = str(path[0])[len(owner) + 1 :], owner == piece.name
            else:
                key, mine, value = path[0], True, self._rows(value, piece, path)
            if mine:
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
                hint="load a checkpoint that was made with the same split=",
            )
        if isinstance(self.whole, DTensor):
            if not isinstance(value, DTensor):
                raise CanzonaError(
                    f"state {'.'.join(map(str, path))!r} is a plain tensor; its parameter is sharded",
                    hint="load through torch.distributed.checkpoint",
                )
            if value.placements != self.whole.placements:
                value = value.redistribute(self.whole.device_mesh, self.whole.placements)
        local = self._part(local_part(value), piece.entries, piece.first)
        if shares_memory(local, local_part(value)):
            local = local.clone()
        return self._like(local, piece.param.shape)

    def merged(self, states: Sequence[State], whole_of: Callable[[Tensor, str, Tensor], Tensor]) -> State:
        """Join the portable states of the pieces, the inverse of `taken`.

        Args:
            states: one portable state per piece.
            whole_of: gathers a leaf that is a DTensor. It takes the parameter of the piece, the name of the leaf and
                the leaf, and returns the whole tensor.

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
                    value = whole_of(piece.param, name, value) if isinstance(value, DTensor) else value
                    key = f"{piece.name}.{path[0]}"
                    write(made, (key, *path[1:]), value, {key: structure_of(state)[path[0]]})
        return made

    def _alike(self, value: Any, piece: Piece) -> bool:
        """Tell whether a leaf has the shape and the layout of its piece."""
        if not isinstance(value, Tensor) or value.shape != piece.param.shape:
            return False
        return isinstance(value, DTensor) == isinstance(self.whole, DTensor)

    def _together(self, values: Sequence[Tensor]) -> Tensor:
        local = torch.empty_like(local_part(self.whole), dtype=values[0].dtype)
        for piece, value in zip(self.pieces, values, strict=True):
            local.index_copy_(self.dim, piece.entries, local_part(value))
        return self._like(local, self.whole.shape)


def first_of_run(entries: Tensor) -> int | None:
    """Return the first of some indices if they are consecutive (0 if there are none); None otherwise."""
    first = int(entries[0]) if len(entries) else 0
    return first if torch.equal(entries, torch.arange(first, first + len(entries))) else None


def shares_memory(part: Tensor, whole: Tensor) -> bool:
    """Tell whether two tensors have the same storage."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
