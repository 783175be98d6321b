"""Parameters with which no step can train anything, and what users forget: said at the first step, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import canzona_compile
from canzona_compile.errors import CanzonaError, InvalidGradient
from tests.harness.layouts import mesh_of
from tests.harness.mistakes import attempt
from tests.harness.optimizers import share_captures
from tests.harness.ranks import run

INPUT = torch.ones(2, 12)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20, bias=False), nn.SiLU(), nn.Linear(20, 12, bias=False))


def muon(model: nn.Module, **options: Any) -> Any:
    optimizer = canzona_compile.wrap(torch.optim.Muon(model.parameters(), lr=0.1), model=model, **options)
    share_captures(optimizer)
    return optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    model(INPUT).square().sum().backward()
    optimizer.step()


def alone() -> None:
    model = model_of()
    step(model, muon(model))


def raised(work: Callable[[], object]) -> tuple[str, str]:
    """The class and the text of the error that some work ends with on this rank."""
    found = attempt(work)
    return found.error, found.said


# -- parameters that the model no longer has ---------------------------------------------------------


def sharded_late(how: str) -> tuple[str, str]:
    model = model_of()
    optimizer = muon(model)
    if how == "fsdp":
        fully_shard(model)
    else:
        parallelize_module(model, mesh_of((2,), ("tp",)), {"0": ColwiseParallel(use_local_output=False)})
        parallelize_module(model, mesh_of((2,), ("tp",)), {"2": ColwiseParallel()})
    return raised(lambda: step(model, optimizer))


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_a_model_that_is_sharded_after_its_optimizer_was_made(how: str) -> None:
    for kind, text in run(2, sharded_late, how):
        assert kind == "CanzonaError"
        assert "the model was sharded after the optimizer was built" in text
        assert "at:   0.weight, 2.weight\n  hint: call fully_shard(model)" in text


def test_a_first_step_without_gradients_is_none() -> None:
    """The model has the parameters, or nothing tells that another one took their place."""
    model = model_of()
    before = [p.detach().clone() for p in model.parameters()]
    muon(model).step()
    canzona_compile.wrap(torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])).step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def beside_a_sharded_model() -> list[int]:
    """How many parameters explain and step take, of a model that is whole, without gradients, next to a sharded one."""
    other = nn.Linear(7, 5)
    fully_shard(other)
    loose = nn.Parameter(torch.ones(6, 4))
    optimizer = torch.optim.Muon([loose])
    found = [len(canzona_compile.explain(optimizer).parameters)]
    canzona_compile.wrap(optimizer).step()
    return [*found, sum(1 for _ in other.parameters())]


def test_parameters_of_no_module_next_to_a_sharded_model() -> None:
    """The other model has no parameter of this shape, so it cannot have replaced this one."""
    assert run(2, beside_a_sharded_model) == [[1, 2]] * 2


def test_parameters_without_values() -> None:
    model = model_of().to("meta")
    optimizer = muon(model)
    model.to_empty(device="cpu")
    with pytest.raises(CanzonaError, match=r"on the meta device.*\n  at:   0.weight\n  hint: call model.to_empty"):
        step(model, optimizer)


# -- parameters that are no matrices any more --------------------------------------------------------


def flattened(original: bool) -> tuple[str, str]:
    model = model_of()
    made = torch.optim.Muon(model.parameters())  # before, because Muon itself refuses vectors
    sharded: Any = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
    optimizer: Any = made if original else torch.optim.AdamW(sharded.parameters())
    canzona_compile.wrap(optimizer)
    return raised(lambda: step(sharded, optimizer))


@pytest.mark.parametrize("original", [True, False])
def test_parameters_that_fsdp1_has_flattened(original: bool) -> None:
    for kind, text in run(2, flattened, original, fresh=True):
        assert kind == "UnsupportedLayout"
        assert "FSDP1 has flattened the parameter" in text
        assert "fully_shard (FSDP2)" in text


@pytest.mark.parametrize("mark", ["_hp_mapping", "ds_id"])
def test_flat_shards_of_deepspeed(mark: str) -> None:
    """In ZeRO's stages 1 to 3 its engine gives the optimizer flat tensors in the place of parameters."""
    model, flat = model_of(), torch.zeros(240, requires_grad=True)
    optimizers: Any = [kind(model.parameters(), lr=0.1) for kind in (torch.optim.Muon, torch.optim.AdamW)]
    for optimizer in optimizers:
        canzona_compile.wrap(optimizer)
    for param in model.parameters():
        setattr(param, mark, 0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    kind, text = raised(optimizers[0].step)
    assert kind == "UnsupportedLayout"
    assert "flat shard of a partition" in text
    assert '"stage": 0' in text
    assert "replicate=" in text
    assert "one_per_matrix" not in text
    assert str(canzona_compile.explain(optimizers[0]).parameters[0].why) in text
    optimizers[1].step()  # elementwise, so it may cut them anywhere
    assert flat.detach().ne(0).all()


# -- gradients ---------------------------------------------------------------------------------------


def first_step_without(odd: bool) -> tuple[str, str]:
    model = model_of()
    fully_shard(model)
    optimizer = muon(model)
    model(INPUT).square().sum().backward()
    if odd and dist.get_rank() == 1:
        next(model.parameters()).grad = None
    return raised(optimizer.step)


def test_a_gradient_that_one_rank_lacks_at_the_first_step() -> None:
    assert run(2, first_step_without, False, after=partial(alone)) == [("", "")] * 2
    for kind, text in run(2, first_step_without, True, fresh=True, after=partial(alone)):
        assert kind == InvalidGradient.__name__
        assert (
            "gradients are missing on some ranks only (rank 0: every gradient is there; rank 1: no gradient for 0."
            in text
        )


# -- what is forgotten -------------------------------------------------------------------------------


def under_ddp(shared: bool) -> list[str]:
    """The warnings of two steps."""
    model: Any = DistributedDataParallel(model_of())
    optimizer = muon(model, replicate=dist.group.WORLD if shared else None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, optimizer)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})  # a new plan
    return [str(one.message) for one in found if "DistributedDataParallel" in str(one.message)]


def test_ddp_without_replicate_is_noticed_once() -> None:
    (noticed,), silent = run(2, under_ddp, False, after=partial(alone))
    assert "canzona_compile.wrap(optimizer, replicate=torch.distributed.group.WORLD)" in noticed
    assert silent == []
    assert run(2, under_ddp, True, after=partial(alone)) == [[], []]


# -- arguments of wrap -------------------------------------------------------------------------------


def test_what_is_no_optimizer() -> None:
    wrap: Any = canzona_compile.wrap
    optimizer = torch.optim.Muon(model_of().parameters())
    with pytest.raises(CanzonaError, match=r"is an optimizer class\n.*\n  hint: call wrap\(Muon\(.*wrap_cls\(Muon\)"):
        wrap(torch.optim.Muon)
    with pytest.raises(CanzonaError, match=r"one optimizer, not a list of 2\n.*\n  hint: call wrap\(chain"):
        wrap([optimizer, optimizer])
    for call in (canzona_compile.wrap, canzona_compile.explain, canzona_compile.unwrap):
        with pytest.raises(CanzonaError, match=r"takes a torch\.optim\.Optimizer, not a Linear(.|\n)*muon_adamw"):
            call(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(CanzonaError, match=r"takes a torch\.optim\.Optimizer"):
        wrap(None)
