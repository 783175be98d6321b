"""Record what a step calls: a tree of operator calls, in which every path is one way through the optimizer's code.

A step on fake tensors is cheap, so the guard of a recorded path is to take the step again. While its calls are those of
a known path, they get the results of that path and nothing is computed; the numbers among their arguments are noted.
The first call that differs begins a new branch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from canzona_compile.compat.matmul_precision import precision_now
from canzona_compile.compat.torch_private import OpOverload, count_function_modes, no_dispatch, pytree
from canzona_compile.replica.raised import READS_NUMBERS, NoCollectives, Note, Untraceable, is_optimizer, name_of

NumberList = list[Any]

# Operators that read the float32 matmul precision.
PRODUCTS = {
    "mm",
    "bmm",
    "addmm",
    "addmm_",
    "baddbmm",
    "baddbmm_",
    "addbmm",
    "mv",
    "addmv",
    "addmv_",
    "dot",
    "convolution",
}
# Other settings that they read.
SETTINGS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@dataclass(eq=False, slots=True)
class RecordedCall:
    """A call of an operator, and the calls that were seen after it.

    Attributes:
        func: the operator; None for the root of the tree. Entries and exits of compiled functions stand there as well,
            see `compiled_calls`.
        numbers: the positions among the leaves of numbers, which may differ from step to step.
        varying: the positions in `numbers` of those that did differ.
        line: the line of the optimizer that calls it; 0 if unknown.
        precision: the float32 matmul precision that the step has set for this call; empty if it has set none.
    """

    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    numbers: tuple[int, ...] = ()
    first: NumberList = field(default_factory=list)
    varying: set[int] = field(default_factory=set)
    result: Any = None
    line: int = 0
    precision: str = ""
    next: list[RecordedCall] = field(default_factory=list)

    def fits(self, leaves: list[Any], precision: str) -> bool:
        """Tell whether a call of the same operator with these arguments differs in numbers at most."""
        if len(leaves) != len(self.leaves) or precision != self.precision:
            return False
        numbers = self.numbers
        for place, (own, given) in enumerate(zip(self.leaves, leaves, strict=True)):
            if own is given:
                continue
            if type(own) is not type(given):
                return False
            if place not in numbers:
                if not equal(own, given):
                    return False
            elif isinstance(own, Tensor) and own.dtype != given.dtype:
                return False
        return True


@dataclass(slots=True)
class CallPath:
    """One way through the step."""

    calls: list[RecordedCall] = field(default_factory=list)
    numbers: list[NumberList] = field(default_factory=list)

    def note_varying(self) -> None:
        """Remember which numbers differ from those of the step that was recorded."""
        for call, numbers in zip(self.calls, self.numbers, strict=True):
            if numbers != call.first:
                for place, (old, new) in enumerate(zip(call.first, numbers, strict=True)):
                    if not same_number(old, new):
                        call.varying.add(place)


class CallRecorder(NoCollectives):
    """Inside this mode, a step of a twin walks through the tree of calls. It must be inside the twin's fake mode."""

    def __init__(self, root: RecordedCall, note: Note) -> None:
        super().__init__()
        self.walk = CallPath()
        self.here, self.note = root, note
        self.ambient, self._precision = settings(), precision_now()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for the device of a tensor and the like
            return func(*args, **kwargs)
        leaves = flat(args, kwargs)
        precision = self.own_precision()
        call = self.known(func, leaves, precision)
        if call is None:
            call = self.note.noting(self._record)(func, args, kwargs, leaves, precision)
            self.here.next.append(call)
        self.go(call, leaves)
        return call.result

    def known(self, func: Any, leaves: list[Any], precision: str) -> RecordedCall | None:
        """Find a call among those that were seen here; None if it is another one."""
        for call in self.here.next:
            if call.func == func and call.fits(leaves, precision):
                return call
        return None

    def go(self, call: RecordedCall, leaves: list[Any]) -> None:
        """Take a call as the next one of the path."""
        self.walk.calls.append(call)
        self.walk.numbers.append([number_in(leaves[place]) for place in call.numbers])
        self.here = call

    def own_precision(self) -> str:
        """Return the float32 matmul precision that the step has set; empty if it has set none."""
        precision = precision_now()
        return "" if precision == self._precision else precision

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], precision: str
    ) -> RecordedCall:
        self.check(func)
        if settings() != self.ambient:
            raise Untraceable(f"its step changes torch's settings for {func}")
        if torch.is_grad_enabled():
            raise Untraceable(f"its step differentiates ({func})")
        if torch.Tag.inplace_view in func.tags:
            raise Untraceable(f"its step changes the shape of a tensor in place ({func})")
        result = func(*args, **kwargs)
        if not all(isinstance(value, Tensor) for value in pytree.tree_leaves(result)):
            item = name_of(func) == "_local_scalar_dense"
            raise Untraceable(READS_NUMBERS if item else f"its step reads the values of tensors ({func})")
        floating = all(t.is_floating_point() for t in pytree.tree_leaves((leaves, result)) if isinstance(t, Tensor))
        kinds = flat_kinds(func, args, kwargs, floating)
        numbers = tuple(place for place, number in enumerate(kinds) if number)
        first = [number_in(leaves[place]) for place in numbers]
        return RecordedCall(
            func, args, kwargs, leaves, numbers, first, set(), result, line_of(sys._getframe()), precision
        )


def flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call, and the entries of those that are lists."""
    leaves: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            leaves.append(len(value))
            leaves.extend(value)
        else:
            leaves.append(value)
    return leaves


def flat_kinds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], floating: bool) -> Iterator[bool]:
    """Tell of each leaf of `flat` whether it is a number that may differ from step to step without being another call.

    These are the floats, the integers for which an operator on floats takes any number, and what `torch.tensor` makes
    of a number. Other integers are shapes and dims, or decide about dtypes.
    """
    declared = {argument.name: argument.type for argument in func._schema.arguments}
    kinds = [*list(declared.values())[: len(args)], *(declared[name] for name in kwargs)]
    for kind, value in zip(kinds, (*args, *kwargs.values()), strict=True):
        takes_any = floating and ("number" in str(kind) or "float" in str(kind))
        entries = value if isinstance(value, list | tuple) else [value]
        if entries is value:
            yield False  # its length
        for entry in entries:
            yield is_number(entry, takes_any)


def is_number(value: Any, takes_any: bool) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and takes_any) or is_constant(value)


def is_constant(value: Any) -> bool:
    """Tell whether an argument is a real 0-d tensor, which `torch.tensor` made of a number."""
    return type(value) is Tensor and value.ndim == 0


def number_in(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with no_dispatch():  # the tensor is real, and the fake mode is still active
        return value.item()


def equal(own: Any, given: Any) -> bool:
    """Tell whether two arguments of one type that are no numbers are the same."""
    if isinstance(own, Tensor):  # `is` was asked before; real tensors are made anew on every step
        real = type(own) is Tensor and own.shape == given.shape and own.dtype == given.dtype
        with no_dispatch():
            return real and torch.equal(own, given)
    return bool(own == given)


def same_number(old: Any, new: Any) -> bool:
    return bool(old == new) or (old != old and new != new)


def settings() -> tuple[Any, ...]:
    """Return the settings of torch that operators read, but for the float32 matmul precision."""
    matmul = torch.backends.cuda.matmul
    own = tuple(getattr(matmul, name) for name in SETTINGS)
    return (*own, torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype())


def surroundings() -> tuple[Any, ...]:
    """Return the settings of torch that decide what a compiled function does, but no operator by itself."""
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    modes = count_function_modes()
    return (*casts, modes, torch.is_inference_mode_enabled())


def reads_precision(func: Any) -> bool:
    """Tell whether an operator reads the float32 matmul precision."""
    return isinstance(func, OpOverload) and name_of(func) in PRODUCTS


def line_of(frame: FrameType | None) -> int:
    """Return the line of the optimizer's own code that led to a frame; 0 if there is none."""
    while frame is not None:
        if is_optimizer(Path(frame.f_code.co_filename)):
            return frame.f_lineno
        frame = frame.f_back
    return 0
