"""ZeRO-1 beside tensor parallelism by hand: the bits of plain optimizers on whole matrices."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from canzona_compile import CanzonaError
from examples.optimizers.shampoo import Shampoo
from tests.harness import plain_shards
from tests.harness.layouts import mesh_of
from tests.harness.model_pairs import train_alone, update, zero1
from tests.harness.plain_shards import (
    EVEN,
    UNEVEN,
    WIDTH,
    Named,
    ShardedModel,
    different_from_whole,
    gathered,
    layout_by,
    matrices,
    vectors,
)
from tests.harness.ranks import run

STEPS, MICRO_STEPS = 20, 2
DTYPES = [torch.float32, torch.bfloat16]


def muon_alone(named: Named) -> list[Optimizer]:
    """Muon of a model of which nothing but matrices is trained."""
    for _, param in named:
        param.requires_grad_(param.ndim == 2)
    return [Muon(matrices(named), lr=0.02, weight_decay=0.1)]


MAKERS: dict[str, Callable[[Named], list[Optimizer]]] = {
    "muon and adamw": plain_shards.MAKERS["muon"],
    "soap": plain_shards.MAKERS["soap"],
    "shampoo": lambda m: [Shampoo(matrices(m), lr=1e-2, every=3), AdamW(vectors(m), lr=1e-2)],
    "muon": muon_alone,
    "adamw": plain_shards.MAKERS["adamw"],
}


def alone(make: str, dtype: torch.dtype) -> None:
    """Capture in one process what ranks need: their optimizers update the same matrices."""
    model = ShardedModel(None, EVEN).to(dtype)
    optimizers = MAKERS[make](list(model.named_parameters()))
    train_alone(model, optimizers, lambda model, *_: model(torch.randn(4, WIDTH, dtype=dtype)))


def train(
    make: str,
    how: str,
    cuts: Sequence[int],
    norm: float = 2.0,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    **options: Any,
) -> list[str]:
    """Train on 2 x 2 ranks under zero1; whole matrices take the reduced gradients. Return what differs, by step.

    With `how` "copies" one data-parallel rank is a mesh of two dims, of which the first one replicates.
    """
    mesh = mesh_of((1, 2, 2), ("dp", "copies", "tp")) if how == "copies" else mesh_of((2, 2), ("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    rank, group = tp.get_local_rank(), tp.get_group()
    model, plain = ShardedModel(tp, cuts).to(dtype), ShardedModel(None, cuts).to(dtype)
    named, whole = list(model.named_parameters()), list(plain.named_parameters())
    layout = layout_by("patterns" if how == "copies" else how, tp, model)
    if how == "copies":
        both = mesh["copies", "tp"]
        layout = {key: told and (both, [Replicate(), *told[1]]) for key, told in layout.items()}
    found = zero1(model, MAKERS[make](named), mesh=dp, layout=layout, **options)
    handle = found[0].canzona
    expected = MAKERS[make](whole)
    schedules = [LambdaLR(optimizer, lambda k: 1.0 / (1 + k)) for optimizer in (*found, *expected)]
    differences: list[str] = []
    for step in range(steps):
        for micro in range(MICRO_STEPS):
            random = torch.Generator().manual_seed(100 * step + 10 * micro + dp.get_local_rank())
            inputs = torch.randn(4, WIDTH, generator=random).to(dtype)
            with handle.no_sync() if micro < MICRO_STEPS - 1 else contextlib.nullcontext():
                model(inputs).backward()
        for (_, param), value in zip(whole, gathered(reduced(named), group).values(), strict=True):
            param.grad = value
        one = handle.clip_grad_norm_(1e-2, norm)
        two = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2, norm)
        if not torch.allclose(one, two, rtol=max(1e-5, torch.finfo(dtype).eps)):
            differences.append(f"step {step}: norm {one} for {two}")
        for (_, param), value in zip(whole, gathered(reduced(named), group).values(), strict=True):
            param.grad = value
        update((*found, *expected))
        for schedule in schedules:
            schedule.step()
        if step == steps // 2:
            for optimizer in found:
                optimizer.load_state_dict(optimizer.state_dict())
        handle.synchronize()
        differences += [f"step {step}: {what}" for what in different_from_whole(named, found, expected, cuts, rank)]
    for optimizer in found:
        canzona_compile.unwrap(optimizer)
    differences += [f"unwrapped: {what}" for what in different_from_whole(named, found, expected, cuts, rank)]
    return differences


def reduced(named: Sequence[tuple[str, Any]]) -> dict[str, torch.Tensor | None]:
    """This rank's fragments of the reduced gradients. This is a collective."""
    return {name: None if param.grad is None else param.grad.full_tensor() for name, param in named}


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "dtype", "how"),
    [
        *itertools.product(MAKERS, DTYPES, ["patterns"]),
        *itertools.product(["muon and adamw", "soap"], DTYPES[:1], ["attributes", "function"]),
    ],
)
def test_two_by_two(make: str, dtype: torch.dtype, how: str) -> None:
    cuts, norm = (UNEVEN, 2.0) if how != "attributes" else (EVEN, math.inf)
    after = partial(alone, make, dtype)
    for found in run(4, train, make, how, cuts, norm, dtype, bucket_bytes=2000, after=after):
        assert found == []


@pytest.mark.full
@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_a_mesh_dim_that_replicates_counts_once(norm: float) -> None:
    for found in run(4, train, "muon and adamw", "copies", UNEVEN, norm, steps=4, bucket_bytes=2000):
        assert found == []


def refused(told: str) -> str:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = ShardedModel(mesh["tp"], EVEN)
    layout: Any = {
        "pattern": {"*.gate.weight": (mesh["tp"], [Shard(0)])},
        "mesh": {"*.up.weight": (mesh, [Replicate(), Shard(0)])},
        "sizes": {"*.up.weight": (mesh["tp"], [Shard(1)] if mesh.get_rank() < 2 else [Shard(0)])},
    }[told]
    with pytest.raises(CanzonaError) as error:
        canzona_compile.zero1(
            model, MAKERS["muon and adamw"](list(model.named_parameters())), mesh=mesh["dp"], layout=layout
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("pattern", "'*.gate.weight' matches no parameter"),
        ("mesh", "which contains data-parallel ranks"),
        ("sizes", "replicas disagree"),
    ],
)
def test_what_is_refused_is_refused_on_every_rank(told: str, says: str) -> None:
    for said in run(4, refused, told):
        assert says in said
