"""Mistakes under zero1 are errors on every rank that say what is wrong, where, and what to do."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import canzona_compile
from canzona_compile.errors import CanzonaWarning
from tests.data_parallel.models import MAKERS, Model, batch
from tests.data_parallel.runs import said_of, set_up, step_alone, train
from tests.harness.layouts import mesh_of
from tests.harness.marks import also, first, full
from tests.harness.ranks import Died, run


def said(mistake: str, *args: Any) -> str:
    """The error that a mistake raises on this rank; empty if none."""
    return said_of(lambda: MISTAKES[mistake](*args))


def another_order() -> None:
    model = Model()
    if dist.get_rank() == 1:
        model.head, model.embed = nn.Linear(64, 300, bias=False), nn.Embedding(300, 64)
        model.blocks = model._modules.pop("blocks")
    set_up(model)


def another_shape() -> None:
    model = Model()
    if dist.get_rank() == 1:
        model.head = nn.Linear(64, 301, bias=False)
    set_up(model)


def another_trainability() -> None:
    model = Model()
    model.blocks[0].up.weight.requires_grad_(dist.get_rank() == 0)
    set_up(model)


def split_that_fits_nothing() -> None:
    set_up(split={"*.qkv.weight": {"q": 64, "k": 32}})


def split_of_another_size() -> None:
    set_up(split={"*.up.weight": {"gate": 48, "up": 64}}, make="muon and adamw")


def backward_twice() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers, 2)
    model(batch(2, dist.get_rank())).backward()
    model(batch(3, dist.get_rank())).backward()


def backward_after_a_step_without_zero_grad() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers, 2, zero=False)


def step_without_backward() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    optimizers[0].step()


def parameter_added() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.randn(8, 8))]})
    train(model, optimizers)


def moved_to_another_group() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    params = optimizers[0].param_groups[0]["params"]
    optimizers[0].param_groups.append({**optimizers[0].param_groups[0], "params": [params.pop()], "lr": 0.5})
    train(model, optimizers)


def left_its_optimizer() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    gone = optimizers[0].param_groups[0]["params"].pop()
    gone.grad = None
    train(model, optimizers)


def memory_replaced() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    model.blocks[0].up.weight.data = model.blocks[0].up.weight.data.clone()
    train(model, optimizers)


def parameters_replaced_by_a_checkpoint() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    train(model, optimizers)


def unfrozen_later() -> None:
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    model, optimizers, _ = set_up(model)
    train(model, optimizers)
    model.blocks[0].up.weight.requires_grad_(True)
    train(model, optimizers)


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


def under_ddp() -> None:
    set_up(DistributedDataParallel(Model()))


class OwnWrapper(nn.Module):
    """What zero1 sees of Megatron's DistributedDataParallel: a method, and an attribute in the place of another one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.buffers = module, []  # type: ignore[assignment]

    def finish_grad_sync(self) -> None:
        """Megatron's loop calls it after backward."""


def under_megatron() -> None:
    set_up(OwnWrapper(Model()))


def experts(seed: int, expert: bool = True, **options: Any) -> None:
    model = Model(seed)
    model.blocks[0].up.weight.allreduce = not expert
    model, optimizers, _ = set_up(model, **options)
    train(model, optimizers)


def experts_of_one_seed() -> None:
    experts(0)


def experts_of_several_seeds() -> None:
    experts(dist.get_rank(), layout={"blocks.0.up.weight": None})


def expert_on_one_rank() -> None:
    experts(0, expert=dist.get_rank() == 1)


def equal_experts() -> None:
    experts(0, layout={"blocks.0.up.weight": None})


def under_fsdp() -> None:
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    set_up(model)


def wrapped_already() -> None:
    model, optimizers, _ = set_up()
    canzona_compile.zero1(model, optimizers, mesh=dist.group.WORLD)


def mesh_without_this_rank() -> None:
    model = Model()
    mesh = DeviceMesh("cpu", [0])
    if dist.get_rank() == 0:
        raise canzona_compile.CanzonaError("only the other rank is at fault")
    canzona_compile.zero1(model, MAKERS["adamw"](model), mesh=mesh)


def clipped_by_torch() -> None:
    model, _, _ = set_up()
    model(batch(0, dist.get_rank())).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clipped_by_value() -> None:
    model, _, _ = set_up()
    model(batch(0, dist.get_rank())).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def scaled_on_one_rank(gather: str) -> None:
    model, optimizers, handle = set_up(gather=gather)
    train(model, optimizers)
    model(batch(1, dist.get_rank())).backward()
    if dist.get_rank() == 0:
        for param in model.parameters():
            param.grad.mul_(0.5)
    for optimizer in optimizers:
        optimizer.step()
    handle.synchronize()


def scaled_differently() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    model(batch(1, dist.get_rank())).backward()
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5 + dist.get_rank())
    for optimizer in optimizers:
        optimizer.step()


def another_rate() -> None:
    """A learning rate that is another one on one rank, before backward."""
    model, optimizers, _ = set_up()
    train(model, optimizers)
    if dist.get_rank() == 1:
        optimizers[1].param_groups[0]["lr"] = 0.25
    train(model, optimizers)


def another_rate_between_backward_and_step() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    model(batch(1, dist.get_rank())).backward()
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.25 if dist.get_rank() == 1 else 0.1
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizers)


def rate_set_right() -> list[str]:
    """What ranks raise until the rate is the same again; then they train on."""
    model, optimizers, _ = set_up()
    train(model, optimizers)
    right = optimizers[0].param_groups[0]["lr"]
    found = []
    for rate in (right * (1 + dist.get_rank()), right):
        optimizers[0].param_groups[0]["lr"] = rate
        try:
            train(model, optimizers)
            found.append("")
        except canzona_compile.CanzonaError as error:
            found.append(type(error).__name__)
            for optimizer in optimizers:
                optimizer.zero_grad()
    return found


def refused_on_one_rank() -> None:
    """One rank adds to its gradients; the other one goes on."""
    model, optimizers, _ = set_up()
    train(model, optimizers)
    model(batch(1, dist.get_rank())).backward()
    if dist.get_rank() == 0:
        model.head.weight.grad.add_(torch.ones(300, 64))
    for optimizer in optimizers:
        optimizer.step()


def hook_changes_dtype() -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    if dist.get_rank() == 0:
        model.blocks[0].up.weight.register_hook(lambda grad: grad.double())
    train(model, optimizers)


def optimizer_fails_on_one_rank() -> None:
    model, optimizers, _ = set_up(make="muon and adamw")
    train(model, optimizers)
    if dist.get_rank() == 0:  # after backward, in which ranks compare their numbers
        optimizers[0].register_step_pre_hook(lambda own, *_: own.param_groups[0].update(ns_steps="many"))
    train(model, optimizers)


def dies(where: str) -> None:
    model, optimizers, _ = set_up()
    train(model, optimizers)
    if dist.get_rank() == 1:
        if where == "backward":
            model.blocks[0].up.weight.register_hook(lambda _: os._exit(1))
        elif where == "step":
            optimizers[1].register_step_pre_hook(lambda *_: os._exit(1))
        else:
            with contextlib.suppress(Exception):
                model(batch(1, 1)).backward()
                optimizers[0].step()
            os._exit(1)
    train(model, optimizers)


MISTAKES: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (
        another_order,
        another_shape,
        another_trainability,
        split_that_fits_nothing,
        split_of_another_size,
        backward_twice,
        backward_after_a_step_without_zero_grad,
        step_without_backward,
        parameter_added,
        moved_to_another_group,
        left_its_optimizer,
        memory_replaced,
        parameters_replaced_by_a_checkpoint,
        unfrozen_later,
        under_ddp,
        under_fsdp,
        under_megatron,
        experts_of_one_seed,
        experts_of_several_seeds,
        expert_on_one_rank,
        equal_experts,
        wrapped_already,
        mesh_without_this_rank,
        clipped_by_torch,
        clipped_by_value,
        scaled_on_one_rank,
        scaled_differently,
        another_rate,
        another_rate_between_backward_and_step,
        refused_on_one_rank,
        hook_changes_dtype,
        optimizer_fails_on_one_rank,
        dies,
    )
}


AFTER = partial(step_alone)

ON_BOTH = {
    "another_order": "rank 0: blocks.0.norm.weight",
    "another_shape": r"rank 1: head.weight \[301, 64\]",
    "another_trainability": "requires_grad=False not trained",
    "split_that_fits_nothing": r"'\*.qkv.weight' matches no parameter; the optimizer has blocks.0.up.weight",
    "split_of_another_size": r"(?s)= 112 entries of dim 0, but the parameter has shape \[96, 64\].*blocks.0.up.weight",
    "backward_twice": "(?s)backward ran again.*no_sync",
    "backward_after_a_step_without_zero_grad": "(?s)backward ran again.*zero_grad",
    "step_without_backward": "no parameter has a gradient",
    "parameter_added": r"a trained parameter of shape \[8, 8\]",
    "moved_to_another_group": "(?s)in another group of its optimizer.*blocks.1.down.weight",
    "left_its_optimizer": "(?s)or in none.*blocks.1.down.weight",
    "memory_replaced": "(?s)storage of the parameter was replaced.*blocks.0.up.weight",
    "parameters_replaced_by_a_checkpoint": "(?s)parameters of the model were replaced.*embed.weight.*assign=True",
    "unfrozen_later": "(?s)was not in the optimizer.*requires_grad",
    "under_ddp": "already wrapped in DistributedDataParallel",
    "under_fsdp": "already wrapped in FSDP",
    "under_megatron": "(?s)the model is already wrapped in OwnWrapper, which reduces gradients.*pass the plain model",
    "experts_of_one_seed": r"(?s)allreduce=False says that it is an expert.*blocks.0.up.weight.*layout=.*None}",
    "experts_of_several_seeds": r"(?s)allreduce=False says that it is an expert.*blocks.0.up.weight",
    "expert_on_one_rank": r"rank 1: blocks.0.up.weight .* trained expert",
    "equal_experts": "^$",
    "wrapped_already": "already wrapped",
    "mesh_without_this_rank": "rank 1 is not part of|the other rank",
    "clipped_by_torch": "(?s)its norm would differ.*clip_grad_norm_",
    "clipped_by_value": "clamp_ would give a wrong result",
    "scaled_differently": "rank 0: foreach_mul by 0.5 of embed.weight and 11 more; rank 1: foreach_mul by 1.5",
    "another_rate": r"(?s)rank 0: group 0 of SGD has .*lr=0.1.*rank 1: group 0 of SGD has .*lr=0.25",
    "another_rate_between_backward_and_step": r"(?s)rank 1: group 0 of SGD has .*lr=0.25",
    "refused_on_one_rank": "backward ran again",
    "optimizer_fails_on_one_rank": "ns_steps >= 100",
}


# These leave a collective that one rank started and the other did not.
BREAKING = {"memory_replaced", "refused_on_one_rank", "optimizer_fails_on_one_rank", "mesh_without_this_rank"}


# Of what is alike: the other one takes seconds to show the same, or is a rarer mistake.
REPEATED = {
    "split_of_another_size",
    "backward_after_a_step_without_zero_grad",
    "parameter_added",
    "left_its_optimizer",
    "wrapped_already",
    "memory_replaced",
    "unfrozen_later",
    "clipped_by_value",
    "scaled_differently",
    "another_rate_between_backward_and_step",
    "optimizer_fails_on_one_rank",
}


@pytest.mark.parametrize("mistake", [full(name) if name in REPEATED else name for name in ON_BOTH])
def test_both_ranks_raise(mistake: str) -> None:
    for text in run(2, said, mistake, fresh=mistake in BREAKING, after=AFTER):
        assert re.search(ON_BOTH[mistake], text), text


@pytest.mark.parametrize("gather", first(["step", "forward"]))
def test_gradients_scaled_on_one_rank_only(gather: str) -> None:
    for text in run(2, said, "scaled_on_one_rank", gather, fresh=True, after=AFTER):
        assert "scaled differently on some ranks" in text
        assert "rank 0: mul by 0.5 of embed.weight" in text


def test_ranks_train_on_once_their_numbers_are_equal_again() -> None:
    assert run(2, rate_set_right, after=AFTER) == [["RankMismatch", ""]] * 2


def test_a_hook_that_changes_the_dtype() -> None:
    """Autograd refuses it on one rank, after ranks have begun to reduce; the other one hears that."""
    one, two = run(2, said, "hook_changes_dtype", fresh=True, after=AFTER)
    assert "changed the type of value" in one
    assert "the step failed on rank 0: CanzonaError: an exception interrupted a backward pass" in two


@pytest.mark.parametrize("where", [*also(["backward"]), "step", *also(["gather"])])
def test_a_rank_that_dies(where: str) -> None:
    one, two = run(2, said, "dies", where, fresh=True, dying=[1], after=AFTER)
    assert isinstance(two, Died)
    assert "no answer from rank 1" in one


@pytest.mark.ranks
def test_a_mesh_of_one_rank_reduces_nothing_and_says_so() -> None:
    for warned in run(2, mesh_of_one_rank):
        assert [one.partition(",")[0] for one in warned] == ["tp: mesh= has one rank"]
