"""Mistakes under zero1, and ranks that go different ways: errors on every rank before data moves, that say what is
wrong, where, and what to do; ranks go on as one or refuse to."""

from __future__ import annotations

import contextlib
import os
import warnings
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import canzona_compile
from canzona_compile.errors import CanzonaWarning
from canzona_compile.runtime import waiter
from tests.data_parallel.models import MAKERS, Model, batch
from tests.data_parallel.runs import step_alone
from tests.data_parallel.trainee import Trainee, errors
from tests.harness.layouts import mesh_of
from tests.harness.marks import crossed, first
from tests.harness.mistakes import Mistakes
from tests.harness.ranks import run

MISTAKES = Mistakes(__name__, driver=Trainee, after=partial(step_alone), group="raise")
WITH_STATE = {"options": {"make": "muon and adamw"}, "after": partial(step_alone, "muon and adamw")}
built = partial(MISTAKES, when="built")  # before zero1
bound = partial(MISTAKES, when="bound")
trained = partial(MISTAKES, when="trained")
backward = partial(MISTAKES, when="backward")  # gradients are there


# -- models that differ, or are not plain ----------------------------------------------------------


@built("rank 0: blocks.0.norm.weight", on=[1])
def another_order(own: Trainee) -> None:
    model = own.model
    model.head, model.embed = nn.Linear(64, 300, bias=False), nn.Embedding(300, 64)
    model.blocks = model._modules.pop("blocks")


@built(r"rank 1: head.weight \[301, 64\]", on=[1])
def another_shape(own: Trainee) -> None:
    own.model.head = nn.Linear(64, 301, bias=False)


@built("requires_grad=False not trained", on=[1])
def another_trainability(own: Trainee) -> None:
    own.model.blocks[0].up.weight.requires_grad_(False)


@built("already wrapped in DistributedDataParallel")
def under_ddp(own: Trainee) -> None:
    own.model = DistributedDataParallel(own.model)


@built("already wrapped in FSDP")
def under_fsdp(own: Trainee) -> None:
    for block in own.model.blocks:
        fully_shard(block)
    fully_shard(own.model)


class OwnWrapper(nn.Module):
    """What zero1 sees of Megatron's DistributedDataParallel: a method, and an attribute in the place of another one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.buffers = module, []  # type: ignore[assignment]

    def finish_grad_sync(self) -> None:
        """Megatron's loop calls it after backward."""


@built("the model is already wrapped in OwnWrapper, which reduces gradients.*pass the plain model")
def under_megatron(own: Trainee) -> None:
    own.model = OwnWrapper(own.model)


MARKED = "allreduce=False says that it is an expert.*blocks.0.up.weight"
NO_GROUP = {"layout": {"blocks.0.up.weight": None}}


def expert(own: Trainee, of_one_seed: bool = True) -> None:
    own.model = own.model if of_one_seed else Model(own.rank)
    own.model.blocks[0].up.weight.allreduce = False


built(f"{MARKED}.*layout=.*None}}", name="experts of one seed")(expert)
built(MARKED, name="experts of several seeds", options=NO_GROUP)(partial(expert, of_one_seed=False))
built("rank 1: blocks.0.up.weight .* trained expert", name="an expert on one rank", on=[1])(expert)
built(name="equal experts", options=NO_GROUP, errors={""})(expert)


built(
    r"'\*.qkv.weight' matches no parameter; the optimizer has blocks.0.up.weight",
    name="a split that fits nothing",
    options={"split": {"*.qkv.weight": {"q": 64, "k": 32}}},
)()
built(
    r"= 112 entries of dim 0, but the parameter has shape \[96, 64\].*blocks.0.up.weight",
    name="a split of another size",
    options={"split": {"*.up.weight": {"gate": 48, "up": 64}}, "make": "muon and adamw"},
    full=True,
)()


@built(says={0: "", 1: "rank 1 is not part of"}, errors={"", "CanzonaError"}, last=True, fresh=True)
def mesh_without_this_rank(own: Trainee) -> None:
    mesh = DeviceMesh("cpu", [0])
    if own.rank == 1:
        canzona_compile.zero1(own.model, MAKERS["adamw"](own.model), mesh=mesh)


@trained("already wrapped", last=True, full=True)
def wrapped_already(own: Trainee) -> None:
    canzona_compile.zero1(own.model, own.optimizers, mesh=dist.group.WORLD)


# -- calls in a wrong order, and parameters that change --------------------------------------------


@backward("backward ran again.*no_sync", last=True)
def backward_twice(own: Trainee) -> None:
    own.backward(2)


@backward("backward ran again.*zero_grad", last=True, full=True)
def backward_after_a_step_without_zero_grad(own: Trainee) -> None:
    own.step()
    own.backward(2)


@trained("no parameter has a gradient", last=True)
def step_without_backward(own: Trainee) -> None:
    own.optimizers[0].step()


@trained(r"a trained parameter of shape \[8, 8\]", full=True)
def parameter_added(own: Trainee) -> None:
    own.optimizers[0].add_param_group({"params": [nn.Parameter(torch.randn(8, 8))]})


@trained("in another group of its optimizer.*blocks.1.down.weight")
def moved_to_another_group(own: Trainee) -> None:
    groups = own.optimizers[0].param_groups
    groups.append({**groups[0], "params": [groups[0]["params"].pop()], "lr": 0.5})


@trained("or in none.*blocks.1.down.weight", full=True)
def left_its_optimizer(own: Trainee) -> None:
    own.optimizers[0].param_groups[0]["params"].pop().grad = None


@trained("storage of the parameter was replaced.*blocks.0.up.weight", fresh=True, full=True)
def memory_replaced(own: Trainee) -> None:
    weight = own.model.blocks[0].up.weight
    weight.data = weight.data.clone()


@trained("parameters of the model were replaced.*embed.weight.*assign=True")
def parameters_replaced_by_a_checkpoint(own: Trainee) -> None:
    own.model.load_state_dict({name: value.clone() for name, value in own.model.state_dict().items()}, assign=True)


class Frozen(Trainee):
    """One of its matrices is not trained."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for model in (self.model, self.plain):
            model.blocks[0].up.weight.requires_grad_(False)


@trained("was not in the optimizer.*requires_grad", driver=Frozen, full=True)
def unfrozen_later(own: Trainee) -> None:
    own.model.blocks[0].up.weight.requires_grad_(True)


# -- gradients -------------------------------------------------------------------------------------


@backward("its norm would differ.*clip_grad_norm_", last=True)
def clipped_by_torch(own: Trainee) -> None:
    nn.utils.clip_grad_norm_(own.model.parameters(), 1.0)


@backward("clamp_ would give a wrong result", last=True, full=True)
def clipped_by_value(own: Trainee) -> None:
    nn.utils.clip_grad_value_(own.model.parameters(), 1.0)


@backward("rank 0: foreach_mul by 0.5 of embed.weight and 11 more; rank 1: foreach_mul by 1.5", full=True)
def scaled_differently(own: Trainee) -> None:
    torch._foreach_mul_([p.grad for p in own.model.parameters()], 0.5 + own.rank)


@backward("scaled differently on some ranks", "rank 0: mul by 0.5 of embed.weight", on=[0], fresh=True, group="scaled")
def scaled_on_one_rank(own: Trainee) -> None:
    for param in own.model.parameters():
        param.grad.mul_(0.5)


@pytest.mark.parametrize("gather", first(["step", "forward"]))
def test_gradients_scaled_on_one_rank_only(gather: str) -> None:
    MISTAKES.check("scaled_on_one_rank", gather=gather)


@backward("backward ran again", on=[0], fresh=True)
def refused_on_one_rank(own: Trainee) -> None:
    """The other one goes on."""
    own.model.head.weight.grad.add_(torch.ones(300, 64))


# Autograd refuses it on one rank, after ranks have begun to reduce; the other one hears that.
HEARD = "the step failed on rank 0: CanzonaError: an exception interrupted a backward pass"


@trained(says={0: "changed the type of value", 1: HEARD}, on=[0], fresh=True)
def hook_changes_dtype(own: Trainee) -> None:
    own.model.blocks[0].up.weight.register_hook(lambda grad: grad.double())


# -- numbers ---------------------------------------------------------------------------------------


@backward("rank 1: group 0 of SGD has .*lr=0.25", last=True, full=True)
def another_rate_between_backward_and_step(own: Trainee) -> None:
    for optimizer in own.optimizers:
        optimizer.param_groups[0]["lr"] = 0.25 if own.rank == 1 else 0.1
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1
    own.whole_step(2)


@trained("ns_steps >= 100", on=[0], options={"make": "muon and adamw"}, fresh=True, full=True)
def optimizer_fails_on_one_rank(own: Trainee) -> None:
    """After backward, in which ranks compare their numbers."""
    own.optimizers[0].register_step_pre_hook(lambda own, *_: own.param_groups[0].update(ns_steps="many"))


# -- a rank that dies ------------------------------------------------------------------------------

dies = partial(trained, says={0: "no answer from rank 1"}, on=[1], dying=[1])


@dies(full=True)
def dies_in_backward(own: Trainee) -> None:
    own.model.blocks[0].up.weight.register_hook(lambda _: os._exit(1))


@dies()
def dies_in_step(own: Trainee) -> None:
    own.optimizers[1].register_step_pre_hook(lambda *_: os._exit(1))


@dies(full=True)
def dies_in_gather(own: Trainee) -> None:
    with contextlib.suppress(Exception):
        own.backward(1)
        own.optimizers[0].step()
    os._exit(1)


@pytest.mark.parametrize("mistake", MISTAKES.names("raise"))
def test_both_ranks_raise(mistake: str) -> None:
    MISTAKES.check(mistake)


def mesh_of_one_rank() -> list[str]:
    """What is warned of a mesh dim with one rank, and of the dim that has all of them."""
    mesh = mesh_of((dist.get_world_size(), 1), ("dp", "tp"))
    found = []
    for dim in ("tp", "dp"):
        model = nn.Linear(8, 8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            canzona_compile.zero1(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh[dim])
        found += [f"{dim}: {one.message}" for one in caught if isinstance(one.message, CanzonaWarning)]
    return found


def test_a_mesh_of_one_rank_reduces_nothing_and_says_so() -> None:
    for warned in run(2, mesh_of_one_rank):
        assert [one.partition(",")[0] for one in warned] == ["tp: mesh= has one rank"]


# -- ranks that go different ways, and on ----------------------------------------------------------

astray = partial(backward, group="goes on", goes_on=True)
OTHER_CALLS = "made different calls.*rank 0: "


@astray(OTHER_CALLS + r"step\(\) of optimizer 0 \(\w+\) of model \d+; rank 1: backward\(\)", last=True)
def skips_a_step(own: Trainee) -> None:
    if own.rank == 0:
        own.step()
    own.zero()
    own.backward(2)


@astray(OTHER_CALLS + r"step\(\) of optimizer 1 .*; rank 1: step\(\) of optimizer 0", on=[1])
def steps_twice(own: Trainee) -> None:
    own.optimizers[0].step()


@astray(OTHER_CALLS + r"step\(\).*; rank 1: clip_grad_norm_\(\)", on=[1])
def clips_alone(own: Trainee) -> None:
    own.handle.clip_grad_norm_(1.0)


@astray("different arguments on some ranks .*rank 0: max_norm=0.5.*rank 1: max_norm=1.5")
def clips_by_another_norm(own: Trainee) -> None:
    own.handle.clip_grad_norm_(0.5 + own.rank)


@astray("no parameter has a gradient", on=[1])
def zeroes_early(own: Trainee) -> None:
    own.zero()


@astray("gradients are missing on some ranks only .*no gradient for blocks.0.up.weight")
def drops_a_gradient(own: Trainee) -> None:
    """On the rank that owns the parameter."""
    fragment = own.handle.zero1.fragments["blocks.0.up.weight"]
    if any(part.owner == own.rank for part in fragment.slices):
        fragment.param.grad = None


@astray(OTHER_CALLS + r"step\(\) of optimizer 1", last=True)
def leaves_out_the_second_optimizer(own: Trainee) -> None:
    own.optimizers[0].step()
    if own.rank == 0:
        own.optimizers[1].step()
    own.zero()
    own.backward(2)


@astray("backward ran again after", last=True)
def forgets_to_zero(own: Trainee) -> None:
    own.step()
    if own.rank == 0:
        own.zero()
    own.backward(2)


@astray(r"rank 1: full_tensor\(\) of the gradient of head.weight", on=[1])
def asks_for_a_gradient_alone(own: Trainee) -> None:
    own.model.head.weight.grad.full_tensor()


def measure(own: Trainee) -> None:
    own.handle.measure(2)


alone = partial(astray, r"measure\(\) has measured 0 of 2 steps", on=[1])
alone(name="measures alone")(measure)
alone(name="measures alone before backward", when="trained")(measure)
another_rate = partial(astray, "rank 0: group 0 of SGD has .*lr=0.1.*rank 1: group 0 of SGD has .*lr=0.25")
for place in (0, 1):  # before backward
    another_rate(name=f"rate of optimizer {place}", when="trained", on=[1])(
        lambda own, place=place: own.optimizers[place].param_groups[0].update(lr=0.25)
    )
# An optimizer had stepped, on both ranks.
HALF = {"steps_twice", "leaves_out_the_second_optimizer", "forgets_to_zero", "rate of optimizer 1"}


@pytest.mark.parametrize(("way", "gather"), crossed(MISTAKES.names("goes on"), ["step", "forward"]))
def test_both_ranks_raise_and_go_on(way: str, gather: str) -> None:
    for found in MISTAKES.check(way, gather=gather):
        assert [text for text in found.later if way not in HALF or not text.startswith("wrong")] == []


@MISTAKES(when="trained", group="", goes_on=True, errors={""}, last=True)
def fails_at_once(own: Trainee) -> None:
    if own.rank == 1:
        hook = own.model.head.register_full_backward_pre_hook(fail)
        with contextlib.suppress(ValueError):
            own.backward(1)
        hook.remove()
        own.zero()
    own.whole_step(1)


def fail(*_: Any) -> None:
    raise ValueError("out of memory")


def test_a_batch_that_is_skipped_before_a_gradient_is_there() -> None:
    """No rank has begun to reduce then, so the other one waits for the next batch."""
    for found in MISTAKES.check("fails_at_once"):
        assert [text for text in found.later if not text.startswith("wrong")] == []


class Reader(Trainee):
    """Reads parameters on its way on."""

    def __init__(self, read: str, **options: Any) -> None:
        super().__init__(**options)
        self.read = read

    def go_on(self) -> list[str]:
        self.plain_step(1)
        return [*errors("reading", lambda: READS[self.read](self)), *super().go_on()]


def evaluates(own: Trainee) -> None:
    with torch.no_grad():
        own.model(batch(9, own.rank))


READS = {
    "synchronize()": lambda own: own.handle.synchronize(),
    "the model's state_dict()": lambda own: own.model.state_dict(),
    "an evaluation": evaluates,
}


@astray(
    "made different calls, and nothing was changed", driver=Reader, options={"gather": "forward"}, group="", last=True
)
def steps_again_while_the_other_goes_on(own: Trainee) -> None:
    with mock.patch.object(waiter, "PATIENCE", timedelta(seconds=0.1)):
        own.step()
        if own.rank == 1:
            own.step()
        own.zero()
        own.backward(2)


@pytest.mark.parametrize("read", READS)
def test_parameters_are_read_after_a_call_was_refused(read: str) -> None:
    """One rank had gathered more of them than the other when it was."""
    for found in MISTAKES.check("steps_again_while_the_other_goes_on", read=read):
        assert found.later == []


# -- ranks that cannot go on -----------------------------------------------------------------------

# A rank may hear of it only when it goes on.
ENDS = {"", "CanzonaError", "KeyboardInterrupt", "RankMismatch", "ValueError"}
ends = partial(astray, group="ends", errors=ENDS, fresh=True)


@ends("state differs between ranks .*rank 0: loaded 0 times; rank 1: loaded 0 times, and cleared", on=[1], **WITH_STATE)
def clears_state(own: Trainee) -> None:
    own.optimizers[0].state.clear()


@ends("state differs between ranks .*rank 0: loaded 0 times; rank 1: loaded 1 times", when="trained", **WITH_STATE)
def loads_state(own: Trainee) -> None:
    states = [o.state_dict() for o in own.optimizers]
    if own.rank == 1:
        own.optimizers[1].load_state_dict(states[1])


@ends("rank 1: CanzonaError: an exception interrupted a backward pass", when="trained", last=True)
def fails_in_backward(own: Trainee) -> None:
    """After it has begun to reduce; the user catches it and skips the batch."""
    hook = own.model.embed.register_full_backward_hook(fail) if own.rank == 1 else None
    with contextlib.suppress(ValueError):
        own.backward(1)
    if hook is not None:
        hook.remove()
    own.step()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@ends("KeyboardInterrupt", last=True)
def is_interrupted(own: Trainee) -> None:
    """While it waits for a reduction."""
    waiting = own.handle.zero1.reduction.waiter
    with mock.patch.object(waiting, "wait", interrupt) if own.rank == 1 else contextlib.nullcontext():
        own.handle.clip_grad_norm_(1.0)


@ends("KeyboardInterrupt|an exception interrupted a backward pass", when="trained", last=True)
def is_interrupted_in_backward(own: Trainee) -> None:
    hook = own.model.embed.weight.register_hook(interrupt) if own.rank == 1 else None
    try:
        own.backward(1)
    finally:
        if hook is not None:
            hook.remove()


@ends("out of memory", on=[1])
def has_a_step_that_fails(own: Trainee) -> None:
    """Of the optimizer's own code, in its middle."""
    own.optimizers[0].canzona.session.driver._step_locally = fail


@pytest.mark.parametrize("way", MISTAKES.names("ends"))
def test_both_ranks_raise_and_refuse_to_go_on(way: str) -> None:
    for found in MISTAKES.check(way):
        assert len([text for text in found.later if text.startswith("going on")]) == 2, found.later
        assert way == "has_a_step_that_fails" or not [text for text in found.later if text.startswith("apart")]
