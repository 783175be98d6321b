"""Bind an optimizer's parameters to tasks: find the name, the layout and the kind of each.

They are bound at the first step and no earlier, because frameworks replace parameters after the optimizer was built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.eager_parity import needs_whole_matrix
from canzona_compile.capture.kept import saved_shapes
from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.resident import is_portable
from canzona_compile.capture.sharding_rules import missing_rule, state_after_a_step
from canzona_compile.capture.templates import Capture
from canzona_compile.capture.twin import marks_of
from canzona_compile.capture.variant import ParameterSpec
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.ir.layout import Box, Grid, Layout, Shape, dtensor_layout, local_layout, replicated_layout
from canzona_compile.ir.step import Task
from canzona_compile.options import Options
from canzona_compile.session.division import Division, Piece
from canzona_compile.session.entries import (
    cut_along_experts,
    elementwise,
    independent,
    numbers_of_entries,
    same_but_sizes,
    state_of_entries,
)
from canzona_compile.session.given_layout import check_layout_patterns
from canzona_compile.session.param_memory import check_disjoint
from canzona_compile.session.param_names import named_params
from canzona_compile.session.size_exchange import GridRows
from canzona_compile.session.stand_in import StandIn
from canzona_compile.session.stand_ins import StandIns, exchange_stand_ins
from canzona_compile.session.whole_leaf import check_gathers
from canzona_compile.split import Split, check_patterns, chosen, part_of_layout, rows_of


@dataclass(frozen=True, eq=False, slots=True)
class BoundParam:
    """A parameter of the optimizer, or one piece of a fused parameter, with its task.

    Attributes:
        param: the parameter; for a piece or a fragment, the parameter that stands for it.
        param_group: the index of its parameter group.
        task: its task, with the layout.
        kind: its captured code and the leaves of its state.
        division: that of the fused parameter that it is a piece of; None for a whole parameter.
        stand_in: what stands for the optimizer's parameter if that is a plain fragment; None otherwise.
        rehearsed: the optimizer's parameter whose state this one has under ZeRO-1, where `param` is a double of it.
    """

    param: Tensor
    param_group: int
    task: Task
    kind: ParamKind
    division: Division | None = None
    stand_in: StandIn | None = None
    rehearsed: Tensor | None = None

    @property
    def name(self) -> str:
        """The name of the optimizer's own parameter."""
        return self.task.name if self.division is None else self.division.name

    @property
    def origin(self) -> Tensor:
        """The optimizer's own parameter."""
        if self.stand_in is not None:
            return self.stand_in.fragment
        return self.param if self.division is None else self.division.whole


def grad_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient, or of the parameter if it has no gradient."""
    return param.dtype if param.grad is None else param.grad.dtype


class Binder:
    """Makes the tasks of an optimizer on this rank.

    Args:
        optimizer: the optimizer.
        options: the options of `wrap`.
        capture: the captured code of the optimizer.

    Attributes:
        distributed: whether there is a default process group.
        rank: this rank, global; 0 without a process group.
        replicas: the global ranks of `replicate=`, ascending; empty without it.
    """

    def __init__(self, optimizer: Optimizer, options: Options, capture: Capture) -> None:
        self.optimizer, self.options, self.capture = optimizer, options, capture
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0
        self.replicas = replica_ranks(options.replicate)
        self._rules: dict[Any, str] = {}  # by kind of parameter, the reason that `missing_rule` gives
        self._rows: dict[GridRows, GridRows] = {}
        self._named = named_params(optimizer, options.names, options.prefix)
        self._stand_ins: StandIns | None = None  # None before the exchange

    def exchange(self) -> None:
        """Make the stand-ins of plain tensors that are fragments. This is a collective if there are any.

        What is wrong with a parameter is raised when that parameter is bound, because other ranks wait for this
        rank's part of the exchange.
        """
        group = self._replicate_group() if self.replicas else None
        self._stand_ins, self._rows = exchange_stand_ins(self._named, self.options.layout, group, self.rank)

    def bind(self, refused: dict[str, CanzonaError] | None = None) -> list[BoundParam]:
        """Bind all parameters of the optimizer. This is a collective if some of them are plain fragments.

        Args:
            refused: gets the errors of single parameters, by name; then they are not raised.

        Returns:
            One entry per parameter, and one per piece of a fused parameter.

        Raises:
            CanzonaError: a pattern of `split=` or `layout=` fits no parameter, or a parameter, which the error names,
                has a layout or an update that is not supported.
        """
        if self._stand_ins is None:
            self.exchange()
        assert self._stand_ins is not None
        names, groups = [name for name, _, _ in self._named], range(len(self.optimizer.param_groups))
        try:
            self.capture.notice()  # of what changed since `explain`, or since the last plan
            self.capture.rehearse([[name for name, g, _ in self._named if g == group] for group in groups])
        except UnsupportedOptimizer as error:
            if refused is not None:
                refused |= dict.fromkeys(names, error)
                return []
            raise
        check_disjoint(self._named)
        self._stand_ins.check_others(names)
        check_patterns(self.options.split, names)
        check_layout_patterns(self.options.layout, names)
        found: list[BoundParam] = []
        for own in (one for one in self._named if one[0] not in (refused or ())):
            try:
                found += self.bind_one(len(found), *own)
            except CanzonaError as error:
                if refused is None:
                    raise
                refused[own[0]] = error
        return found

    def bind_one(
        self, index: int, name: str, group: int, param: Tensor, stand_in: StandIn | None = None
    ) -> list[BoundParam]:
        """Bind one parameter, after the exchange.

        Args:
            index: the index of its first task.
            name: its name.
            group: the index of its parameter group.
            param: the parameter.
            stand_in: what stands for it, if it is a fragment that took no part in the exchange.

        Returns:
            One entry, or one entry per piece if the parameter is fused.

        Raises:
            CanzonaError: the parameter is not supported; the error names it.
        """
        try:
            stand_in = stand_in or self._known.of(name)
            if stand_in is None:
                return self._bind(index, name, group, param)
            self._known.add(stand_in)
            bound = self._bind(index, name, group, stand_in.param)
            return [replace(b, stand_in=stand_in) for b in bound]
        except CanzonaError as error:
            if error.at is None or name not in error.at:
                raise type(error)(error.problem, at=name, hint=error.hint) from error
            raise

    def _bind(self, index: int, name: str, g: int, param: Tensor) -> list[BoundParam]:
        if param.is_complex():
            raise UnsupportedOptimizer(
                "complex parameters are not supported", hint="hold real and imaginary part apart"
            )
        layout = self.layout(param)
        split = chosen(self.options.split, name, layout.shape)
        stand_in = self._known.standing(param)
        strided = None if stand_in is None else stand_in.strided(split)
        state = self._state(g, param, name, split)
        if split is not None and not strided:
            division = Division(name, param, split, self._box(layout))
            pieces = []
            for i, piece in enumerate(division.pieces):
                part = division.taken(state or {}, piece)
                pieces.append(self.bind_piece(index + i, g, division, piece, division.param_of(piece), part))
            if any(b.kind.template.interpreted or needs_whole_matrix(b.kind.template) for b in pieces):
                return pieces  # elementwise work gives the same result on the pieces as on the whole
        layout, kind = self._kind(g, param, name, state)
        local = elementwise(kind)
        if isinstance(param, DTensor) and local and (reason := self._missing_rule(g, param)):
            own = self._entries(g, param, name, state, layout, kind)
            layout = layout if own is None else own[0]
            spec = replace(self._spec(layout.shape, param), part=own is not None)
            kind, local = self.capture.interpreted(spec, reason), False
        if strided and not local:
            raise strided
        if not local:
            check_gathers(layout, state or {})
        return [BoundParam(param, g, Task(name, index, g, kind.template.name, layout), kind)]

    def _state(self, g: int, param: Tensor, name: str, split: Split | None) -> dict[str, Any] | None:
        """The portable state of a parameter; for a stand-in, with DTensors as leaves."""
        stand_in = self._known.standing(param)
        if stand_in is None:
            return self.optimizer.state.get(param)
        state = self.optimizer.state.get(stand_in.fragment)
        if not state:
            return None
        whole: set[str] = set()
        found = stand_in.lookalikes(state)
        if split is not None:
            pieces = rows_of(split)
            whole = {leaf for leaf, path in found.items() if str(path[0]).rpartition(".")[0] in pieces}
        elif found:
            layout, kind = self._kind(g, param, name, None)
            shapes = {leaf.name: leaf.shape for leaf in kind.state}
            if kind.recipe is not None and is_portable(state):
                shapes = saved_shapes(state)
            elif kind.recorder is None:
                group = self.optimizer.param_groups[g]
                made = state_after_a_step(self.optimizer, group, self._spec(layout.shape, param))
                shapes = {leaf: tuple(value.shape) for leaf, value in made.items()}
            whole = {leaf for leaf in found if shapes.get(leaf, layout.shape) != layout.shape}
        stand_in.whole_leaves = frozenset(whole)
        return stand_in.taken(state)

    def _missing_rule(self, g: int, param: DTensor) -> str:
        key = (g, param.shape, param.placements, param.device_mesh)
        if key not in self._rules:
            self._rules[key] = missing_rule(self.optimizer, self.optimizer.param_groups[g], param)
        return self._rules[key]

    def bind_piece(
        self,
        index: int,
        g: int,
        division: Division,
        piece: Piece,
        param: Tensor,
        state: dict[str, Any] | None,
        stand_in: StandIn | None = None,
    ) -> BoundParam:
        """Bind one logical matrix of a fused parameter.

        Args:
            index: the index of its task.
            g: the index of the parameter group.
            division: that of the fused parameter.
            piece: the matrix.
            param: the parameter that stands for the matrix.
            state: the portable state of the matrix; None or empty if it has none.
            stand_in: what stands for the fused parameter, if it is a fragment that took no part in the exchange.
        """
        if stand_in is not None:
            self._known.add(stand_in)
        within = partial(part_of_layout, rows=piece.rows, dim=piece.dim)
        layout, kind = self._kind(g, division.whole, piece.task, state, within, whole=piece.dim == 0)
        return BoundParam(param, g, Task(piece.task, index, g, kind.template.name, layout), kind, division)

    def _kind(
        self,
        g: int,
        param: Tensor,
        name: str,
        state: dict[str, Any] | None,
        within: Callable[[Layout], Layout] = lambda layout: layout,
        whole: bool = False,
    ) -> tuple[Layout, ParamKind]:
        """Find the layout and the kind of a matrix.

        If the parameter is a stack of independent matrices whose first dimension is sharded, the result describes
        this rank's entries of the stack only. Elementwise work needs no such layout: it runs on fragments anyway.

        Args:
            g: the index of the parameter group.
            param: the parameter that holds the matrix.
            name: the name of the matrix.
            state: the portable state of the matrix; None or empty if it has none.
            within: maps the layout of the parameter to the layout of the matrix.
            whole: never to describe some entries only, as `within` chooses among entries by their place in the whole.
        """
        layout = within(self.layout(param))
        kind = self._captured(g, self._spec(layout.shape, param), name, state)
        alone = whole or kind.joint is not None or elementwise(kind)
        own = None if alone else self._entries(g, param, name, state, layout, kind, within)
        return own or (layout, kind)

    def _entries(
        self,
        g: int,
        param: Tensor,
        name: str,
        state: dict[str, Any] | None,
        layout: Layout,
        kind: ParamKind,
        within: Callable[[Layout], Layout] = lambda layout: layout,
    ) -> tuple[Layout, ParamKind] | None:
        """Find the layout and the kind of this rank's entries of a stack; None unless all ranks update their own.

        Args:
            layout, kind: those of the whole stack.
            g, param, name, state, within: as for `_kind`.
        """
        if not cut_along_experts(param):
            return None
        if (numbers := numbers_of_entries(layout)) == [layout.shape[0]] or not independent(kind):
            return None
        own = within(self.layout(param, batch_dims=1))
        if not own.shape[0] and own.grid.shards == 1:  # what is empty needs no owner, and no replica of it sends
            own = replace(own, grid=Grid(((self.rank,),)))
        parts: dict[int, ParamKind] = {}
        for number in numbers:
            spec = replace(self._spec((number, *layout.shape[1:]), param), part=True)
            parts[number] = self._captured(g, spec, name, state_of_entries(state, layout.shape[0], number))
            if not same_but_sizes(kind, parts[number]):
                return None
        return own, parts[own.shape[0]]

    def _captured(self, g: int, spec: ParameterSpec, name: str, state: dict[str, Any] | None) -> ParamKind:
        return self.capture.kind_of(self.optimizer.param_groups[g], spec, name, state or None)

    def _spec(self, shape: Shape, param: Tensor) -> ParameterSpec:
        stand_in = self._known.standing(param)
        marks = marks_of(param if stand_in is None else stand_in.fragment)
        return ParameterSpec(shape, param.dtype, grad_dtype(param), param.device, tuple(sorted(marks.items())))

    def layout(self, param: Tensor, batch_dims: int = 0) -> Layout:
        """Return how a parameter is laid out over ranks; `batch_dims` is that of `dtensor_layout`."""
        if (stand_in := self._known.standing(param)) is not None:
            return self._spread(stand_in.tiling.layout(self.rank, batch_dims=batch_dims))
        if isinstance(param, DTensor):
            return self._spread(dtensor_layout(param, self.rank, batch_dims=batch_dims))
        if self.replicas:
            return replicated_layout(param.shape, self.replicas)
        return local_layout(param.shape, self.rank)

    def _spread(self, layout: Layout) -> Layout:
        """Repeat a DTensor's layout over the ranks of `replicate=`, unless its own mesh contains them all."""
        if not self.replicas or set(self.replicas) <= set(layout.grid.members()):
            return layout
        rows = self._rows_of_replicas(layout.grid.ranks)
        return replace(layout, grid=Grid(rows))

    def _box(self, layout: Layout) -> Box:
        return layout.boxes[layout.grid.find(self.rank)[1]]

    @property
    def _known(self) -> StandIns:
        if self._stand_ins is None:  # nobody asked for an exchange: no parameter is a fragment
            self._stand_ins = StandIns()
        return self._stand_ins

    def _replicate_group(self) -> dist.ProcessGroup:
        given = self.options.replicate
        group = given.get_group() if isinstance(given, DeviceMesh) else given
        assert group is not None
        return group

    def _rows_of_replicas(self, rows: GridRows) -> GridRows:
        if rows not in self._rows:
            everybody: list[Any] = [None] * len(self.replicas)
            dist.all_gather_object(everybody, rows, group=self._replicate_group())
            self._rows[rows] = tuple(row for own in everybody for row in own)
        return self._rows[rows]


def replica_ranks(given: DeviceMesh | dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of `replicate=`, ascending; none if it is None."""
    if given is None:
        return ()
    group = given.get_group() if isinstance(given, DeviceMesh) else given
    return tuple(sorted(dist.get_process_group_ranks(group)))


def meshes_of(params: Sequence[Tensor]) -> list[DeviceMesh]:
    """Return the device meshes of the DTensors among some parameters, each mesh once."""
    return list({id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values())
