"""One optimizer on one rank: its plain steps on whole matrices, then the wrapped ones on fragments."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import canzona_compile
from canzona_compile.compat.optimizer_class import class_as_written
from canzona_compile.errors import CanzonaError, InvalidGradient, UnsupportedLayout, UnsupportedOptimizer
from canzona_compile.tools.verification.compare import EQUAL, Distance, distance
from survey_catalog import Catalog, catalog
from survey_results import (
    ERROR,
    PLAIN_FAILS,
    REFUSED,
    WRONG,
    Difference,
    Finding,
    Nature,
)

ALIKE = 1e-6  # of the largest update, in float64: parts that differ by less were updated element by element
REFUSALS = (UnsupportedOptimizer, UnsupportedLayout, InvalidGradient)
Matrices = list[Tensor]


@dataclass(frozen=True, slots=True)
class Trial:
    """One optimizer, and how it is tried.

    Attributes:
        package: its name in findings.
        place: of its catalog, see `survey_catalog.catalog`.
        name: of the optimizer.
        checkout: the folder that holds the package, if it is not installed.
        layout: how the matrices lie: "fsdp" (rows are sharded), "tp" (columns are) or "ddp" (equal copies).
        nature: whether to find out what the optimizer is, which takes several runs of it.
    """

    package: str
    place: str
    name: str
    steps: int
    seed: int
    checkout: str = ""
    layout: str = "fsdp"
    nature: bool = True

    @property
    def catalog(self) -> Catalog:
        return catalog(self.place, self.checkout)


def survey(trial: Trial) -> Finding:
    """Everything about one optimizer; every rank calls it with the same arguments."""
    return replace(surveyed(trial), package=trial.package, layout=trial.layout)


def surveyed(trial: Trial) -> Finding:
    warnings.simplefilter("ignore")
    steps = trial.steps
    try:
        with untouched():
            nature = nature_of(trial) if trial.nature else None
        with untouched():
            plain = Run(trial, matrices(trial))
            plain.optimizer.__class__ = class_as_written(type(plain.optimizer))  # as `verify` does
            snapshots = [plain.step(number) for number in range(steps)]
    except Exception as error:
        return Finding(trial.name, PLAIN_FAILS, told(error))
    finding = Finding(trial.name, ERROR, nature=nature)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        with untouched():
            wrapped = Run(trial, [laid_out(value, trial.layout, mesh) for value in matrices(trial)])
            alone = partial(trial.catalog.build, trial.name) if trial.catalog.alone else None
            replicate = mesh if trial.layout == "ddp" else None
            canzona_compile.wrap(wrapped.optimizer, replicate=replicate, one_per_matrix=alone)
            begin = time.perf_counter()
            found = [wrapped.step(0)]
            finding = replace(finding, seconds=time.perf_counter() - begin)
            found += [wrapped.step(number) for number in range(1, steps)]
            finding = replace(finding, **figures(wrapped.optimizer))
            params = compared(found, snapshots)
            state = Tally()
            if not trial.catalog.alone:
                state.add(dict(wrapped.leaves()), dict(plain.leaves()))
    except CanzonaError as error:
        return replace(finding, outcome=REFUSED if isinstance(error, REFUSALS) else ERROR, reason=told(error))
    except Exception as error:
        return replace(finding, reason=told(error))
    finding = replace(finding, params=params.worst(), state=None if trial.catalog.alone else state.worst())
    if params.worst().equal and state.worst().equal:
        return replace(finding, outcome=finding.mode)
    place = params.worst().where or state.worst().where
    return replace(finding, outcome=WRONG, reason=f"first at {place} {finding.reason}".strip())


def compared(found: Sequence[Matrices], expected: Sequence[Matrices]) -> Tally:
    """Compare the matrices after each step."""
    tally = Tally()
    for number, (own, other) in enumerate(zip(found, expected, strict=True), 1):
        tally.add({f"step {number}, matrix {i}": t for i, t in enumerate(own)}, other)
    return tally


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Run as in a process of its own: what Dynamo has compiled before decides how compiled functions round."""
    torch._dynamo.reset()
    yield


def laid_out(value: Tensor, layout: str, mesh: DeviceMesh) -> Tensor:
    """Lay a matrix out as torch's parallelisms do."""
    if layout == "ddp":
        return value
    return distribute_tensor(value, mesh, [Shard(0 if layout == "fsdp" else 1)], src_data_rank=None)


def figures(optimizer: Any) -> dict[str, Any]:
    """How matrices were updated, as `explain` says, and why not by compiled code."""
    report, rows = optimizer.canzona.report(), optimizer.canzona.explain().parameters
    ways = Counter(" ".join(filter(None, (row.how, row.cell))) for row in rows)
    reason = "; ".join(dict.fromkeys(report.fallbacks.values()))
    mode = "+".join(way for way, _ in ways.most_common())
    return {"mode": mode, "reason": reason, "captures": report.captures, "variants": report.variants}


class Run:
    """An optimizer, plain or to be wrapped, with its own copy of some matrices."""

    def __init__(self, trial: Trial, values: Matrices, only: Sequence[int] | None = None) -> None:
        """Build it.

        Args:
            only: which of the matrices these are, by their positions: they get the gradients of those.
        """
        draw_from(trial.seed)
        self.trial = trial
        self._only = range(len(values)) if only is None else only
        self.params = [Parameter(v.clone()) for v in values]
        self._cut: tuple[slice, slice] | None = None
        self.optimizer: Optimizer = trial.catalog.build(trial.name, self.params)
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

    def step(self, number: int) -> Matrices:
        """Another lr and other gradients on each step, the same seed; whole matrices after it."""
        gradients = matrices(self.trial, 1 + number)
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
                group["lr"] = rate * (1 - 0.5 * number / self.trial.steps)
        draw_from(self.trial.seed + number)
        self.optimizer.step()
        return [whole_of(p).clone() for p in self.params]

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """State and hyperparameters, as `state_dict` shows them, whole: a collective."""
        shown = self.optimizer.state_dict()
        for path, value in pytree.tree_flatten_with_path(shown)[0]:
            yield from opened(pytree.keystr(path), value)


def opened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A leaf, or what an object of the optimizer's own (a projector, a preconditioner) holds."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__"):
        for part in value.__tensor_flatten__()[0]:  # numbers in 8 bits and their scales
            yield from opened(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, Tensor):
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


def nature_of(trial: Trial) -> Nature:
    """Run the plain optimizer on parts: what belongs together changes when it is apart."""
    values = matrices(trial)
    together = last(Run(trial, values))
    if draws(Run(trial, values)):
        return Nature(None, None, True)
    alone = [last(Run(trial, [m], [i]))[0] for i, m in enumerate(values)]
    coupled = any(not distance(a, b).equal for a, b in zip(alone, together, strict=True))
    try:
        return Nature(mixes(trial, values[0].double()), coupled, False)
    except Exception:  # some hold state in float32 only
        return Nature(None, coupled, False)


def mixes(trial: Trial, first: Tensor) -> bool:
    """Does half of a matrix, alone, get another update? In float64: what remains of rounding is far below ALIKE."""
    update = last(Run(trial, [first], [0]))[0] - first
    rows, columns = first.shape
    for part in [(slice(0, rows // 2), slice(None)), (slice(None), slice(0, columns // 2))]:
        own = first[part].contiguous()
        gap = (last(Run(trial, [own], [0]).cut(*part))[0] - own) - update[part]
        if not gap.abs().max() <= ALIKE * update.abs().max():  # so that NaN is a difference
            return True
    return False


def draws(run: Run) -> bool:
    """Do its steps draw random numbers?"""
    trial = run.trial
    for number in range(trial.steps):
        draw_from(trial.seed + number)  # as the step does first
        before = generators()
        run.step(number)
        if generators() != before:
            return True
    return False


def last(run: Run) -> Matrices:
    for number in range(run.trial.steps):
        found = run.step(number)
    return found


def matrices(trial: Trial, number: int = 0) -> Matrices:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(trial.seed + number)
    return [torch.randn(shape, generator=generator) for shape in trial.catalog.shapes]


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
