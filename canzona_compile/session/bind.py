"""Bind an optimizer's parameters to tasks: find the name, the layout and the kind of each.

They are bound at the first step and no earlier, because frameworks replace parameters after the optimizer was built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.capture.batch_dim import num_batch_dims
from canzona_compile.capture.eager_parity import narrowed_on_owner, needs_whole_matrix
from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.sharding_rules import missing_rule, state_after_a_step
from canzona_compile.capture.templates import Capture
from canzona_compile.compat.telling import tell
from canzona_compile.eager.own_object import is_portable, saved_shapes
from canzona_compile.errors import CanzonaError, UnsupportedLayout, UnsupportedOptimizer
from canzona_compile.ir.layout import Box, Grid, Layout, Ranks, Shape, dtensor_layout, local_layout, replicated_layout
from canzona_compile.ir.options import Options
from canzona_compile.ir.split import Split, check_patterns, chosen
from canzona_compile.ir.step import Task
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.runtime.process_groups import distributed
from canzona_compile.session.params import check_disjoint, flat_shards, named_params, of_odd_class
from canzona_compile.session.plan import BoundParam, machine_of
from canzona_compile.session.stacks import kind_of, ranges
from canzona_compile.session.state import check_gathers
from canzona_compile.views.entries import (
    cut_along_experts,
    elementwise,
    independent,
    same_but_sizes,
    state_of_entries,
)
from canzona_compile.views.fragment import FragmentView
from canzona_compile.views.given_layout import GridRows, KnownFragments, check_layout_patterns, exchange_fragments
from canzona_compile.views.pieces import PiecesView
from canzona_compile.views.view import State

NARROWED = "its bits depend on where an element lies, and its graph computes numbers with fewer bits than its step"


class Binder:
    """Makes the tasks of an optimizer on this rank.

    Args:
        num_stacks: how many stacks some ranks share, and no others; None to count those of the optimizer.

    Attributes:
        replicas: the global ranks of `replicate=`, ascending; empty without it.
    """

    def __init__(
        self, optimizer: Optimizer, options: Options, capture: Capture, num_stacks: Mapping[Ranks, int] | None = None
    ) -> None:
        self.optimizer, self.options, self.capture = optimizer, options, capture
        self.rank = dist.get_rank() if distributed() else 0
        self.replicas, self._group = replica_ranks(options.replicate), group_of(options.replicate)
        self._rules: dict[Any, str] = {}  # by kind of parameter, the reason that `missing_rule` gives
        self._layouts: dict[Any, Layout] = {}  # by form of DTensor
        self._kinds: dict[Any, ParamKind] = {}  # by kind of parameter that has no state
        self._named = named_params(optimizer, options.names, options.prefix)
        self._num_stacks = dict(num_stacks or {})
        self._known = KnownFragments({}, {}, {})

    def exchanged(self) -> Binder:
        """Find out which plain tensors are fragments, before `bind`. This is a collective if there are any.

        What is wrong with a parameter is raised when that parameter is bound, because other ranks wait for this
        rank's part of the exchange.
        """
        self._known = exchange_fragments(self._named, self.options.layout, self._group, self.rank)
        return self

    def bind(self, refused: dict[str, CanzonaError] | None = None) -> list[BoundParam]:
        """Bind all parameters of the optimizer, after the exchange."""
        names, groups = [name for name, _, _ in self._named], range(len(self.optimizer.param_groups))
        try:
            self.capture.notice()  # of changes since `explain` or the last plan
            self.capture.rehearse([[name for name, g, _ in self._named if g == group] for group in groups])
        except Exception as error:
            told = flat_shards(self._named)
            reason = told or error
            if refused is not None and isinstance(reason, UnsupportedOptimizer | UnsupportedLayout):
                refused |= dict.fromkeys(names, reason)
                return []
            if told is None:
                raise
            raise told from error
        check_disjoint(self._named)
        if elsewhere := [error for name, error in self._known.refused.items() if name not in names]:
            raise elsewhere[0]  # of a parameter that other ranks have
        check_patterns(self.options.split, names)
        check_layout_patterns(self.options.layout, names)
        found: list[BoundParam] = []
        kinds = {(group, param.shape, param.dtype): None for _, group, param in self._named}
        numbers = {kind: number for number, kind in enumerate(kinds, 1)}
        for own in (one for one in self._named if one[0] not in (refused or ())):
            if number := numbers.pop((own[1], own[2].shape, own[2].dtype), 0):
                tell(f"capturing the step of {own[0]}", number, len(kinds))
            try:
                with at_parameter(own[0]):
                    found += self.bind_one(self.describe(len(found), *own))
            except CanzonaError as error:
                if refused is None:
                    raise
                refused[own[0]] = error
        return found

    def describe(
        self, index: int, name: str, group: int, param: Tensor, view: FragmentView | None = None
    ) -> BoundParam:
        """Find out all about a parameter that does not depend on the optimizer's code, after the exchange."""
        if param.is_complex():
            raise UnsupportedOptimizer(
                "complex parameters are not supported",
                hint="use two real parameters for the real and the imaginary part",
            )
        if name in self._known.refused:
            raise self._known.refused[name]
        view = view or self._known.views.get(name)
        shown = param if view is None else view.param
        layout = self._layout(shown, view)
        return BoundParam(shown, Task(name, index, group, "", layout), ParameterSpec.of(param, layout.shape), view)

    def _pieces(self, own: BoundParam, split: Split | None) -> tuple[BoundParam, ...]:
        """Divide a parameter by `split=` or among owners; none if it stays whole."""
        by_rows = split is None or split.dim >= self._dims(own.task.param_group, own.task.shape)  # not between matrices
        shared, ranges = self._ranges(own) if own.stand_in is None and by_rows else (own, [])
        if split is None and not ranges:
            return ()
        box = Box.whole(own.task.shape)
        if isinstance(own.param, DTensor):
            box = own.task.layout.boxes[own.task.layout.grid.find(self.rank)[1]]
        view = PiecesView(own.task.name, own.param, split, box, ranges)
        view.show()
        return (shared if ranges else own).shown_by(view)

    def _ranges(self, own: BoundParam) -> tuple[BoundParam, list[tuple[int, int]]]:
        """Divide a stack among its owners, see `stacks.ranges`.

        Returns:
            What is divided, which may be this rank's entries of the stack, as a stack of their own; and the ranges.
        """
        if not self._dims(own.task.param_group, own.task.shape) or (own.stacked and self.replicas):
            return own, []
        if own.stacked:
            own = own.entries_at(self._layout(own.param, None, 1))
        like = ParamExample(self.optimizer.param_groups[own.task.param_group], own.spec, own.task.name)
        owners, number = own.task.layout.grid.size, self._sharing(own.task.layout)
        return own, ranges(self.capture, like, owners, number, self.options.capacity)

    def _sharing(self, layout: Layout) -> int:
        """How many stacks the ranks of a layout share, and no others: all of these ranks count the same."""
        for name, group, param in self._named if not self._num_stacks else ():
            view = self._known.views.get(name)
            shown = param if view is None else view.param
            if self._dims(group, tuple(shown.shape)) and name not in self._known.refused:
                ranks = self._layout(shown, view, int(cut_along_experts(shown))).grid.members()
                self._num_stacks[ranks] = self._num_stacks.get(ranks, 0) + 1
        return self._num_stacks.get(layout.grid.members(), 1)

    def _dims(self, group: int, shape: Shape) -> int:
        return num_batch_dims(self.optimizer, self.optimizer.param_groups[group], len(shape))

    def _layout(self, shown: Tensor, view: FragmentView | None, batch_dims: int = 0) -> Layout:
        """How a parameter is laid out over ranks; `batch_dims` is that of `dtensor_layout`."""
        if view is not None:
            return self._spread(view.tiling.layout(self.rank, batch_dims=batch_dims))
        if isinstance(shown, DTensor):
            form = (shown.shape, shown.to_local().shape, shown.placements, shown.device_mesh, batch_dims)
            if form not in self._layouts:
                self._layouts[form] = dtensor_layout(shown, self.rank, batch_dims=batch_dims)
            return self._spread(self._layouts[form])
        if self.replicas:
            return replicated_layout(shown.shape, self.replicas)
        return local_layout(shown.shape, self.rank)

    def _spread(self, layout: Layout) -> Layout:
        """Repeat a DTensor's layout over the ranks of `replicate=`, unless its own mesh contains them all."""
        if not self.replicas or set(self.replicas) <= set(layout.grid.members()):
            return layout
        return replace(layout, grid=Grid(self._rows_of_replicas(layout.grid.ranks)))

    def _rows_of_replicas(self, rows: GridRows) -> GridRows:
        known = self._known.rows
        if rows not in known:
            everybody: list[Any] = [None] * len(self.replicas)
            dist.all_gather_object(everybody, rows, group=self._group)
            known[rows] = tuple(row for own in everybody for row in own)
        return known[rows]

    # -- its code ------------------------------------------------------------------------------------

    def bind_one(self, own: BoundParam) -> list[BoundParam]:
        """Bind one parameter: see how it is divided, and capture the code that steps it."""
        split = chosen(self.options.split, own.task.name, own.task.shape)
        odd = of_odd_class(own.task.name, own.param, "its update needs the whole matrix as one plain tensor")
        strided = odd if own.stand_in is None else own.stand_in.strided(split)
        pieces = () if strided else self._pieces(own, split)
        division = next((piece.division for piece in pieces), None)
        state = self.state_of(own, division)
        if division is None:
            return [self.bind_whole(own, state, strided)]
        states = division.state_in(state or {})
        bound = [self.captured(piece, state) for piece, state in zip(pieces, states, strict=True)]
        if any(b.kind.template.interpreted or needs_whole_matrix(b.kind.template) for b in bound):
            return bound
        whole = self.bind_whole(own, state)  # elementwise work gives the same on the whole and on pieces
        return [whole] if all(same_but_sizes(whole.kind, b.kind) for b in bound) else self.by_piece(own, bound)

    def by_piece(self, own: BoundParam, bound: Sequence[BoundParam]) -> list[BoundParam]:
        """Let owners step pieces whose update is elementwise, but depends on their sizes."""
        why = "its elementwise work depends on the sizes of the pieces, which have no fragments of their own"
        return [b.stepped_by(self.capture.interpreted(replace(own.spec, shape=b.task.shape), why)) for b in bound]

    def bind_whole(self, own: BoundParam, state: State | None, strided: CanzonaError | None = None) -> BoundParam:
        """Bind a parameter, or a slice of one, that is not a fused parameter to its optimizer.

        Args:
            strided: raised if ranks would have to put its fragments together; None if they can.
        """
        bound = self.captured(own, state)
        local = elementwise(bound.kind)
        if local and (reason := self._why_eager(bound)):
            own = self._entries(own, bound.kind, state) or own
            bound, local = own.stepped_by(self.capture.interpreted(own.spec, reason)), False
        if strided and not local:
            raise strided
        if not local:
            check_gathers(bound.task.layout, state or {})
        return bound

    def state_of(self, own: BoundParam, division: PiecesView | None = None) -> State | None:
        """The portable state of a parameter; of a plain fragment with DTensors as leaves."""
        view = own.stand_in
        if view is None:
            return self.optimizer.state.get(own.param)
        state = self.optimizer.state.get(view.source)
        if not state:
            return None
        found = view.lookalikes(state)
        if division is not None:
            view.whole_leaves = division.own_leaves(found)
        elif found:
            shapes = self._shapes_in(own, state)
            whole = {leaf for leaf in found if shapes.get(leaf, own.task.shape) != own.task.shape}
            view.whole_leaves = frozenset(whole)
        return view.state_in(state)[0]

    def _shapes_in(self, own: BoundParam, state: State) -> dict[str, Shape]:
        """The whole shapes of the leaves of a state, by name, as far as the optimizer's code tells them."""
        kind = self.captured(own, None).kind
        if kind.maker is not None and is_portable(state):
            return saved_shapes(state)
        if kind.recorder is not None:
            return {leaf.name: leaf.shape for leaf in kind.leaves(own.task.shape)}
        group = self.optimizer.param_groups[own.task.param_group]
        made = state_after_a_step(self.optimizer, group, own.spec)
        return {leaf: tuple(value.shape) for leaf, value in made.items()}

    def captured(self, own: BoundParam, state: State | None) -> BoundParam:
        """Bind a matrix with such portable state to its code.

        If it is a stack of independent matrices whose first dimension is sharded, the result is this rank's entries of
        the stack only. Elementwise work needs no such layout: it runs on fragments anyway.
        """
        kind = self._kind_of(own, state)
        entries = None if elementwise(kind) else self._entries(own, kind, state)
        return entries or own.stepped_by(kind)

    def _entries(self, own: BoundParam, kind: ParamKind, state: State | None) -> BoundParam | None:
        """Bind this rank's entries of a stack of a kind; None unless all ranks update their own."""
        if not own.stacked:
            return None
        whole = own.task.shape
        numbers = sorted({box.size[0] for box in own.task.layout.boxes})  # of entries, on all ranks
        of_each = self._dims(own.task.param_group, whole) and not kind.template.interpreted
        if numbers == [whole[0]] or not (of_each or independent(kind)):
            return None
        division = own.division
        layout = self._layout(own.param if division is None else division.source, own.stand_in, 1)
        if division is not None:
            layout = division.layout_of(own.task.name, layout)
        if not layout.shape[0] and layout.grid.shards == 1:  # it is empty: it needs no owner, and no replica sends it
            layout = replace(layout, grid=Grid(((self.rank,),)))
        parts: dict[int, ParamKind] = {}
        for number in numbers:
            part = replace(own, spec=replace(own.spec, shape=(number, *whole[1:]), part=True))
            parts[number] = self._kind_of(part, state_of_entries(state, whole[0], number))
            if not same_but_sizes(kind, parts[number]):
                return None
        return own.entries_at(layout).stepped_by(parts[layout.shape[0]])

    def _kind_of(self, own: BoundParam, state: State | None) -> ParamKind:
        """Find the kind of a parameter: without state once for all that are equal, as all take the same step then."""
        key = (own.task.param_group, own.spec)
        known = None if state else self._kinds.get(key)
        if known is None or all(known is not kind for kind in self.capture.kinds.values()):
            group = self.optimizer.param_groups[own.task.param_group]
            known = kind_of(self.capture, ParamExample(group, own.spec, own.task.name, state or None))
            if not state:
                self._kinds[key] = known
        return known

    def _why_eager(self, bound: BoundParam) -> str:
        """Why elementwise work runs neither on fragments nor by its graph; empty if it does."""
        param, kind = bound.param, bound.kind
        if isinstance(param, DTensor) and (reason := self._missing_rule(bound.task.param_group, param)):
            return reason
        machine = machine_of([bound.spec.device], self.options.rates)
        narrowed = (narrowed_on_owner(template, machine, bound.task.layout) for template in kind.templates.values())
        return NARROWED if self.options.numerics == "exact" and not kind.by_dispatch and any(narrowed) else ""

    def _missing_rule(self, group: int, param: DTensor) -> str:
        key = (group, param.shape, param.placements, param.device_mesh)
        if key not in self._rules:
            self._rules[key] = missing_rule(self.optimizer, self.optimizer.param_groups[group], param)
        return self._rules[key]


@contextlib.contextmanager
def at_parameter(name: str) -> Iterator[None]:
    """Inside this context, an error names a parameter."""
    try:
        yield
    except CanzonaError as error:
        if error.at is None or name not in error.at:
            raise type(error)(error.problem, at=name, hint=error.hint) from error
        raise


def group_of(given: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group of `replicate=`."""
    return given.get_group() if isinstance(given, DeviceMesh) else given


def replica_ranks(given: DeviceMesh | dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of `replicate=`, ascending; none if it is None."""
    group = group_of(given)
    return () if group is None else tuple(sorted(dist.get_process_group_ranks(group)))


def meshes_of(params: Sequence[Tensor]) -> list[DeviceMesh]:
    """Return the device meshes of the DTensors among some parameters, each mesh once."""
    return list({id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values())
