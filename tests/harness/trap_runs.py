"""Runs traps: the plain optimizer on whole tensors, then the wrapped one on a rank's fragments, by one function."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.harness.layouts import ALONE, Case, Laid, local, replicate_of
from tests.harness.pairs import same_bits, unlike
from tests.harness.ranks import RankFailure, run
from tests.harness.traps import NAMED
from tests.harness.traps.trap import DDP, FSDP, Trap
from tests.harness.verdicts import TRAPS, reached, ways_of

CASES = {"plain": ALONE, FSDP: Case(FSDP, (2,)), DDP: Case(DDP, (2,))}
EQUAL, REFUSED, DIFFERENT = "equal", "refused", "different"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a trap.

    Attributes:
        kind: "equal", "refused" or "different".
        says: the message of the refusal, or what differs, and at which step.
        ways: how parameters run, where they are equal.
        error: the class of the refusal.
    """

    kind: str
    says: str = ""
    ways: tuple[str, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}" if self.says else self.kind


@dataclass(frozen=True, slots=True)
class Record:
    """What there is after a plain step."""

    params: list[Tensor]
    grads: list[Tensor | None]
    state: Any
    groups: list[dict[str, Any]]
    returned: Any
    seen: Any


class Run:
    """An optimizer of a trap, plain or wrapped, and what is done to it."""

    def __init__(self, trap: Trap, params: list[Any], lay: Callable[[Tensor, int], Tensor]) -> None:
        """Prepare parameters and make the optimizer.

        Args:
            lay: lay a whole gradient out as the parameter at a place is.
        """
        self.trap, self.params, self.lay = trap, params, lay
        trap.prepare(params)
        self.optimizer = trap.make(params)
        self._step = self._fed = 0

    def before(self, step: int) -> None:
        """Set gradients, and do to the optimizer what the user does."""
        self._step, self._fed = step, 0
        self.feed()
        self.trap.edit(self.optimizer, self.params, step)

    def feed(self) -> Tensor:
        """Set gradients and give a loss. Whoever does so twice in a step gets others."""
        self._fed += 1
        with torch.no_grad():
            for i, param in enumerate(self.params):
                grad = gradient(self.trap, i, self._step)
                laid = None if grad is None else self.lay(grad * self._fed, i)
                if self.trap.accumulates and param.grad is not None and laid is not None:
                    param.grad.add_(laid)
                else:
                    param.grad = laid
        return torch.tensor(1.0 / (1 + self._step) + self._fed)

    def call(self, step: int) -> Any:
        return self.trap.call(self.optimizer, self.feed, step)


def first_values(trap: Trap) -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    return [trap.start(torch.randn(shape, generator=random), i) for i, shape in enumerate(trap.shapes)]


def gradient(trap: Trap, place: int, step: int) -> Tensor | None:
    random = torch.Generator().manual_seed(10_000 + 100 * step + place)
    return trap.grads(torch.randn(trap.shapes[place], generator=random) * 0.5, place, step)


def hypers(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


# -- the plain run ---------------------------------------------------------------------------------


def plain_records(trap: Trap) -> list[Record]:
    """What the plain optimizer does to whole tensors. A trap on which it fails is no trap."""
    params = [nn.Parameter(value.clone()) for value in first_values(trap)]
    plain = Run(trap, params, lambda grad, i: grad.clone())
    records = []
    for step in range(trap.steps):
        plain.before(step)
        returned = plain.call(step)
        record = Record(
            [p.detach().clone() for p in params],
            [None if p.grad is None else p.grad.clone() for p in params],
            copy.deepcopy(plain.optimizer.state_dict()["state"]),
            hypers(plain.optimizer),
            copy.deepcopy(returned),
            copy.deepcopy(trap.seen(plain.optimizer)),
        )
        records.append(record)
    return records


# -- comparison ------------------------------------------------------------------------------------


def differences(trap: Trap, wrapped: Run, laid: Laid, record: Record, returned: Any) -> list[str]:
    """What a rank has that the plain run has not."""
    pairs = list(enumerate(zip(wrapped.params, record.params, strict=True)))
    found = [f"parameter {i}" for i, (p, whole) in pairs if not same_bits(local(p), laid.fragment(whole, i))]
    if trap.compares_grads:
        for i, grad in enumerate(record.grads):
            own = wrapped.params[i].grad
            if (own is None) != (grad is None):
                found.append(f"gradient {i} is {'missing' if own is None else 'there'}")
            elif own is not None and bool(local(own).isnan().all()):
                continue  # the wrapper spoils what a step writes on copies, for all to see
            elif own is not None and grad is not None and not same_bits(local(own), laid.fragment(grad, i)):
                found.append(f"gradient {i}")
    found += unlike("state", wrapped.optimizer.state_dict()["state"], record.state)
    found += unlike("groups", hypers(wrapped.optimizer), record.groups)
    found += unlike("return value", returned, record.returned)
    return found + unlike("what is seen", trap.seen(wrapped.optimizer), record.seen)


class Snapshot:
    """What a refused step must leave as it was."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.params = [local(p).clone() for p in run.params]
        self.groups = hypers(run.optimizer)
        self.seen = copy.deepcopy(run.trap.seen(run.optimizer))

    def changed(self) -> list[str]:
        pairs = zip(self.run.params, self.params, strict=True)
        found = [f"parameter {i}" for i, (now, then) in enumerate(pairs) if not same_bits(local(now), then)]
        found += unlike("groups", hypers(self.run.optimizer), self.groups)
        return found + unlike("what is seen", self.run.trap.seen(self.run.optimizer), self.seen)


# -- the verdict -----------------------------------------------------------------------------------


def verdict(trap: Trap, case: Case) -> Verdict:
    """What the wrapper makes of a trap. On ranks, all of them call this, and all find the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(trap, case, plain_records(trap))


def judge(trap: Trap, case: Case, records: list[Record]) -> Verdict:
    laid = Laid(first_values(trap), case)
    wrapped = Run(trap, laid.params, laid.like_param)
    try:
        canzona_compile.wrap(wrapped.optimizer, replicate=replicate_of(case))
        own = Verdict(EQUAL)
    except CanzonaError as refusal:
        own = refused(refusal, "wrap")
    found = agreed(own)
    for step, record in enumerate(records):
        if found.kind != EQUAL:
            break
        found = agreed(step_verdict(trap, wrapped, laid, step, record))
    return found


def step_verdict(trap: Trap, wrapped: Run, laid: Laid, step: int, record: Record) -> Verdict:
    """What comes of one step on this rank."""
    snapshot = None
    try:
        wrapped.before(step)
        snapshot = Snapshot(wrapped)
        returned = wrapped.call(step)
    except CanzonaError as refusal:
        changed = snapshot.changed() if snapshot else []
        if changed:
            return Verdict(DIFFERENT, f"step {step} refuses and has changed {', '.join(changed)}: {refusal}")
        if "a collective of this step failed" in str(refusal):  # ranks hung, and no rank knew why
            return Verdict(DIFFERENT, f"step {step} hangs: {refusal}")
        return refused(refusal, f"step {step}")
    except Exception as error:
        return Verdict(DIFFERENT, f"step {step} raises {type(error).__name__}: {error}")
    try:
        different = differences(trap, wrapped, laid, record, returned)
    except CanzonaError as refusal:
        return refused(refusal, f"state_dict after step {step}")
    if different:
        return Verdict(DIFFERENT, f"step {step}: {', '.join(different)}")
    return Verdict(EQUAL, ways=() if step < trap.steps - 1 else ways_of_run(wrapped))


def refused(refusal: CanzonaError, where: str) -> Verdict:
    return Verdict(REFUSED, f"({where}) {refusal}", error=type(refusal).__name__)


def ways_of_run(wrapped: Run) -> tuple[str, ...]:
    """How parameters run; nothing for tests that replace the wrapper."""
    return tuple(sorted(ways_of(wrapped.optimizer))) if hasattr(wrapped.optimizer, "canzona") else ()


@cache
def verdict_group() -> Any:
    """A group for what ranks tell each other here: a rank that hangs in a collective of ours confuses none of it."""
    return dist.new_group()


def agreed(own: Verdict) -> Verdict:
    """The verdict of all ranks. They must refuse together."""
    if not dist.is_initialized():
        return own
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, own, group=verdict_group())
    worst = [v for v in all_of_them if v.kind == DIFFERENT]
    if worst:
        return worst[0]  # type: ignore[no-any-return]
    refused = [rank for rank, v in enumerate(all_of_them) if v.kind == REFUSED]
    if refused and len(refused) < len(all_of_them):
        return Verdict(DIFFERENT, f"refused on ranks {refused} only: {all_of_them[refused[0]].says}")
    return all_of_them[0]  # type: ignore[no-any-return]


# -- for tests -------------------------------------------------------------------------------------


def verdict_by_name(name: str, case: Case) -> Verdict:
    return verdict(NAMED[name], case)


def verdict_on_ranks(name: str, case: Case) -> Verdict:
    """The verdict of a pool of ranks. If they lose each other, that is a difference too, and the pool is replaced."""
    try:
        return run(case.world, verdict_by_name, name, case)[0]  # type: ignore[no-any-return]
    except RankFailure as failure:
        return Verdict(DIFFERENT, f"ranks failed: {failure}")


def frozen_mistakes(trap: Trap, found: Verdict, layout: str) -> list[str]:
    """What is wrong with a verdict, also beside what it was before."""
    of = f"{trap.name} {layout}"
    return mistakes(trap, found) or TRAPS.mistakes(of, reached(found.kind, found.ways, found.error))


def mistakes(trap: Trap, found: Verdict) -> list[str]:
    """What is wrong with a verdict."""
    if found.kind == DIFFERENT:
        return [f"{trap.name} is {found}"]
    wrong = []
    if trap.expected not in (found.kind, "either"):
        wrong.append(f"{trap.name} has to be {trap.expected}, and is {found}")
    if found.kind == REFUSED:
        wrong += [
            f"{trap.name} is refused without a word of {w}: {found.says}"
            for w in trap.says
            if w.lower() not in found.says.lower()
        ]
    return wrong
