"""One rank differs: every rank hears of it within a step, with nothing updated, or all follow.

After an error ranks go on only if none of them has begun the step: else data of two steps would mix.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.kernels import tensor_args, tuning_cache
from canzona_compile.kernels.dispatch import CANDIDATES, Problem
from canzona_compile.runtime import channel
from canzona_compile.session.step_driver import StepDriver
from tests.harness.layouts import Case, local
from tests.harness.marks import crossed, full, only
from tests.harness.mistakes import Mistakes
from tests.harness.pairs import params_of
from tests.harness.ranks import run
from tests.harness.trainer import ALIKE, NAMES, Trainer, ready

FSDP, DDP, HSDP = Case("fsdp", (3,)), Case("ddp", (2,)), Case("hsdp", (2, 2))
TWO_LAYOUTS, TWO_MESHES = [Case("fsdp", (4,)), HSDP], [Case("tp_alone", (2, 2)), Case("fsdp", (4,))]
GRADIENT_ERRORS = {"InvalidGradient", "RankMismatch"}
MISTAKES = Mistakes(__name__, driver=Trainer, after=ready(), when="fed", on=[1], errors={"RankMismatch"})


def named(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def set_hypers(trainer: Trainer, **hypers: Any) -> None:
    trainer.optimizer.param_groups[0].update(hypers)


def keep(trainer: Trainer, places: Sequence[int]) -> None:
    """Let the optimizer have these parameters alone, in this order."""
    group = trainer.optimizer.param_groups[0]
    for key in ("params", "param_names"):
        group[key] = [group[key][i] for i in places]


# -- other plans -----------------------------------------------------------------------------------

at_first = partial(MISTAKES, "difference", "rank 1", group="plans", options={"good": 0}, fresh=True)
at_first("capacity 4096", name="capacity", odd={"capacity": 4096})()
at_first("depth 3", name="depth", odd={"depth": 3})()
at_first("micro_groups 5", name="micro-groups", odd={"micro_groups": 5})()
at_first("replicated", name="strategy", odd={"strategy": "replicated"})()
at_first("fast", name="numerics", odd={"numerics": "fast"})()
at_first("12x36", "36x12", name="shapes", odd={"shapes": ((48, 24), (24, 60), (36, 12), (48, 24))})()
at_first("first", "second", name="order")(partial(keep, places=[1, 0, 2, 3]))
at_first("first", "fourth", name="ends")(partial(keep, places=[3, 1, 2, 0]))
at_first("fourth", name="number")(partial(keep, places=[0, 1, 2]))
at_first(name="nesterov")(partial(set_hypers, nesterov=False))
at_first(name="adjust_lr_fn")(partial(set_hypers, adjust_lr_fn="match_rms_adamw"))
at_first(name="ns_steps")(partial(set_hypers, ns_steps=3))
# One difference of each kind: of an option, of a hyperparameter, of order, number and shapes of parameters.
FAST = [("capacity", FSDP), ("strategy", DDP), ("nesterov", DDP), ("ends", FSDP), ("shapes", FSDP), ("ns_steps", FSDP)]


@pytest.mark.parametrize(("name", "case"), only(FAST, MISTAKES.names("plans"), [FSDP, DDP]), ids=named)
def test_ranks_that_made_other_plans(name: str, case: Case) -> None:
    """The first difference, before the first collective."""
    MISTAKES.check(name, case)


@at_first("tuned", "m=1024", group="", cases=[Case("fsdp", (2,))], on=[])
def tune_on_one_rank(_: Trainer) -> None:
    """GPUs of one kind, where one rank's cache folder holds a verdict of the tuner."""
    machine = tuning_cache.GpuKind(90, "H200", 132)
    mock.patch.object(tensor_args, "machine", return_value=machine).start()
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    if dist.get_rank() == 1:
        problem = Problem("sym_gemm", 1, 1024, 4096, torch.bfloat16, torch.bfloat16, 16)
        tuning_cache.store(machine, problem, CANDIDATES["sym_gemm", 90][0], {})


def test_kernels_that_were_tuned_on_one_rank_only() -> None:
    """Matrices that every rank computes would come out different, and nobody would hear of it."""
    MISTAKES.check("tune_on_one_rank")


# -- later -----------------------------------------------------------------------------------------

later = partial(MISTAKES, group="later", options={"good": 3})
later("lr=0.5", "lr=0.02", name="lr")(partial(set_hypers, lr=0.5))
later("weight_decay=0.7", name="weight_decay")(partial(set_hypers, weight_decay=0.7))
later("note", name="a note")(partial(set_hypers, note="more"))
later(name="a tensor", errors=GRADIENT_ERRORS)(lambda trainer: set_hypers(trainer, lr=torch.tensor(0.3)))
later(r"measure\(\) has measured 0 of 5 steps", name="measure")(lambda trainer: trainer.optimizer.canzona.measure())
later("rank 0: no change", "the state of first", name="state")(lambda trainer: trainer.optimizer.state.clear())


@later("second", "replaced or removed", name="a leaf", errors={"RankMismatch", "CanzonaError"})
def replace_leaf(trainer: Trainer) -> None:
    trainer.optimizer.state[trainer.params[1]]["momentum_buffer"] = torch.zeros(24, 60)


@later("third", "float64", name="a gradient", errors=GRADIENT_ERRORS)
def wrong_gradient(trainer: Trainer) -> None:
    param = trainer.params[2]
    zeros = torch.zeros_like(local(param), dtype=torch.float64)
    if isinstance(param, DTensor):
        zeros = DTensor.from_local(zeros, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
    param.grad, param.grad_dtype = None, torch.float64
    param.grad = zeros


@pytest.mark.parametrize(("name", "case"), crossed(MISTAKES.names("later"), [FSDP, DDP]), ids=named)
def test_one_rank_differs(name: str, case: Case) -> None:
    MISTAKES.check(name, case)


def of_many(case: Case, **options: Any) -> Trainer:
    """Ranks that announce as many do, by rows and columns, in a pool of their own."""
    channel.MANY = case.world
    return Trainer(case, **options)


many = partial(later, group="many", driver=of_many, fresh=True)
many("lr=0.5", "lr=0.02", name="lr of many")(partial(set_hypers, lr=0.5))
many("third", "float64", name="gradient of many", errors=GRADIENT_ERRORS)(wrong_gradient)
many("no answer from rank 1", name="dies", errors={"CanzonaError", "RankMismatch"}, dying=[1])(lambda _: os._exit(7))


@pytest.mark.parametrize("name", MISTAKES.names("many"))
def test_one_of_many_ranks_differs_or_dies(name: str) -> None:
    MISTAKES.check(name, Case("fsdp", (4,)))


# -- afterwards ------------------------------------------------------------------------------------


class Stubborn(Trainer):
    """What is wrong stays so for another step."""

    def go_on(self) -> list[str]:
        again = self.last_step()
        return [*([] if again.error else ["a step"]), *again.changed, *super().go_on()]


class Renewed(Trainer):
    """Ranks go on with new optimizers."""

    def go_on(self) -> list[str]:
        trainer = Trainer(Case("fsdp", (2,)), shapes=ALIKE)
        trainer.go(2)
        return trainer.different()


# Several causes are errors of our own on the rank that has them.
mended = partial(
    MISTAKES,
    group="mended",
    cases=[Case("fsdp", (2,))],
    options={"shapes": ALIKE},
    errors={*GRADIENT_ERRORS, "UnsupportedOptimizer", "CanzonaError"},
    goes_on=True,
    fresh=True,
)
for number, layout in enumerate((FSDP, DDP)):
    mended(name=f"gradient {number}", cases=[layout], errors=GRADIENT_ERRORS, fresh=False)(wrong_gradient)
for rate in (0.5, -1.0, "not a number"):
    mended(name=f"lr={rate}", driver=Stubborn)(partial(set_hypers, lr=rate))


@mended("different calls", driver=Renewed, options={"good": 0}, errors={"RankMismatch"})
def of_another_class(trainer: Trainer) -> None:
    trainer.optimizer = canzona_compile.wrap(torch.optim.SGD(trainer.params, momentum=0.9))


@pytest.mark.parametrize("name", MISTAKES.names("mended"))
def test_training_goes_on_once_the_cause_is_gone(name: str) -> None:
    """And not before: the step that plans anew compares numbers, too."""
    for found in MISTAKES.check(name):
        assert found.later == []


# -- gradients -------------------------------------------------------------------------------------

gradients = partial(MISTAKES, errors=GRADIENT_ERRORS, fresh=True)
fine = partial(MISTAKES, errors={""})  # nothing is raised


def skip(trainer: Trainer, place: int = 1, late: float = 0.0) -> None:
    """Leave out a gradient, and come late to the step."""
    trainer.params[place].grad = None
    time.sleep(late)


def give(trainer: Trainer, make: Callable[[Tensor], Tensor]) -> None:
    """Give the second parameter a gradient that is none."""
    param = trainer.params[1]
    param.grad, param.grad_dtype = None, None
    param.grad = make(param)


def summand(param: Tensor) -> Tensor:
    """A gradient that nobody has added up."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    return DTensor.from_local(torch.ones(param.shape), mesh, [Partial()] * mesh.ndim)


BAD: dict[str, tuple[list[Case], Callable[[Tensor], Tensor], str]] = {
    "sparse": ([Case("ddp", (3,))], lambda param: torch.eye(*param.shape).to_sparse(), "sparse"),
    "dtype": ([Case("ddp", (3,))], lambda param: torch.zeros(param.shape, dtype=torch.float64), ""),
    "layout": (TWO_LAYOUTS, summand, "Partial"),
    "layout on one mesh": (TWO_MESHES, summand, "Partial"),
}
for good in (2, 0):
    options = {"strategy": "owner", "good": good}
    gradients("second", "gradient", name=f"missing after {good}", options=options)(skip)
    for kind, (cases, make, says) in BAD.items():
        gradients("second", says, name=f"{kind} after {good}", cases=cases, options=options)(partial(give, make=make))
for late in (0.0, 1.5):
    options = {"strategy": "replicated"}
    gradients("second", "gradient", name=f"missing, {late} late", options=options)(partial(skip, late=late))
gradients("second", "third", name="different ones", on=[])(lambda own: skip(own, place=1 if dist.get_rank() else 2))
fine(name="of one rank", options={"strategy": "auto"})(partial(skip, place=0))
fine(name="as zeros", options={"missing_grads": "zero", "strategy": "owner"})(skip)
LAYOUTS = [[Case("fsdp", (3,))], [Case("ddp", (3,))], [HSDP], TWO_LAYOUTS, TWO_MESHES]


@pytest.mark.parametrize(("cases", "good"), only([(LAYOUTS[0], 2), (TWO_MESHES, 2)], LAYOUTS, [2, 0]), ids=named)
def test_gradient_missing_on_one_rank(cases: list[Case], good: int) -> None:
    MISTAKES.check(f"missing after {good}", *cases)


@pytest.mark.parametrize(
    ("cases", "late"),
    [*only([(LAYOUTS[1], 1.5)], LAYOUTS[:3], [0.0, 1.5]), *(full(TWO_LAYOUTS, late) for late in (0.0, 1.5))],
    ids=named,
)
def test_gradient_missing_where_every_rank_computes_everything(cases: list[Case], late: float) -> None:
    """Under DDP such a step moves no tensor at all; still no rank may update alone."""
    MISTAKES.check(f"missing, {late} late", *cases)


@pytest.mark.parametrize("others", [[], [Case("fsdp", (2,))]], ids=["alone", "beside fsdp"])
def test_gradient_of_a_tensor_of_one_rank(others: list[Case]) -> None:
    """What belongs to one rank alone concerns no other: rank 1 skips the parameter, rank 0 does not."""
    kept, skipped = MISTAKES.check("of one rank", Case("plain", (2,)), *others)
    everything = sorted(f"{what}{name}" for what in ("", "momentum_buffer of ") for name in NAMES)
    assert kept.changed == everything
    assert skipped.changed == [name for name in everything if "first" not in name]


@pytest.mark.parametrize("cases", LAYOUTS[:2], ids=named)
def test_gradient_missing_on_one_rank_counts_as_zeros(cases: list[Case]) -> None:
    """The fragments of that rank have no gradient; all ranks take the step."""
    for outcome in MISTAKES.check("as zeros", *cases):
        assert {"first", "third", "fourth"} <= set(outcome.changed)


def test_different_gradients_missing() -> None:
    """Ranks that all see a change, but not the same one."""
    MISTAKES.check("different ones", FSDP)


@pytest.mark.parametrize(("kind", "good"), crossed(list(BAD), [2, 0], most=2))
def test_bad_gradient_on_one_rank(kind: str, good: int) -> None:
    MISTAKES.check(f"{kind} after {good}")


@later("third", "Partial", group="partial", cases=[Case("hsdp", (2, 1))], on=[], errors={"InvalidGradient"})
def unsummed_gradient(trainer: Trainer) -> None:
    param: Any = trainer.params[2]
    placements = [Partial() if p.is_replicate() else p for p in param.placements]
    param.grad = DTensor.from_local(
        local(param.grad), param.device_mesh, placements, shape=param.shape, stride=param.stride()
    )


def test_gradients_that_become_partial_are_refused() -> None:
    """Their fragments have the shapes that the plan was made for, and other values than the plan takes them for."""
    MISTAKES.check("unsummed_gradient")


class Callback:
    """An object whose `repr` tells its address."""


@fine(cases=[Case("fsdp", (2,))], on=[])
def holds_an_object(trainer: Trainer) -> None:
    """Objects that stay alive meanwhile, so that the same line makes one at another address on every rank."""
    others = [Callback() for _ in range(100 * dist.get_rank())]
    set_hypers(trainer, callback=Callback())
    assert len(others) == 100 * dist.get_rank()


def test_addresses_of_objects_do_not_differ() -> None:
    """Ranks are processes of their own: what a group holds beside numbers lies elsewhere in each."""
    MISTAKES.check("holds_an_object")


@fine(cases=[Case("fsdp", (2,))], on=[], fresh=True)
def lack_one_and_wait(trainer: Trainer) -> None:
    """All ranks lack a gradient, and rank 1 starts its collectives seconds later."""
    trainer.params[1].grad = None
    original = dist.all_to_all_single

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(2.5)
        return original(*args, **kwargs)

    if dist.get_rank() == 1:
        dist.all_to_all_single = late


def test_waiting_long_after_an_agreed_change() -> None:
    """Who waits listens for calls, but the call that led to the agreement is none to fail for."""
    for outcome in MISTAKES.check("lack_one_and_wait"):
        assert [name for name in NAMES if name not in outcome.changed] == ["second"]


# -- all ranks alike -------------------------------------------------------------------------------


def replace_memory(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        part = param._local_tensor if isinstance(param, DTensor) else param
        part.data = part.detach().clone()


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def delete_one(optimizer: Optimizer) -> None:
    del optimizer.state[params_of(optimizer)[1]]


def pop_one(optimizer: Optimizer) -> None:
    optimizer.state.pop(params_of(optimizer)[1])


def halve_one(optimizer: Optimizer) -> None:
    for value in optimizer.state[params_of(optimizer)[1]].values():
        if value is not None:  # it lies on an owner elsewhere
            value.mul_(0.5)


def follows(case: Case, edit: Callable[[Optimizer], None]) -> None:
    """The plain optimizer and the wrapped one are edited alike."""
    trainer = Trainer(case)
    trainer.go(3)
    for optimizer in trainer.both:
        edit(optimizer)
    trainer.go(3)
    trainer.check()


@pytest.mark.parametrize("edit", [replace_memory, clear, delete_one, pop_one, halve_one])
@pytest.mark.parametrize("case", [FSDP, DDP], ids=str)
def test_all_ranks_change_alike(case: Case, edit: Callable[[Optimizer], None]) -> None:
    run(case.world, follows, case, edit, after=ready())


# -- errors on the way -----------------------------------------------------------------------------


def interrupted(case: Case, error: type[BaseException]) -> list[str]:
    """Rank 1 is interrupted when all exchanges of a step are behind it; then all try to go on."""
    trainer = Trainer(case)
    trainer.go(2)
    trainer.feed()
    found = []
    original = StepDriver.step

    def stopped(driver: StepDriver) -> bool:
        original(driver)
        raise error("stopped")

    if dist.get_rank() == 1:
        StepDriver.step = stopped  # type: ignore[method-assign]
    for _ in range(3):
        try:
            trainer.optimizer.step()
            found.append("")
        except BaseException as caught:
            found.append("\n".join([str(caught), *getattr(caught, "__notes__", ())]))
        StepDriver.step = original  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_ends_on_its_way_is_the_last(error: type[BaseException]) -> None:
    found = run(FSDP.world, interrupted, FSDP, error, fresh=True, after=ready())
    told = "\ncanzona_compile: this was raised by the step of rank 1" if error is ValueError else ""
    assert found[1][0] == f"stopped{told}"
    assert "failed midway" in found[1][1]
    for own in (found[0], found[2]):
        assert own[0] == ""  # it had nothing to wait for
        assert "failed on rank 1" in own[1]
        assert "failed midway" in own[2]
