"""The gradients of one step: looked at once, by one pass, and handed on to all that needs them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from canzona_compile.capture.templates import Capture
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import InvalidGradient, some
from canzona_compile.ir.sharding import shard_dim
from canzona_compile.rehearsal.asked import lies_otherwise
from canzona_compile.rehearsal.rehearsal import Habits
from canzona_compile.session.plan import Plan
from canzona_compile.tensors import any_attributes, local_part, memory_of, user_attributes

GRAD, FORM = attrgetter("grad"), attrgetter("shape", "dtype", "layout")


class StepGradients:
    """The gradients that the next step of a plan takes.

    Attributes:
        found: by task, this rank's fragment of the gradient of its parameter; tasks without one are left out.
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
        self._whole: dict[str, Tensor] = {}  # those of `found`, as DTensors if they are such
        self._given: list[tuple[Tensor, Tensor, Tensor]] = []  # parameters, gradients of others' placements, and ours
        self._written: dict[str, weakref.ref[Tensor]] = {}  # by task, what the last step left NaN in
        for bound in plan.bound.values() if self.habits.aliases else ():  # a plain step may have left them in the state
            self._note(bound.origin, capture.optimizer.state.get(bound.origin))

    # -- before a step -------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the gradients that parameters have now, and give views theirs, with the values of now."""
        for view, expected in self._views.items():
            if view.source.grad is not None:
                self._checked(view.source, view.name, expected)
            view.take()
        grads = list(map(GRAD, self._params.values()))
        self._whole = dict(compress(zip(self._params, grads, strict=True), map(is_not, grads, repeat(None))))
        self.found = self._whole
        if any(issubclass(kind, DTensor) for kind in set(map(type, grads))):
            self.found = {name: local_part(grad) for name, grad in self._whole.items()}

    def check(self) -> None:
        """Raise InvalidGradient if the plan was not made for one of the gradients."""
        self._check_zeroed()
        if self._as_planned():
            return
        for name, grad in self._whole.items():
            check_attributes(grad, name, self.habits.asks_layout)
            own = self._checked(self._params[name], name, self._dtypes[name])
            self._whole[name], self.found[name] = own, own if self.found is self._whole else local_part(own)
            self._specs[name] = spec_of(own)

    def _checked(self, param: Tensor, name: str, expected: torch.dtype) -> Tensor:
        """The gradient of a parameter, which has it laid out like itself until `give_back`."""
        grad, own = param.grad, check_gradient(param, name, expected)
        if grad is not None and own is not grad:
            if self.habits.aliases or self.habits.writes_gradients:
                raise unlike_parameter(param, grad, name)  # the step would hold or write another tensor than the user's
            self._given.append((param, grad, own))
            param.grad = own
        return own

    def give_back(self) -> None:
        """Give parameters the gradients that they had, as far as the step did not drop them."""
        for param, grad, own in self._given:
            if param.grad is own:
                param.grad = grad
        self._given.clear()

    def _as_planned(self) -> bool:
        """Tell whether `check` has nothing to look at. Each step asks this, so plain gradients are compared in C."""
        whole = self._whole.values()
        if self.habits.asks_layout or any_attributes(whole):
            return False
        # FSDP2 gives gradients the same spec objects on each step, so comparing them costs little.
        specs = [None] * len(whole) if self.found is self._whole else list(map(spec_of, whole))
        return (
            list(map(FORM, self.found.values())) == list(map(self._forms.__getitem__, self.found))
            and list(map(self._specs.__getitem__, self.found)) == specs
        )

    def _check_zeroed(self) -> None:
        """Raise if a gradient that the last step wrote is there again, and was not zeroed."""
        for name, last in self._written.items():
            grad = self.plan.bound[name].origin.grad
            if grad is None or grad is not last():
                continue
            own = local_part(grad)
            if own.numel() and bool(own.flatten()[0].isnan()):
                raise InvalidGradient(
                    "the optimizer's step writes to gradients, and this gradient was not zeroed after the last step",
                    at=name,
                    hint="call zero_grad() after every step",
                )

    def check_presence(self, ready: Iterable[str]) -> None:
        """Raise InvalidGradient where it counts that gradients are missing, held, or of a frozen parameter."""
        habits, bound = self.habits, self.plan.bound
        for name in ready if habits.aliases and len(self.capture.given) else ():
            origin = bound[name].origin
            if memory_of(origin.grad) & self.capture.given.get(origin, set()):  # a plan has kept a copy of that one
                raise InvalidGradient(
                    f"it was written over an earlier gradient, which the optimizer holds in {some(habits.aliases)}",
                    at=name,
                    hint="call zero_grad(set_to_none=True) after every step, or let the optimizer keep a clone",
                )
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

    # -- after a step --------------------------------------------------------------------------------

    def leave(self, names: Iterable[str]) -> None:
        """Do to the gradients of all parameters what the optimizer's step does, after its updates."""
        if self.habits.drops_gradients:
            self.found = self._whole = {}
            for bound in self.plan.bound.values():
                bound.param.grad = bound.origin.grad = None
        elif self.habits.writes_gradients:  # the plain optimizer leaves other values there, which nobody may read
            self._written = {}
            for name in names:
                if (grad := self.plan.bound[name].origin.grad) is not None:
                    local_part(grad).fill_(float("nan"))
                    self._written[name] = weakref.ref(grad)
        for bound in (self.plan.bound[name] for name in names) if self.habits.aliases else ():
            self._note(bound.origin, bound.origin.grad)

    def _note(self, param: Tensor, tensors: Any) -> None:
        """Note the memory of a gradient, or of all tensors in a state, which may be one."""
        known = {memory for memory in self.capture.given.get(param, ()) if not memory.expired()}
        self.capture.given[param] = known | memory_of(*pytree.tree_leaves(tensors))

    def forget(self) -> None:
        """Let go of all gradients, and write what views hold as copies back to their parameters."""
        self.found = self._whole = {}
        self.give_back()
        for view in reversed(self._views):
            view.give_back()


def spec_of(tensor: Tensor) -> Any:
    """The mesh and placements of a DTensor, with its shape and dtype; None for a plain tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def check_gradient(param: Tensor, name: str, expected: torch.dtype) -> Tensor:
    """Return a gradient laid out like its parameter, and refuse one that cannot take part in this step.

    Args:
        expected: the dtype of the gradient that the plan was made for.
    """
    grad = param.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise InvalidGradient(
            f"the gradient is {grad.layout}, not dense",
            at=name,
            hint="build the embedding with sparse=False, or move this parameter to another optimizer",
        )
    if grad.is_complex():
        raise InvalidGradient(
            "the gradient is complex",
            at=name,
            hint="use real parameters; split a complex one into its real and imaginary part",
        )
    if isinstance(param, DTensor) and not (isinstance(grad, DTensor) and grad.placements == param.placements):
        if not isinstance(grad, DTensor) or not holds_slice(grad, param):
            raise unlike_parameter(param, grad, name)
        grad = grad.redistribute(placements=param.placements).detach()
    if local_part(grad).shape != local_part(param).shape:
        raise InvalidGradient(
            f"the local shard of the gradient is {list(local_part(grad).shape)}, but the shard of the "
            f"parameter is {list(local_part(param).shape)}",
            at=name,
        )
    if grad.dtype != expected:
        raise InvalidGradient(f"the gradient is {grad.dtype}, but the plan was made for {expected}", at=name)
    return grad


def holds_slice(grad: DTensor, param: DTensor) -> bool:
    """Whether each rank has the gradient of its fragment as a slice of what it has, so that nothing is sent."""
    pairs = [*zip(grad.placements, param.placements, strict=True)] if laid_out_on_mesh_of(grad, param) else []
    held, cut = {shard_dim(g) for g, _ in pairs}, {shard_dim(p) for g, p in pairs if g != p}
    return bool(cut) and not cut & held and all(g == p or (g.is_replicate() and type(p) is Shard) for g, p in pairs)


def laid_out_on_mesh_of(grad: DTensor, param: DTensor) -> bool:
    """Whether a gradient has a placement for each dim of its parameter's mesh, of which torch lets users leave some."""
    return grad.device_mesh == param.device_mesh and len(grad.placements) == len(param.placements)


def unlike_parameter(param: Any, grad: Tensor, name: str) -> InvalidGradient:
    """Make the error for a gradient that is not laid out like its parameter."""
    placements: Any = grad.placements if isinstance(grad, DTensor) else "of a plain tensor"
    partial = any(isinstance(placement, Partial) for placement in placements)
    summands = ". Each rank has a summand, and nobody has added them" if partial else ""
    return InvalidGradient(
        f"the gradient has placements {placements}, but the parameter has {param.placements}{summands}",
        at=name,
        hint="set param.grad = param.grad.redistribute(placements=param.placements) before step()"
        if isinstance(grad, DTensor) and laid_out_on_mesh_of(grad, param)
        else "make it by DTensor.from_local(grad, param.device_mesh, param.placements)",
    )


def check_attributes(grad: Tensor, name: str, asked: Collection[str] = ()) -> None:
    """Refuse a gradient of which its owner gets a copy that is unlike it: contiguous, without users' attributes.

    Args:
        asked: what the optimizer asks about the layout of gradients in memory, see `LayoutQuestions`.
    """
    if asked and lies_otherwise(local_part(grad), asked):
        raise InvalidGradient(
            "the optimizer's step depends on the strides of gradients. This gradient is not contiguous, "
            "but its owner receives a contiguous copy",
            at=name,
            hint="set param.grad = param.grad.contiguous() before step()",
        )
    if own := user_attributes(grad):
        raise InvalidGradient(
            f"the gradient has attributes that the owner would not receive: {some(own)}",
            at=name,
            hint="set these attributes on the parameter instead",
        )


def check_main_gradients(params: Mapping[str, Tensor]) -> None:
    """Raise if gradients are where no optimizer looks for them. Call this if no parameter has one."""
    if found := [name for name, param in params.items() if isinstance(getattr(param, "main_grad", None), Tensor)]:
        raise InvalidGradient(
            "no parameter has a gradient. The gradients in param.main_grad are not read",
            at=some(found),
            hint="set param.grad = param.main_grad (in the dtype of the parameter) before step()",
        )
