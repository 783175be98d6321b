"""The gradients of one step: read once from their parameters, checked, and handed on to all that needs them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.capture.templates import Capture
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import InvalidGradient, some
from canzona_compile.ir.layout import local_part
from canzona_compile.rehearsal.rehearsal import Habits
from canzona_compile.replica.twin import any_attributes
from canzona_compile.session.params import check_attributes, check_gradient, check_main_gradients
from canzona_compile.session.plan import Plan

FORM = attrgetter("shape", "dtype", "layout")


class StepGradients:
    """The gradients that the next step of a plan takes.

    Args:
        capture: the captured code of the optimizer.
        plan: the plan.

    Attributes:
        found: by task, the gradient of its parameter; tasks without one are left out.
        habits: what the optimizer does to gradients besides reading them.
    """

    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.capture, self.plan = capture, plan
        self.habits: Habits = capture.rehearse()
        self.found: dict[str, Tensor] = {}
        self._views = {view: b.kind.grad_dtype for b in plan.bound.values() for view in b.views}
        for view in self._views:
            view.reuses = not self.habits.aliases
        self._params = {name: b.param for name, b in plan.bound.items()}
        self._dtypes = {name: b.kind.grad_dtype for name, b in plan.bound.items()}
        self._forms = {n: (local_part(p).shape, self._dtypes[n], torch.strided) for n, p in self._params.items()}
        # By task, the spec that a gradient may have without a full check: of the parameter, later of the last gradient
        # that was checked. None for plain tensors.
        self._specs: dict[str, Any] = {name: spec_of(param) for name, param in self._params.items()}

    # -- before a step -------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the gradients that parameters have now, and give views theirs, with the values of now.

        Raises:
            InvalidGradient: a gradient does not fit the parameter that a view shows.
        """
        for view, expected in self._views.items():
            if view.source.grad is not None:
                check_gradient(view.source, view.name, expected)
            view.take()
        grads = list(map(attrgetter("grad"), self._params.values()))
        self.found = dict(compress(zip(self._params, grads, strict=True), map(is_not, grads, repeat(None))))

    def check(self) -> None:
        """Raise InvalidGradient if the plan was not made for one of the gradients."""
        if self._as_planned():
            return
        for name, grad in self.found.items():
            check_attributes(grad, name, self.habits.asks_layout)
            check_gradient(self._params[name], name, self._dtypes[name])
            self._specs[name] = spec_of(grad)

    def _as_planned(self) -> bool:
        """Tell whether `check` has nothing to look at. Each step asks this, so plain gradients are compared in C."""
        grads = self.found.values()
        if self.habits.asks_layout or any_attributes(grads):
            return False
        own: Iterable[Tensor] = grads
        specs = [None] * len(grads)
        # FSDP2 gives gradients the same spec objects on each step, so comparing them costs little.
        if any(issubclass(kind, DTensor) for kind in set(map(type, grads))):
            own, specs = map(local_part, grads), list(map(spec_of, grads))
        return (
            list(map(FORM, own)) == list(map(self._forms.__getitem__, self.found))
            and list(map(self._specs.__getitem__, self.found)) == specs
        )

    def check_presence(self, ready: Iterable[str]) -> None:
        """Raise InvalidGradient if the optimizer would notice that a gradient is missing, or a parameter frozen.

        Args:
            ready: the tasks with gradients that have taken their first step.
        """
        habits, bound = self.habits, self.plan.bound
        if habits.aliases:
            self.capture.given.check({n: bound[n].origin for n in ready}, habits.aliases)
        if not self.found:
            check_main_gradients({name: b.origin for name, b in bound.items()})
        if habits.needs_gradients and (bare := [name for name in bound if name not in self.found]):
            raise InvalidGradient(
                f"{plain_class(self.capture.optimizer).__name__}.step changes parameters that have no gradient, or "
                "fails on them",
                at=some(bare),
                hint='give every parameter a gradient, or call wrap(..., missing_grads="zero") to use zeros',
            )
        if habits.asks_frozen and (frozen := [n for n in self.found if not bound[n].origin.requires_grad]):
            raise InvalidGradient(
                f"{plain_class(self.capture.optimizer).__name__}.step reads requires_grad, and "
                "this parameter has a gradient although requires_grad is False",
                at=some(frozen),
                hint="set param.grad = None",
            )

    def note_held(self) -> None:
        """Note the tensors of the state that a plain step may have left: the optimizer may hold gradients there."""
        for bound in self.plan.bound.values() if self.habits.aliases else ():
            self.capture.given.note(bound.origin, self.capture.optimizer.state.get(bound.origin))

    # -- after a step --------------------------------------------------------------------------------

    def drop(self, names: Iterable[str]) -> None:
        """Do to the gradients of all parameters what the optimizer's step does after its updates.

        Args:
            names: the tasks that stepped.
        """
        if self.habits.drops_gradients:
            self.found = {}
            for bound in self.plan.bound.values():
                bound.param.grad = bound.origin.grad = None
        for bound in (self.plan.bound[n] for n in names) if self.habits.aliases else ():
            self.capture.given.note(bound.origin, bound.origin.grad)

    def forget(self) -> None:
        """Let go of all gradients, and write what views hold as copies back to their parameters."""
        self.found = {}
        for view in reversed(self._views):
            view.give_back()


def spec_of(tensor: Tensor) -> Any:
    """The mesh and placements of a DTensor, with its shape and dtype; None for a plain tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None
