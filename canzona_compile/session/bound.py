"""What is known of a parameter once it is bound to a task, and of a matrix while it is being bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Layout
from canzona_compile.ir.step import Task
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.views.fragment import FragmentView
from canzona_compile.views.pieces import PiecesView
from canzona_compile.views.view import ParamView, State


@dataclass(frozen=True, eq=False, slots=True)
class BoundParam:
    """A parameter of the optimizer, or one piece of a fused parameter, with its task.

    Attributes:
        param: what a step sees: the parameter itself, or what the last of its views shows.
        param_group: the index of its parameter group.
        task: its task, with the layout.
        kind: its captured code and the leaves of its state.
        stand_in: shows the optimizer's parameter if that is a plain fragment; None otherwise.
        division: shows the fused parameter that it is a piece of; None for a whole parameter.
        rehearsed: the optimizer's parameter whose state this one has under ZeRO-1, where `param` is a double of it.
    """

    param: Tensor
    param_group: int
    task: Task
    kind: ParamKind
    stand_in: FragmentView | None = None
    division: PiecesView | None = None
    rehearsed: Tensor | None = None

    @property
    def views(self) -> tuple[ParamView, ...]:
        """How the optimizer's own parameter becomes `param`, view after view."""
        return tuple(view for view in (self.stand_in, self.division) if view is not None)

    @property
    def name(self) -> str:
        """The name of the optimizer's own parameter."""
        return next((view.name for view in self.views), self.task.name)

    @property
    def origin(self) -> Tensor:
        """The optimizer's own parameter."""
        return next((view.source for view in self.views), self.param)


@dataclass(frozen=True, eq=False, slots=True)
class Described:
    """All that binding finds out about one matrix. What comes after reads it here and not from the parameter.

    Attributes:
        name: of its task.
        group: the index of its parameter group.
        param, stand_in, division: as of `BoundParam`.
        pieces: the matrices that it consists of, if it is a fused parameter.
        strided: raised if ranks would have to put its fragments together; None if they can.
        layout: where its fragments lie.
        spec: what the optimizer's code can see of it.
        state: its portable state; None or empty if it has none.
        layout_of_entries: finds the layout of this rank's entries, if it is a stack that is cut between its matrices.
    """

    name: str
    group: int
    param: Tensor
    stand_in: FragmentView | None
    layout: Layout
    spec: ParameterSpec
    state: State | None = None
    division: PiecesView | None = None
    pieces: tuple[Described, ...] = ()
    strided: CanzonaError | None = None
    layout_of_entries: Callable[[], Layout] | None = None

    @property
    def fused(self) -> PiecesView | None:
        """Shows its pieces; None if it is not a fused parameter."""
        return next((piece.division for piece in self.pieces), None)

    def shown_by(self, view: PiecesView) -> tuple[Described, ...]:
        """Describe the pieces of it that a view shows.

        Raises:
            UnsupportedLayout: a fragment holds rows of a piece that are not consecutive in it.
        """
        found = []
        for part, param in zip(view.shown, view.params, strict=True):
            layout, entries = view.layout_of(part, self.layout), self.layout_of_entries
            piece = replace(
                self,
                name=part.name,
                param=param,
                division=view,
                layout=layout,
                spec=replace(self.spec, shape=layout.shape),
                layout_of_entries=None if entries is None else view.layout_of_entries(part, entries),
            )
            found.append(piece)
        return tuple(found)
