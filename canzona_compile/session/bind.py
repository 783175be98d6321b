"""Bind an optimizer's parameters to tasks: find the name, the layout and the kind of each.

Parameters are bound at the first step and no earlier, because Accelerate and other frameworks replace parameters
after the optimizer was built.
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
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from canzona_compile.capture.batch_dim import first_dim_is_batch
from canzona_compile.capture.dynamo_oracle import ParameterSpec
from canzona_compile.capture.eager_parity import holistic
from canzona_compile.capture.sharding_rules import missing_rule
from canzona_compile.capture.templates import Capture, ParamKind
from canzona_compile.errors import CanzonaError, InvalidGradient, UnsupportedOptimizer
from canzona_compile.ir.layout import (
    Box,
    Grid,
    Layout,
    dtensor_layout,
    local_layout,
    local_part,
    replicated_layout,
)
from canzona_compile.ir.step import Task
from canzona_compile.options import Options
from canzona_compile.session.fused_params import Fused
from canzona_compile.split import check_patterns, chosen, part_of_layout


@dataclass(frozen=True, eq=False, slots=True)
class BoundParam:
    """A parameter of the optimizer, or one piece of a fused parameter, with its task.

    Attributes:
        param: the parameter; for a piece, the parameter that stands for it.
        param_group: the index of its parameter group.
        task: its task, with the layout.
        kind: its captured code and the leaves of its state.
        fused: the fused parameter that it is a piece of; None for a whole parameter.
    """

    param: Tensor
    param_group: int
    task: Task
    kind: ParamKind
    fused: Fused | None = None


def named_params(optimizer: Optimizer, names: Sequence[Sequence[str]] = ()) -> list[tuple[str, int, Tensor]]:
    """Name every parameter of an optimizer, with unique names.

    Args:
        optimizer: the optimizer.
        names: the names of the parameters in each parameter group that has no `param_names`.

    Returns:
        For each parameter its name, the index of its parameter group, and the parameter.
    """
    found = []
    for g, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or (names[g] if g < len(names) else ())
        for i, param in enumerate(group["params"]):
            found.append((str(known[i]) if i < len(known) else f"group{g}.param{i}", g, param))
    counts: dict[str, int] = {}
    unique = []
    for name, g, p in found:
        counts[name] = counts.get(name, 0) + 1
        unique.append((name if counts[name] == 1 else f"{name}#{counts[name]}", g, p))
    return unique


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
        self._rows: dict[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = {}

    def bind(self) -> list[BoundParam]:
        """Bind all parameters of the optimizer.

        Returns:
            One entry per parameter, and one per piece of a fused parameter.

        Raises:
            CanzonaError: a pattern of `split=` fits no parameter, or a parameter has a layout or an update that is
                not supported. The error then names the parameter.
        """
        named = named_params(self.optimizer, self.options.names)
        check_patterns(self.options.split, [name for name, _, _ in named])
        found: list[BoundParam] = []
        for own in named:
            found += self.bind_one(len(found), *own)
        return found

    def bind_one(self, index: int, name: str, group: int, param: Tensor) -> list[BoundParam]:
        """Bind one parameter.

        Args:
            index: the index of its first task.
            name: its name.
            group: the index of its parameter group.
            param: the parameter.

        Returns:
            One entry, or one entry per piece if the parameter is fused.

        Raises:
            CanzonaError: the parameter is not supported; the error names it.
        """
        try:
            return self._bind(index, name, group, param)
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
        if split is not None:
            pieces = self._bind_pieces(index, name, g, Fused(name, param, split, self._box(layout)))
            if any(b.kind.template.interpreted or holistic(b.kind.template) for b in pieces):
                return pieces  # elementwise work gives the same result on the pieces as on the whole
        layout, kind = self._kind(g, param, name, self.optimizer.state.get(param))
        elementwise = not kind.template.interpreted and not holistic(kind.template)
        if isinstance(param, DTensor) and elementwise and (reason := self._missing_rule(g, param)):
            kind = self.capture.interpreted(self._spec(layout, param), reason)
        return [BoundParam(param, g, Task(name, index, g, kind.template.name, layout), kind)]

    def _missing_rule(self, g: int, param: DTensor) -> str:
        key = (g, param.shape, param.placements, param.device_mesh)
        if key not in self._rules:
            self._rules[key] = missing_rule(self.optimizer, self.optimizer.param_groups[g], param)
        return self._rules[key]

    def _bind_pieces(self, index: int, name: str, g: int, fused: Fused) -> list[BoundParam]:
        states = fused.taken(self.optimizer.state.get(fused.whole) or {})
        found = []
        for i, (piece, state) in enumerate(zip(fused.pieces, states, strict=True)):
            own = f"{name}[{piece.name}]"
            within = partial(part_of_layout, rows=piece.rows, dim=fused.dim)
            layout, kind = self._kind(g, fused.whole, own, state, within)
            found.append(BoundParam(piece.param, g, Task(own, index + i, g, kind.template.name, layout), kind, fused))
        return found

    def _kind(
        self,
        g: int,
        param: Tensor,
        name: str,
        state: dict[str, Any] | None,
        within: Callable[[Layout], Layout] = lambda layout: layout,
    ) -> tuple[Layout, ParamKind]:
        """Find the layout and the kind of a matrix.

        If the parameter is a stack of independent matrices whose first dimension is sharded, the result describes
        this rank's entries of the stack only.

        Args:
            g: the index of the parameter group.
            param: the parameter that holds the matrix.
            name: the name of the matrix.
            state: the portable state of the matrix; None or empty if it has none.
            within: maps the layout of the parameter to the layout of the matrix.
        """
        layout = within(self.layout(param))
        kind = self._captured(g, layout, param, name, state)
        if isinstance(param, DTensor) and cut_along_experts(param) and first_dim_is_batch(kind.template):
            own = within(self._spread(dtensor_layout(param, self.rank, batch_dims=1)))
            local = self._captured(g, own, param, name, state)
            if same_but_sizes(kind, local):
                return own, local
        return layout, kind

    def _captured(self, g: int, layout: Layout, param: Tensor, name: str, state: dict[str, Any] | None) -> ParamKind:
        return self.capture.kind_of(self.optimizer.param_groups[g], self._spec(layout, param), name, state or None)

    def _spec(self, layout: Layout, param: Tensor) -> ParameterSpec:
        return ParameterSpec(layout.shape, param.dtype, grad_dtype(param), param.device)

    def layout(self, param: Tensor) -> Layout:
        """Return how a parameter is laid out over ranks."""
        if isinstance(param, DTensor):
            return self._spread(dtensor_layout(param, self.rank))
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

    def _rows_of_replicas(self, rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if rows not in self._rows:
            given = self.options.replicate
            group = given.get_group() if isinstance(given, DeviceMesh) else given
            everybody: list[Any] = [None] * len(self.replicas)
            dist.all_gather_object(everybody, rows, group=group)
            self._rows[rows] = tuple(row for own in everybody for row in own)
        return self._rows[rows]


def cut_along_experts(param: DTensor) -> bool:
    """Tell whether a parameter is a stack of matrices whose first dimension is sharded."""
    return param.ndim > 2 and any(isinstance(p, Shard) and p.dim == 0 for p in param.placements)


def same_but_sizes(whole: ParamKind, part: ParamKind) -> bool:
    """Tell whether the optimizer treats a part of a parameter as it treats the whole, apart from sizes."""

    def without_sizes(kind: ParamKind) -> list[Any]:
        calls = [n for n in kind.template.graph.nodes if n.op == "call_function"]
        return [
            (
                str(n.target),
                [a for a in n.args if isinstance(a, float)],
                [(key, value if isinstance(value, float) else None) for key, value in sorted(n.kwargs.items())],
            )
            for n in calls
        ]

    return without_sizes(whole) == without_sizes(part)


def replica_ranks(given: DeviceMesh | dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of `replicate=`, ascending; none if it is None."""
    if given is None:
        return ()
    group = given.get_group() if isinstance(given, DeviceMesh) else given
    return tuple(sorted(dist.get_process_group_ranks(group)))


def meshes_of(params: Sequence[Tensor]) -> list[DeviceMesh]:
    """Return the device meshes of the DTensors among some parameters, each mesh once."""
    return list({id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values())


def check_gradient(param: Tensor, name: str, expected: torch.dtype) -> None:
    """Refuse a gradient that cannot take part in this step.

    Args:
        param: a parameter with a gradient.
        name: the name of the parameter, for the error.
        expected: the dtype of the gradient that the plan was made for.

    Raises:
        InvalidGradient: the gradient is sparse or complex, has other placements than its parameter, or has another
            shape or dtype than planned.
    """
    grad = param.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise InvalidGradient(
            f"the gradient is {grad.layout}, not dense",
            at=name,
            hint="use sparse=False in the embedding, or keep this parameter in another optimizer",
        )
    if grad.is_complex():
        raise InvalidGradient("the gradient is complex", at=name)
    if isinstance(param, DTensor) and not (isinstance(grad, DTensor) and grad.placements == param.placements):
        raise InvalidGradient(
            f"the gradient is laid out as {getattr(grad, 'placements', 'a plain tensor')}, "
            f"the parameter as {param.placements}",
            at=name,
            hint="redistribute the gradient to the parameter's placements before step()",
        )
    if local_part(grad).shape != local_part(param).shape:
        raise InvalidGradient(
            f"the gradient's fragment is {list(local_part(grad).shape)}, the parameter's "
            f"{list(local_part(param).shape)}",
            at=name,
        )
    if grad.dtype != expected:
        raise InvalidGradient(f"the gradient is {grad.dtype}; the plan was made for {expected}", at=name)
