"""ZeRO-1 beside tensor parallelism by hand: the bits of plain optimizers on whole matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import canzona_compile
from canzona_compile import CanzonaError
from tests.harness.layouts import mesh_of
from tests.harness.marks import crossed
from tests.harness.plain_shards import (
    EVEN,
    MAKERS,
    UNEVEN,
    WIDTH,
    ShardedModel,
    different_from_whole,
    gathered,
    layout_by,
)
from tests.harness.ranks import run
from tests.session.test_plain_layout import train as train_wrapped

STEPS = 4


def train(make: str, how: str, cuts: Sequence[int], norm: float = 2.0, **options: Any) -> list[str]:
    """Train on 2 x 2 ranks under zero1; whole matrices take the reduced gradients. Return what differs, by step.

    With `how` "copies" one data-parallel rank is a mesh of two dims, of which the first one replicates.
    """
    mesh = mesh_of((1, 2, 2), ("dp", "copies", "tp")) if how == "copies" else mesh_of((2, 2), ("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    rank, group = tp.get_local_rank(), tp.get_group()
    model, plain = ShardedModel(tp, cuts), ShardedModel(None, cuts)
    named, whole = list(model.named_parameters()), list(plain.named_parameters())
    layout = layout_by("patterns" if how == "copies" else how, tp, model)
    if how == "copies":
        both = mesh["copies", "tp"]
        layout = {key: told and (both, [Replicate(), *told[1]]) for key, told in layout.items()}
    found = canzona_compile.zero1(model, MAKERS[make](named), mesh=dp, layout=layout, **options)
    handle: Any = found[0].canzona  # type: ignore[attr-defined]
    expected = MAKERS[make](whole)
    differences: list[str] = []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * step + dp.get_local_rank())
        model(torch.randn(4, WIDTH, generator=random)).backward()
        for (_, param), value in zip(whole, gathered(reduced(named), group).values(), strict=True):
            param.grad = value
        one = handle.clip_grad_norm_(1e-2, norm)
        two = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2, norm)
        if not torch.allclose(one, two, rtol=1e-5):
            differences.append(f"step {step}: norm {one} for {two}")
        for (_, param), value in zip(whole, gathered(reduced(named), group).values(), strict=True):
            param.grad = value
        for optimizer in (*found, *expected):
            optimizer.step()
            optimizer.zero_grad()
        if step == STEPS // 2:
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
    return {name: param.grad.full_tensor() for name, param in named}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("make", "how", "cuts", "norm"),
    crossed(["muon", "soap"], ["patterns", "attributes", "function"], [UNEVEN, EVEN], [2.0, math.inf], most=0),
)
def test_two_by_two(make: str, how: str, cuts: tuple[int, int], norm: float) -> None:
    after = partial(train_wrapped, make, how, (), cuts)
    for found in run(4, train, make, how, cuts, norm, bucket_bytes=2000, after=after):
        assert found == []


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_a_mesh_dim_that_replicates_counts_once(norm: float) -> None:
    for found in run(4, train, "muon", "copies", UNEVEN, norm, bucket_bytes=2000):
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
        canzona_compile.zero1(model, MAKERS["muon"](list(model.named_parameters())), mesh=mesh["dp"], layout=layout)
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("pattern", "'*.gate.weight' fits no parameter"),
        ("mesh", "which contains data-parallel ranks"),
        ("sizes", "replicas disagree"),
    ],
)
def test_what_is_refused_is_refused_on_every_rank(told: str, says: str) -> None:
    for said in run(4, refused, told):
        assert says in said
