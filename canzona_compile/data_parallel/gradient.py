"""What `param.grad` is once a gradient was reduced: the whole gradient by shape, of which this rank holds a part.

Every rank has such a gradient for every parameter, also for those of which it holds no element. So code that asks
whether there is a gradient, or that scales all gradients, does the same on all ranks. Code that would compute another
result from a part than from the whole is refused: a norm, a comparison, a sum with other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from canzona_compile.compat.torch_private import NO_TORCH_FUNCTION, make_wrapper_subclass
from canzona_compile.errors import CanzonaError

aten = torch.ops.aten
SCALINGS = {aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar}
LIST_SCALINGS = {
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
}
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


class GradientEngine(Protocol):
    """What an operation on gradients needs of the other ranks."""

    def note_scaling(self, operation: str) -> None:
        """Remember that this rank scales gradients. All ranks must have done the same when the step begins."""

    def tell(self, error: CanzonaError) -> None:
        """Tell the other ranks of an error that this rank raises, so that none of them waits for it."""

    def whole(self, gradient: ReducedGradient) -> Tensor:
        """Gather a gradient from its owners. This is a collective."""

    def share_infinity(self, found: Tensor) -> None:
        """Make `found`, a tensor of one element, the maximum over all ranks. This is a collective."""


class ReducedGradient(Tensor):
    """A gradient that was reduced to its owners.

    Attributes:
        parts: the elements that this rank owns, flattened: views of the shards that it received. Empty if it owns none.
    """

    parts: Sequence[Tensor]
    origin: str
    engine: GradientEngine

    @staticmethod
    def __new__(cls, param: Tensor, parts: Sequence[Tensor], origin: str, engine: GradientEngine) -> ReducedGradient:
        made: ReducedGradient = make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        made.parts, made.origin, made.engine = parts, origin, engine
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = sum(part.numel() for part in self.parts)
        return f"ReducedGradient({self.origin}, shape={list(self.shape)}, {held} elements on this rank)"

    def full_tensor(self) -> Tensor:
        """Gather the whole gradient on this rank, as `DTensor.full_tensor` does. This is a collective.

        Returns:
            A plain tensor of the parameter's shape and dtype.
        """
        return self.engine.whole(self)

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            own = args[0]
            return ReducedGradient(own, own.parts, own.origin, own.engine)
        if func in SCALINGS and not isinstance(args[1], ReducedGradient):
            return scale(func, [args[0]], args[1], lambda part: func(part, args[1]))
        if func in LIST_SCALINGS:
            scale(func, args[0], args[1], lambda part: func([part], args[1]))
            return None
        if func is UNSCALE:
            return unscale(*args)
        refuse(func, next(a for a in flattened(args) if isinstance(a, ReducedGradient)))


def scale(func: Any, gradients: Sequence[Tensor], by: Any, apply: Callable[[Tensor], Any]) -> Any:
    """Scale gradients in place by one number."""
    own = [g for g in gradients if isinstance(g, ReducedGradient)]
    if isinstance(by, Tensor) and by.numel() != 1:
        refuse(func, own[0])
    names = f"{own[0].origin} and {len(own) - 1} more" if len(own) > 1 else own[0].origin
    own[0].engine.note_scaling(f"{func.overloadpacket.__name__.strip('_')} by {float(by)!r} of {names}")
    for gradient in gradients:
        for part in gradient.parts if isinstance(gradient, ReducedGradient) else (gradient,):
            apply(part)
    return gradients[0]


def unscale(gradients: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Unscale gradients and find out whether one of them, on any rank, is not finite. This is a collective."""
    parts: list[Tensor] = []
    engine: GradientEngine | None = None
    for gradient in gradients:
        if isinstance(gradient, ReducedGradient):
            parts += gradient.parts
            engine = gradient.engine
        else:
            parts.append(gradient)
    if parts:
        UNSCALE(parts, found, inverse)
    assert engine is not None
    engine.share_infinity(found)


def flattened(values: Sequence[Any]) -> list[Any]:
    """The values, with those of lists among them."""
    return [v for value in values for v in (value if isinstance(value, list | tuple) else (value,))]


def refuse(func: Any, gradient: ReducedGradient) -> NoReturn:
    """Raise for an operation, and tell the other ranks, which may wait for this one."""
    error = refusal(func, gradient)
    gradient.engine.tell(error)
    raise error


def refusal(func: Any, gradient: ReducedGradient) -> CanzonaError:
    """Say why an operation on a reduced gradient is refused, and what to do instead."""
    name = func.overloadpacket.__name__
    if name == "add_":
        return CanzonaError(
            "backward ran again after the gradient was reduced",
            at=gradient.origin,
            hint="call zero_grad() first; to accumulate gradients, run all backward passes but the last inside "
            "no_sync()",
        )
    if "norm" in name:
        return CanzonaError(
            "this rank holds only a part of the reduced gradient, so its norm would differ between ranks",
            at=gradient.origin,
            hint="clip with optimizer.canzona.clip_grad_norm_(max_norm)",
        )
    if name in ("zero_", "_foreach_zero_"):
        return CanzonaError(
            "a reduced gradient cannot be zeroed in place",
            at=gradient.origin,
            hint="call zero_grad(set_to_none=True), which is the default",
        )
    return CanzonaError(
        f"this rank holds only a part of the reduced gradient, so {name} would give a wrong result",
        at=gradient.origin,
        hint="change gradients before they are reduced, in a hook of the parameter; scaling by a number also works",
    )
