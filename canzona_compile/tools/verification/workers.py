"""What the processes of `verify` do: one runs the plain optimizer, the others run the wrapped one beside it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.api.chain import Chain
from canzona_compile.api.round_state import rounding
from canzona_compile.api.wrap import explain
from canzona_compile.compat.optimizer_class import class_as_written
from canzona_compile.compat.telling import tell
from canzona_compile.errors import CanzonaError, some
from canzona_compile.ir.step import Strategy
from canzona_compile.ir.storage import rules_of
from canzona_compile.rehearsal.rehearsal import rehearse
from canzona_compile.rehearsal.trial import apart
from canzona_compile.report.explain import ExplainedParameter
from canzona_compile.session.gradients import check_gradient
from canzona_compile.tools.verification.compare import distance
from canzona_compile.tools.verification.findings import LeafDifference, Tally
from canzona_compile.tools.verification.layouts import LayoutName, give, give_by_backward, share
from canzona_compile.tools.verification.user_model import PARAMETER, Built, CannotVerify, Leaves, blamed, built

log = logging.getLogger(__name__)

AHEAD = 2  # pages that may wait to be read: more would only fill the disk
PAUSE = 0.005  # seconds between two looks


@dataclass(frozen=True, slots=True)
class StepPage:
    """One step: the gradients by the names of parameters, and what is there after it."""

    grads: Mapping[str, Tensor]
    leaves: Leaves


class Journal:
    """Pages 0, 1, ... in a folder. Page 0 holds what `build` made.

    Writer and readers wait for one another without a limit: `tools.processes` ends them all if one dies.
    """

    def __init__(self, folder: str, ahead: int = AHEAD) -> None:
        self.folder, self.ahead = Path(folder), ahead

    def write(self, step: int, page: StepPage) -> None:
        """Add a page, once the ranks have read all but the last few."""
        while self._page(step - self.ahead).exists():
            time.sleep(PAUSE)
        unfinished = self.folder / "unfinished"
        torch.save((page.grads, page.leaves), unfinished)
        os.replace(unfinished, self._page(step))

    def read(self, step: int) -> StepPage:
        """Wait for a page and open it. Tensors stay on disk until somebody looks at them."""
        path = self._page(step)
        while not path.exists():
            time.sleep(PAUSE)
        return StepPage(*torch.load(path, mmap=True, weights_only=False))  # it is our own file

    def drop(self, step: int) -> None:
        """Delete a page that every rank has opened."""
        self._page(step).unlink()

    def _page(self, step: int) -> Path:
        return self.folder / f"step{step}"


@dataclass(frozen=True, slots=True)
class Order:
    """What every process of `verify` has to know."""

    build: str | bytes
    steps: int
    layout: LayoutName
    seed: int
    options: Mapping[str, Any]
    double: bool = False  # whether users' code computes in float64 whatever it asks for


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What a rank saw.

    Attributes:
        owned: the leaves where owners compute, see `of_both_plans`.
        bits: what `explain` says of bits.
    """

    optimizer: str
    leaves: tuple[LeafDifference, ...]
    owned: tuple[LeafDifference, ...]
    everywhere: tuple[str, ...]
    idle: tuple[str, ...]
    roles: dict[str, tuple[str, str]]
    bits: tuple[str, ...]


# -- plain -----------------------------------------------------------------------------------------


def run_plain(order: Order, folder: str) -> None:
    """Run all steps of the plain optimizer on whole tensors, and write them into the journal of a folder."""
    made, journal = built(order.build, order.seed), Journal(folder)
    members = made.optimizer.optimizers if isinstance(made.optimizer, Chain) else (made.optimizer,)
    step_all: Callable[[], Any] = made.optimizer.step
    if order.options.get("one_per_matrix") is None:
        for own in members:
            own.__class__ = class_as_written(type(own))  # which twins run
        if any(alone := [step_of_each(own) for own in members]):
            steps = [each or own.step for each, own in zip(alone, members, strict=True)]
            step_all = lambda: [one() for one in steps]  # noqa: E731
    rules = rules_of(order.options.get("state"))
    roundings = [rounding(own, rules) for own in members] if rules is not None else []
    with blamed("saving parameters and state", "verify can only compare state that can be pickled"):
        journal.write(0, StepPage({}, made.leaves()))
    for step in range(1, order.steps + 1):
        grads = gradients(made, order.seed, step, order.options.get("missing_grads", "skip"))
        with blamed(f"step {step} of the plain optimizer"):
            step_all()
        for round_all in roundings:
            round_all()
        with blamed("saving parameters and state", "verify can only compare state that can be pickled"):
            journal.write(step, StepPage(grads, made.leaves()))


def step_of_each(optimizer: Optimizer) -> Callable[[], Any] | None:
    """What steps each parameter alone, if that is what is promised, as the optimizer batches them; None if not."""
    with warnings.catch_warnings(), contextlib.suppress(CanzonaError):  # the wrapped one says both
        warnings.simplefilter("ignore")
        habits = rehearse(optimizer)
        if habits.batches is not None:
            return apart(optimizer, counters=bool(habits.counters), in_order=True)
    return None


def gradients(made: Built, seed: int, step: int, missing: str = "skip") -> dict[str, Tensor]:
    """Give every parameter a gradient: that of the user's loss, or a random one.

    Args:
        missing: the option `missing_grads` of `wrap`. With "zero", parameters without a gradient get zeros, which are
            not returned: `wrap` has to make them itself.

    Returns:
        Copies of the gradients, by the names of parameters, because a step may write into them.
    """
    made.model.zero_grad()
    made.optimizer.zero_grad()
    if made.loss is not None:
        with blamed(f"loss(model, {step})"):
            loss: Any = made.loss(made.model, step)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            tracked = isinstance(loss, Tensor) and loss.requires_grad
            problem = f"loss(model, {step}) returned a {what}{'' if tracked else ' without a gradient'}"
            raise CannotVerify(problem, hint="return a tensor of one element that depends on the parameters")
        with blamed(f"backward of loss(model, {step})"):
            loss.backward()
    else:
        random = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)  # ranks draw equal ones
        for param in made.params:
            drawn = (torch.randn(param.shape, generator=random, device="cpu") * 1e-2).to(param.dtype)
            param.grad = drawn if param.requires_grad else None
    found = {}
    for name, param in zip(made.names, made.params, strict=True):
        if param.grad is not None:
            found[name] = check_gradient(param, name, param.grad.dtype).detach().clone()
    if missing == "zero":
        for param in made.params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    return found


# -- wrapped ---------------------------------------------------------------------------------------


def run_wrapped(rank: int, order: Order, folder: str) -> RankOutcome:
    """Run the same steps by the wrapped optimizer on this rank's part, and compare after each of them."""
    made, journal = built(order.build, order.seed), Journal(folder)
    kind = type(made.optimizer).__name__
    check_same_start(made.leaves(), read_together(journal, 0).leaves)
    share(made, order.layout, order.options)
    tally, given, owned = Tally(rank), set[str](), Tally(rank)
    everywhere: tuple[str, ...] = ()
    beside: Built | None = None  # the same with an owner for every matrix
    for step in range(1, order.steps + 1):
        page = read_together(journal, step)
        given.update(page.grads)
        compare_step(made, order.layout, page, step, tally)
        if step == 1 and not {"strategy", "plan"} & order.options.keys() and (everywhere := computed_everywhere(made)):
            beside = built(order.build, order.seed)
            share(beside, order.layout, {"strategy": "owner", **order.options})
        if beside is not None:
            compare_step(beside, order.layout, page, step, owned)
        if rank == 0:
            tell(f"step {step} of {order.steps}", step, order.steps)
            rows = (*tally.rows, *owned.rows)
            differing = list(dict.fromkeys(f"{row.parameter} {row.leaf}" for row in rows if not row.equal))
            log.info("step %d of %d: %s", step, order.steps, f"differs: {some(differing)}" if differing else "equal")
    idle = tuple(name for name in made.names if name not in given)
    roles = {name: (row.how, row.why) for name, row in explained(made).items() if name in given}
    return RankOutcome(kind, tally.rows, owned.rows, everywhere, idle, roles, explain(made.optimizer).bits)


def compare_step(made: Built, layout: LayoutName, page: StepPage, step: int, tally: Tally) -> None:
    """Take one step of a wrapped optimizer with the gradients of a page, and compare its leaves with the page."""
    with blamed(f"step {step} of the wrapped optimizer"), by_names_of_the_model(made):
        how = give_by_backward if layout == "zero1" else give
        how(dict(zip(made.names, made.params, strict=True)), page.grads)
        made.optimizer.step()
    apart = [name for name, row in explained(made).items() if row.cell == "own object"]
    tally.add(step, comparable(made.leaves(), apart), comparable(page.leaves, apart))


def computed_everywhere(made: Built) -> tuple[str, ...]:
    """The matrices that every rank computes in the plan of a wrapped optimizer: small ones, where that is faster."""
    optimizer: Any = made.optimizer
    tasks = [task for session in optimizer.canzona.sessions for task in session.driver.plan.owned.tasks]
    return tuple(task.name for task in tasks if task.strategy is Strategy.REPLICATED)


def comparable(leaves: Leaves, apart: Collection[str]) -> Leaves:
    """Leave out the state of parameters with an optimizer object each, and what belongs to none if there are any.

    It is what such an object keeps, by its place in that object. No plain optimizer has it.
    """
    hidden = {*apart, ""} if apart else set()
    return {(name, leaf): v for (name, leaf), v in leaves.items() if leaf == PARAMETER or name not in hidden}


def read_together(journal: Journal, step: int) -> StepPage:
    """Read a page of the journal, which is deleted once every rank has opened it."""
    page = journal.read(step)
    dist.barrier()
    if dist.get_rank() == 0:
        journal.drop(step)
    return page


def check_same_start(found: Leaves, expected: Leaves) -> None:
    """Refuse a `build` that makes another model every time: a comparison would show nothing."""
    for key in {**found, **expected}:
        name, leaf = key
        where = name if leaf == PARAMETER else f"{name} {leaf}"
        if key not in found or key not in expected:
            problem = "build() made different parameters in two processes"
        elif not distance(found[key], expected[key]).equal:
            problem = "build() made different values in two processes"
        else:
            continue
        hint = "random, torch and numpy are already seeded; seed other generators, and do not rely on the order of sets"
        raise CannotVerify(problem, at=where, hint=hint)


def explained(made: Built) -> dict[str, ExplainedParameter]:
    """How each parameter is updated, by the user's names. Under ZeRO-1 a rank knows of what it owns."""
    names = names_of_the_model(made)
    return {names.get(row.name, row.name): row for row in explain(made.optimizer).parameters}


@contextlib.contextmanager
def by_names_of_the_model(made: Built) -> Iterator[None]:
    """Name parameters in errors as the user's model does."""
    try:
        yield
    except CanzonaError as error:
        names = names_of_the_model(made)
        raise type(error)(error.problem, at=names.get(error.at or "", error.at), hint=error.hint) from error


def names_of_the_model(made: Built) -> dict[str, str]:
    """The user's names of parameters, by those that the optimizer has for them."""
    optimizer: Any = made.optimizer
    given = [name for session in optimizer.canzona.sessions for name, _, _ in session.named]
    return dict(zip(given, made.names, strict=True))
