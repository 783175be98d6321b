"""One optimizer on one rank: its plain steps on whole matrices, then the wrapped ones on fragments."""

from __future__ import annotations

import hashlib
import pickle
import random
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import canzona_compile
from canzona_compile.errors import CanzonaError, InvalidGradient, UnsupportedLayout, UnsupportedOptimizer
from canzona_compile.tools.verification.compare import EQUAL, Distance, distance
from survey_catalog import build
from survey_results import (
    COMPILED,
    ELEMENTWISE,
    ERROR,
    INTERPRETED,
    PLAIN_FAILS,
    REFUSED,
    WRONG,
    Difference,
    Finding,
    Nature,
)

SHAPES = ((10, 6), (7, 12), (10, 6))
ALIKE = 1e-6  # of the largest update, in float64: parts that differ by less were updated element by element
REFUSALS = (UnsupportedOptimizer, UnsupportedLayout, InvalidGradient)
Matrices = list[Tensor]


def survey(name: str, steps: int, seed: int) -> Finding:
    """Everything about one optimizer; every rank calls it with the same arguments."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()  # what one optimizer left behind must not change how the next one is traced
    try:
        nature = nature_of(name, steps, seed)
        plain = Run(name, matrices(seed), seed)
        snapshots = [plain.step(number, steps) for number in range(steps)]
    except Exception as error:
        return Finding(name, PLAIN_FAILS, told(error))
    finding = Finding(name, ERROR, nature=nature)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        wrapped = Run(name, [distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in matrices(seed)], seed)
        canzona_compile.wrap(wrapped.optimizer)
        begin = time.perf_counter()
        params = Tally()
        for number, expected in enumerate(snapshots):
            found = wrapped.step(number, steps)
            if number == 0:
                finding = replace(finding, seconds=time.perf_counter() - begin)
            params.add({f"step {number + 1}, matrix {i}": t for i, t in enumerate(found)}, expected)
        state = Tally()
        state.add(dict(wrapped.leaves()), dict(plain.leaves()))
    except CanzonaError as error:
        return replace(finding, outcome=REFUSED if isinstance(error, REFUSALS) else ERROR, reason=told(error))
    except Exception as error:
        return replace(finding, reason=told(error))
    finding = replace(finding, params=params.worst(), state=state.worst(), **figures(wrapped.optimizer))
    if params.worst().equal and state.worst().equal:
        return replace(finding, outcome=finding.mode)
    by_nature = "; draws random numbers, and owners draw in another order than one process" if nature.random else ""
    place = params.worst().where or state.worst().where
    return replace(finding, outcome=WRONG, reason=f"first at {place}{by_nature} {finding.reason}".strip())


def figures(optimizer: Any) -> dict[str, Any]:
    """What the report says: how matrices were updated, and why not by compiled code."""
    report = optimizer.canzona.report()
    mode = INTERPRETED if report.fallbacks else COMPILED if report.tasks else ELEMENTWISE
    reason = "; ".join(dict.fromkeys(report.fallbacks.values()))
    return {"mode": mode, "reason": reason, "captures": report.captures, "variants": report.variants}


class Run:
    """An optimizer, plain or to be wrapped, with its own copy of some matrices."""

    def __init__(self, name: str, values: Matrices, seed: int, only: Sequence[int] | None = None) -> None:
        """Build it.

        Args:
            only: which of the matrices these are, by their positions: they get the gradients of those.
        """
        draw_from(seed)
        self._seed = seed
        self._only = range(len(values)) if only is None else only
        self.params = [Parameter(v.clone()) for v in values]
        self._cut: tuple[slice, slice] | None = None
        self.optimizer: Optimizer = build(name, self.params)
        self._rates = [group.get("lr") for group in self.groups]
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()  # schedule-free ones step in this mode only

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its parameter groups; some that go around another optimizer show none."""
        return getattr(self.optimizer, "param_groups", [])

    def cut(self, rows: slice, columns: slice) -> Run:
        """Take gradients of a part: the matrices are parts themselves."""
        self._cut = rows, columns
        return self

    def step(self, number: int, steps: int) -> Matrices:
        """Another lr and other gradients on each step, the same seed; whole matrices after it."""
        gradients = matrices(self._seed + 1 + number)
        for param, index in zip(self.params, self._only, strict=True):
            whole = gradients[index] if self._cut is None else gradients[index][self._cut].contiguous()
            whole = whole.to(param.dtype)
            param.grad = (
                distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
                if isinstance(param, DTensor)
                else whole
            )
        for group, rate in zip(self.groups, self._rates, strict=True):
            if isinstance(rate, float):
                group["lr"] = rate * (1 - 0.5 * number / steps)
        draw_from(self._seed + number)
        self.optimizer.step()
        return [whole_of(p).clone() for p in self.params]

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """State and hyperparameters, as `state_dict` shows them, whole: a collective."""
        shown = self.optimizer.state_dict()
        for path, value in pytree.tree_flatten_with_path(shown)[0]:
            yield from opened(pytree.keystr(path), value)


def opened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A leaf, or what an object of the optimizer's own (a projector, a preconditioner) holds."""
    if isinstance(value, Tensor):
        yield name, whole_of(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for path, part in pytree.tree_flatten_with_path(vars(value))[0]:
            yield from opened(f"{name}.{pytree.keystr(path)}", part)
    else:
        yield name, value


class Tally:
    """Compares leaf by leaf and remembers the first difference and the largest."""

    def __init__(self) -> None:
        self._largest, self._first = EQUAL, ""

    def add(self, found: dict[str, Any], expected: dict[str, Any] | Matrices) -> None:
        wanted = expected if isinstance(expected, dict) else dict(zip(found, expected, strict=True))
        for name in {**wanted, **found}:
            if name in found and name in wanted:
                gap = distance(found[name], wanted[name])
            else:
                gap = Distance(False, None, None, "missing" if name in wanted else "superfluous")
            if not gap.equal and not self._first:
                self._first = f"{name}: {gap.remark}" if gap.remark else name
            self._largest = self._largest.worst(gap)

    def worst(self) -> Difference:
        largest = self._largest
        return Difference(largest.equal, largest.ulps, largest.relative, self._first)


def nature_of(name: str, steps: int, seed: int) -> Nature:
    """Run the plain optimizer on parts: what belongs together changes when it is apart."""
    values = matrices(seed)
    together = last(Run(name, values, seed), steps)
    if draws(Run(name, values, seed), steps, seed):
        return Nature(None, None, True)
    alone = [last(Run(name, [m], seed, [i]), steps)[0] for i, m in enumerate(values)]
    coupled = any(not distance(a, b).equal for a, b in zip(alone, together, strict=True))
    try:
        return Nature(mixes(name, values[0].double(), steps, seed), coupled, False)
    except Exception:  # some hold state in float32 only
        return Nature(None, coupled, False)


def mixes(name: str, first: Tensor, steps: int, seed: int) -> bool:
    """Does half of a matrix, alone, get another update? In float64: what remains of rounding is far below ALIKE."""
    update = last(Run(name, [first], seed, [0]), steps)[0] - first
    rows, columns = SHAPES[0]
    for part in [(slice(0, rows // 2), slice(None)), (slice(None), slice(0, columns // 2))]:
        own = first[part].contiguous()
        gap = (last(Run(name, [own], seed, [0]).cut(*part), steps)[0] - own) - update[part]
        if not gap.abs().max() <= ALIKE * update.abs().max():  # so that NaN is a difference
            return True
    return False


def draws(run: Run, steps: int, seed: int) -> bool:
    """Do its steps draw random numbers?"""
    for number in range(steps):
        draw_from(seed + number)  # as the step does first
        before = generators()
        run.step(number, steps)
        if generators() != before:
            return True
    return False


def last(run: Run, steps: int) -> Matrices:
    for number in range(steps):
        found = run.step(number, steps)
    return found


def matrices(seed: int) -> Matrices:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def whole_of(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def draw_from(seed: int) -> None:
    """Seed every generator that an optimizer may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def generators() -> str:
    """Where the generators stand."""
    states = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state())
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


def told(error: BaseException) -> str:
    """An error in a line: what it says, and where it comes from unless it is a refusal."""
    text = error.problem if isinstance(error, CanzonaError) else str(error).strip()
    line = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    if isinstance(error, REFUSALS):
        return line
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = traceback.extract_tb(cause.__traceback__)
    return f"{line} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else line
