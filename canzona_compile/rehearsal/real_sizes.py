"""Rehearse a few steps at the real sizes of parameters: code may do something else from a size on.

Real values would cost too much, so tensors have fingerprints of what made them (`fingerprints`). Parameters stepped
together and apart must come to the same fingerprints. Some optimizers that are independent do not: they stack
parameters, or step them as one long vector. For these the steps of a miniature speak, if they make the same calls.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import FakeTensor, FakeTensorMode
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer, some
from canzona_compile.rehearsal.declared_writes import DeclaredWrites
from canzona_compile.rehearsal.diagnosis import NamesByGroup, difference, where
from canzona_compile.rehearsal.fingerprints import Fingerprints
from canzona_compile.rehearsal.scenario import Scenario
from canzona_compile.rehearsal.stepping import OneByOne
from canzona_compile.rehearsal.trial import Plainly, RehearsedSteps
from canzona_compile.replica.copies import CachedCalls
from canzona_compile.replica.external_counters import counts_of
from canzona_compile.replica.homes import hypers
from canzona_compile.replica.miniature import Chosen, Miniature
from canzona_compile.replica.outside import Outside
from canzona_compile.replica.raised import Note, NotingFunctions
from canzona_compile.replica.randomness import devices_among, seed_generators
from canzona_compile.replica.snapshot import Contents, Snapshot
from canzona_compile.replica.twin import as_written

MOST_STEPPING = 8  # parameters
SECONDS = 2  # of these that are of the kind of another one
MOST_PARAMETERS = 64  # with those that have no gradient
STEPS = 2


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

    def __init__(self, optimizer: Optimizer, chosen: Chosen, stateful: bool, real: bool, prints: Fingerprints) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.prints, self.real = prints, real
        super().__init__(optimizer, chosen, stateful)
        for i, param in enumerate(self.params):
            prints.mark(param, i)

    def sizes_of(self, shapes: Iterable[tuple[int, ...]]) -> Mapping[int, int]:
        return SameSizes() if self.real else super().sizes_of(shapes)

    def making(self) -> contextlib.AbstractContextManager[Any]:
        return self.mode

    def address_of(self, param: Tensor) -> int:
        return id(param)

    def label(self, value: Any) -> str | None:
        label = super().label(value)
        return f"a tensor: {self.prints.of(value)}" if label is None and isinstance(value, FakeTensor) else label

    def contents(self) -> Contents:
        """All that it holds, as far as a plan has to give it to its user."""
        walk = Snapshot(self.label)
        for i, param in enumerate(self.params):
            walk.found[f"parameter {i}"] = self.prints.of(param)
            walk.add(f"the state of parameter {i}", self.optimizer.state.get(param) or {})
        for g, group in enumerate(self.optimizer.param_groups):
            walk.add_home(f"param_groups[{g}]", hypers(group))
        for counter, number in counts_of(self.optimizer).items():
            if counter.home != "group":
                walk.found[f"{counter.home}.{counter.key}"] = number
        return walk.found


@dataclass(frozen=True, slots=True)
class Cast:
    """What takes part.

    Attributes:
        optimizer: the optimizer.
        chosen: which of its parameters.
        still: those among them that get no gradient, in the order of all.
        stateful: whether these begin with the state that they have now.
    """

    optimizer: Optimizer
    chosen: Chosen
    still: frozenset[int] = frozenset()
    stateful: bool = False


def coupled_at_real_sizes(optimizer: Optimizer, names: NamesByGroup, stateful: bool = False) -> str:
    """Find out whether parameters of the real sizes depend on one another, although small ones do not.

    Every rank finds the same, without communication. What cannot run without values is not checked.

    Args:
        optimizer: the optimizer.
        names: those of its parameters by group.
        stateful: whether parameters begin with the state that they have now.

    Returns:
        The name of a parameter that depends on others; empty if there is none.

    Raises:
        UnsupportedOptimizer: the step changes something outside of the optimizer.
    """
    declared = DeclaredWrites()
    for seed, cast in enumerate(casts(optimizer, stateful)):
        places, mixes = differing(cast, seed, declared)
        if places and declared.try_calls():
            places, mixes = differing(cast, seed, declared)
        if places is None:
            continue
        if not places or (mixes and same_calls(cast)):
            return ""
        return where(places, Scenario(cast.chosen, STEPS), names)
    return ""


def differing(cast: Cast, seed: int, declared: DeclaredWrites) -> tuple[list[str] | None, bool]:
    """Step all parameters together, and each by itself.

    Args:
        cast: what takes part.
        seed: makes other numbers on the host.
        declared: knows what operators write.

    Returns:
        The places where both differ first; None if the step fails without values. And whether an operator of the step
        of all together is given tensors of several parameters.
    """
    whole, prints = taken(cast, Fingerprints(Note(), seed, declared=declared))
    if whole.error is not None:
        return None, False
    parts, own = taken(cast, Fingerprints(Note(), seed, declared=declared), apart=whole)
    if own.too_long:
        return [], False
    return difference(whole, parts), prints.mixes


def check_real_sizes(optimizer: Optimizer, names: NamesByGroup, stateful: bool = False) -> None:
    """Raise if parameters of the real sizes depend on one another, see `coupled_at_real_sizes`.

    Raises:
        UnsupportedOptimizer: they do, or the step changes something outside of the optimizer.
    """
    if at := coupled_at_real_sizes(optimizer, names, stateful):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__} couples parameters at their real sizes: the update of one "
            "depends on others",
            at=at,
            hint="move the coupling (global norms, shared statistics) out of step(), for example to clip_grad_norm_",
        )


def casts(optimizer: Optimizer, stateful: bool) -> list[Cast]:
    """Choose parameters: the largest of several kinds step, and others are there without gradients, if that can be.

    Args:
        optimizer: the optimizer.
        stateful: whether parameters begin with the state that they have now.
    """
    places = [(g, i) for g, group in enumerate(optimizer.param_groups) for i in range(len(group["params"]))]
    params = {(g, i): optimizer.param_groups[g]["params"][i] for g, i in places}
    alike: Counter[Any] = Counter()
    ranked = []
    for g, i in places:
        param = params[g, i]
        kind = (g, tuple(param.shape), param.dtype)
        ranked.append((alike[kind], -param.numel(), g, i))
        alike[kind] += 1
    ranked.sort()
    order = [(g, i) for _, _, g, i in ranked]
    kinds = min(len(alike), MOST_STEPPING - SECONDS)
    stepping = {*order[:kinds], *order[len(alike) : len(alike) + MOST_STEPPING - kinds]}
    there = {*stepping, *order[:MOST_PARAMETERS]}
    found = []
    for taking_part in (there, stepping):
        groups = enumerate(optimizer.param_groups)
        chosen = [[i for i in range(len(group["params"])) if (g, i) in taking_part] for g, group in groups]
        still = [number for number, place in enumerate(sorted(taking_part)) if place not in stepping]
        found.append(Cast(optimizer, chosen, frozenset(still), stateful))
    return found if there != stepping else found[:1]


def taken(
    cast: Cast, prints: Fingerprints, apart: RehearsedSteps | None = None, real: bool = True
) -> tuple[RehearsedSteps, Fingerprints]:
    """Take a few steps without values.

    Args:
        cast: what takes part.
        prints: the mode in which it steps.
        apart: what all parameters did together, to step each by itself; None steps them together.
        real: whether sizes are the real ones, and not those of a miniature.

    Returns:
        What they did, and the mode.

    Raises:
        UnsupportedOptimizer: the step of all together changes something outside of the optimizer.
    """
    found = RehearsedSteps()
    params = [p for group in cast.optimizer.param_groups for p in group["params"]]
    try:
        # What draws into tensors with values draws from the generators of the process.
        with torch.random.fork_rng(devices=devices_among(params)):
            seed_generators(0, params[0].device)
            step_miniature(FakeMiniature(cast.optimizer, cast.chosen, cast.stateful, real, prints), cast, apart, found)
    except CanzonaError:
        raise
    except Exception as error:  # whatever its code raises on tensors without values
        found.error = error
    return found, prints


def step_miniature(small: FakeMiniature, cast: Cast, apart: RehearsedSteps | None, found: RehearsedSteps) -> None:
    """Take the steps of `taken`, and leave all outside of the optimizer as it was."""
    with Outside(cast.optimizer, small.label, small.kept, CachedCalls()) as outside:
        take_steps(small, cast, apart, found)
        if apart is None and (places := outside.changed()):
            raise UnsupportedOptimizer(
                f"{plain_class(cast.optimizer).__name__}.step changes {some(places)}, outside of the optimizer, with "
                "parameters of the real sizes",
                hint="keep per-parameter data in self.state[param], and counters in attributes of the optimizer",
            )


def take_steps(small: FakeMiniature, cast: Cast, apart: RehearsedSteps | None, found: RehearsedSteps) -> None:
    """Take the steps of `taken`, and add what they do."""
    stepping = stepping_of(cast, apart)
    with valueless(small):
        stepping.begin(small)
    for number in range(STEPS):
        small.prints.step = number
        give_gradients(small, cast.still)
        before = counts_of(small.optimizer)
        with valueless(small):
            stepping.step()
        found.counters |= {c for c, n in counts_of(small.optimizer).items() if c not in before or before[c] != n}
        found.after.append(small.contents())


@contextlib.contextmanager
def valueless(small: FakeMiniature) -> Iterator[None]:
    """Inside this context code runs on tensors that have no values. Nobody hears of its warnings."""
    note = small.prints.note
    with warnings.catch_warnings(), as_written(), note.read(), NotingFunctions(note), small.mode, small.prints:
        warnings.simplefilter("ignore")
        yield


def stepping_of(cast: Cast, apart: RehearsedSteps | None) -> Plainly:
    """Return what steps all parameters, or each by itself as plans do for an optimizer that did `apart` together."""
    return Plainly() if apart is None else OneByOne(bool(apart.counters))


def give_gradients(small: FakeMiniature, still: Container[int]) -> None:
    """Give each parameter a gradient of its own, but for some."""
    for i, param in enumerate(small.params):
        if i in still:
            continue
        with small.mode:
            param.grad = torch.empty_like(param, dtype=param.grad_dtype or param.dtype, requires_grad=False)
        small.prints.mark(param.grad, i, "gradient", small.prints.step)


def same_calls(cast: Cast) -> bool:
    """Tell whether steps at real sizes call what those of a miniature call, but for sizes and other numbers.

    Numbers that were read from tensors have to come to the same calls, which shows if they are others. Steps that are
    too long to compare count as the same.
    """
    by_size = []
    for real in (True, False):
        calls: list[Sequence[tuple[str, tuple[Any, ...]]]] = []
        for seed in range(2):
            found, prints = taken(cast, Fingerprints(Note(), seed, structural=True), real=real)
            if prints.too_long:
                return True
            if found.error is not None:
                return False
            calls.append(prints.called)
        one, other = calls
        read = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a[1] != b[1]]
        by_size.append(([made for made, _ in one], [made for made, _ in other], read))
    return by_size[0] == by_size[1]
