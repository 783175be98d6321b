"""Rehearse a few steps at the real sizes of parameters: code may do something else from a size on.

Real values would cost too much, so tensors have fingerprints of what made them (`fingerprints`). Parameters stepped
together and apart must come to the same fingerprints. Some optimizers that are independent do not: they stack parameters,
or compute in common what they do not use. For these the steps of a miniature speak, if they make the same calls.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.contents import Contents, Walk
from canzona_compile.capture.coupling import NamesByGroup, attribute_of, difference, where
from canzona_compile.capture.dynamo import as_written
from canzona_compile.capture.external_counters import CounterShadow, counts_of
from canzona_compile.capture.fingerprints import Fingerprints
from canzona_compile.capture.miniature import Chosen, Miniature, public
from canzona_compile.capture.outside import Outside
from canzona_compile.capture.parts import Company, step_one
from canzona_compile.capture.raised import Note, NotingFunctions
from canzona_compile.capture.trial import RehearsedSteps, Scenario
from canzona_compile.capture.twin import hypers, plain_class, step_plainly
from canzona_compile.compat.torch_private import FakeTensor, FakeTensorMode
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.ir.layout import Shape

MOST_PARAMETERS = 12  # the largest of each group, of different shapes first
STEPS = 3


class SameSizes(dict[int, int]):
    """Maps every size to itself."""

    def __missing__(self, size: int) -> int:
        return size

    def get(self, size: int, default: Any = None) -> int:
        """Return the size, known or not."""
        return size


class FakeMiniature(Miniature):
    """A copy of an optimizer with parameters that have no values, of the real sizes or of those of a miniature.

    Args:
        optimizer: the optimizer.
        chosen: which of its parameters the copy holds.
        stateful: whether they have the state that they have now.
        real: whether sizes are the real ones.
        prints: the mode that knows the values of its tensors.
    """

    def __init__(
        self, optimizer: Optimizer, chosen: Chosen, stateful: bool, real: bool, prints: Fingerprints
    ) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.prints, self.real = prints, real
        super().__init__(optimizer, chosen, stateful)
        for i, param in enumerate(self.params):
            prints.mark(param, "parameter", i)

    def sizes_of(self, shapes: Iterable[Shape]) -> Mapping[int, int]:
        return SameSizes() if self.real else super().sizes_of(shapes)

    def making(self) -> contextlib.AbstractContextManager[Any]:
        return self.mode

    def address_of(self, param: Tensor) -> int:
        return id(param)

    def label(self, value: Any) -> str | None:
        if isinstance(value, FakeTensor) and all(value is not param for param in self.params):
            return f"a tensor: {self.prints.of(value)}"
        return super().label(value)

    def contents(self) -> Contents:
        """All that it holds, as far as a plan has to give it to its user."""
        walk = Walk(self.label)
        for i, param in enumerate(self.params):
            walk.found[f"parameter {i}"] = self.prints.of(param)
            walk.add(f"the state of parameter {i}", self.optimizer.state.get(param) or {})
        for g, group in enumerate(self.optimizer.param_groups):
            for name, value in hypers(group).items():
                walk.add(f"param_groups[{g}][{name!r}]", value)
        for counter, number in counts_of(self.optimizer).items():
            if counter.home != "group":
                walk.found[f"{counter.home}.{counter.key}"] = number
        return walk.found


def check_real_sizes(optimizer: Optimizer, names: NamesByGroup, stateful: bool = False) -> None:
    """Raise if parameters of the real sizes depend on one another, although small ones do not.

    Every rank finds the same, without communication. What cannot run without values is not checked.

    Args:
        optimizer: the optimizer.
        names: those of its parameters by group, for the error.
        stateful: whether parameters begin with the state that they have now.

    Raises:
        UnsupportedOptimizer: they do.
    """
    chosen = largest(optimizer)
    for seed in range(2):
        whole = taken(optimizer, chosen, stateful, seed=seed)
        if whole.error is None:
            break
    else:
        return
    parts = taken(optimizer, chosen, stateful, seed=seed, apart=whole)
    still = {p for p, v in whole.after[0].items() if attribute_of(p) and whole.after[-1].get(p) == v}
    for after in (*whole.after, *parts.after):  # caches, which the first step fills
        for place in still & after.keys():
            del after[place]
    places = difference(whole, parts)
    if not places or same_calls(optimizer, chosen, stateful):
        return
    raise UnsupportedOptimizer(
        f"{plain_class(optimizer).__name__} couples parameters of these sizes, and does not couple smaller ones: the "
        "update of one depends on others",
        at=where(places, Scenario(chosen, STEPS, {}, {}, {}), names),
        hint="move the coupling (global norms, shared statistics) out of step(), for example to clip_grad_norm_",
    )


def largest(optimizer: Optimizer) -> list[list[int]]:
    """Choose parameters of each group: the largest of different shapes, then more of these shapes."""
    groups = [group["params"] for group in optimizer.param_groups]
    filled = [group for group in groups if group]
    share = max(MOST_PARAMETERS // len(filled), 2)
    chosen = []
    for params in groups:
        seen: Counter[Any] = Counter()
        order = []
        for i, param in enumerate(params):
            kind = (tuple(param.shape), param.dtype)
            order.append((seen[kind], -param.numel(), i))
            seen[kind] += 1
        chosen.append(sorted(i for _, _, i in sorted(order)[:share]))
    return chosen


def taken(
    optimizer: Optimizer,
    chosen: Chosen,
    stateful: bool,
    seed: int = 0,
    apart: RehearsedSteps | None = None,
    prints: Fingerprints | None = None,
    real: bool = True,
) -> RehearsedSteps:
    """Take a few steps without values.

    Args:
        apart: what all parameters did together, to step each by itself; None steps them together.
        prints: the mode in which it steps; None makes one of `seed`.
        real: whether sizes are the real ones, and not those of a miniature.
    """
    note = Note() if prints is None else prints.note
    prints = prints or Fingerprints(note, seed)
    small = FakeMiniature(optimizer, chosen, stateful, real, prints)
    outside, shadow = Outside(optimizer, small.label), CounterShadow(small.optimizer)
    found = RehearsedSteps()
    try:
        for prints.step in range(STEPS):
            give_gradients(small)
            before = counts_of(small.optimizer)
            with quietly(), as_written(), note.read(), NotingFunctions(note), small.mode, prints, torch.no_grad():
                if apart is None:
                    step_plainly(small.optimizer)
                else:
                    for i in reversed(range(len(small.params))):
                        if small.params[i].grad is not None:
                            step_one(small, i, Company.NONE)
                    if apart.counters:
                        shadow.count()
            found.counters |= {c for c, n in counts_of(small.optimizer).items() if c not in before or before[c] != n}
            found.after.append(small.contents())
    except CanzonaError:
        raise
    except Exception as error:  # whatever its code raises on tensors without values
        found.error = error
    finally:
        outside.restore()
    return found


def give_gradients(small: FakeMiniature) -> None:
    """Give each parameter a gradient of its own."""
    for i, param in enumerate(small.params):
        with small.mode:
            param.grad = torch.empty_like(param, dtype=param.grad_dtype or param.dtype, requires_grad=False)
        small.prints.mark(param.grad, "gradient", i, small.prints.step)


@contextlib.contextmanager
def quietly() -> Any:
    """Inside this context nobody hears of warnings: what tensors have no values for is not the user's doing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same_calls(optimizer: Optimizer, chosen: Chosen, stateful: bool) -> bool:
    """Tell whether steps at real sizes call what those of a miniature call, but for sizes and other numbers.

    Numbers that were read from tensors have to come to the same calls, which shows if they are others.
    """
    by_size = []
    for real in (True, False):
        calls: list[Sequence[tuple[str, tuple[Any, ...]]]] = []
        for seed in range(2):
            prints = Fingerprints(Note(), seed, structural=True)
            if taken(optimizer, chosen, stateful, prints=prints, real=real).error is not None:
                return False
            calls.append(prints.called)
        one, other = calls
        read = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a[1] != b[1]]
        by_size.append(([made for made, _ in one], [made for made, _ in other], read))
    return by_size[0] == by_size[1]
