"""Plain tensors that are fragments: the bits of a plain optimizer on whole matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import canzona_compile
from tests.harness.layouts import mesh_of
from tests.harness.marks import crossed, first, full
from tests.harness.model_pairs import update
from tests.harness.optimizers import share_captures
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
from tests.harness.ranks import do_alone, run

STEPS = 5


def train(
    make: str, how: str, shape: tuple[int, ...], cuts: Sequence[int], restored: bool = False, **options: Any
) -> list[str]:
    """Train the model on a mesh of this shape, (tp,) or (dp, tp); () is one process. Return what differs, by step."""
    mesh = mesh_of(shape, ("dp", "tp")[2 - len(shape) :]) if shape else None
    tp = None if mesh is None else mesh["tp"]
    dp = None if mesh is None or mesh.ndim == 1 else mesh["dp"]
    tp_rank = 0 if tp is None else tp.get_local_rank()
    model, plain = ShardedModel(tp, cuts), ShardedModel(None, cuts)
    named, whole_params = list(model.named_parameters()), list(plain.named_parameters())
    if tp is not None:
        options["layout"] = layout_by(how, tp, model)
    wrapped: list[Any] = []
    for optimizer in MAKERS[make](named):
        own = {**options, "layout": fitting(options.get("layout"), optimizer.param_groups[0]["param_names"])}
        wrapped.append(canzona_compile.wrap(optimizer, replicate=dp, **own))
        share_captures(wrapped[-1])
    expected = MAKERS[make](whole_params)
    found: list[str] = []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * step + (0 if dp is None else dp.get_local_rank()))
        model(torch.randn(4, WIDTH, generator=random)).backward()
        for _, param in named if dp is not None else ():
            dist.all_reduce(param.grad, group=dp.get_group())
        grads = {name: p.grad for name, p in named}
        whole = grads if tp is None else gathered(grads, tp.get_group())
        for name, param in whole_params:
            param.grad = whole[name]
        if restored and step == STEPS // 2:
            for optimizer in wrapped:
                optimizer.load_state_dict(optimizer.state_dict())
        update((*wrapped, *expected))
        found += [f"step {step}: {what}" for what in different_from_whole(named, wrapped, expected, cuts, tp_rank)]
    for optimizer in wrapped:
        canzona_compile.unwrap(optimizer)
        assert not canzona_compile.is_wrapped(optimizer)
    found += [f"unwrapped: {what}" for what in different_from_whole(named, wrapped, expected, cuts, tp_rank)]
    assert all(id(p) in {id(q) for _, q in named} for o in wrapped for p in o.state)
    return found


def fitting(layout: Any, names: Sequence[str]) -> Any:
    """The patterns that fit a parameter of one optimizer, if there are patterns."""
    if not isinstance(layout, dict):
        return layout
    return {pattern: told for pattern, told in layout.items() if any(fnmatchcase(n, pattern) for n in names)}


def on_ranks(make: str, how: str, shape: tuple[int, ...], cuts: Sequence[int], **options: Any) -> None:
    after = partial(train, make, how, (), cuts)
    for found in run(math.prod(shape), train, make, how, shape, cuts, after=after, **options):
        assert found == []


@pytest.mark.parametrize("make", first(MAKERS, 2))
def test_in_one_process(make: str) -> None:
    do_alone(partial(train, make, "patterns", (), EVEN))


@pytest.mark.parametrize(
    ("make", "how", "cuts"),
    crossed(["muon", "interpreted", "adamw", "soap"], ["patterns", "function", "attributes"], [EVEN, UNEVEN], most=3),
)
def test_two_tensor_parallel_ranks(make: str, how: str, cuts: tuple[int, int]) -> None:
    on_ranks(make, how, (2,), cuts, restored=True, strategy="owner")


def test_an_optimizer_that_holds_on_to_gradients() -> None:
    """It has the DTensor that was its gradient on one step, which must not be that of the next."""
    on_ranks("holds gradients", "patterns", (2,), EVEN)


def test_elementwise_steps_see_the_attributes_of_fragments() -> None:
    on_ranks("rates in attributes", "patterns", (2,), EVEN)


@pytest.mark.full
@pytest.mark.parametrize(("make", "cuts"), [("muon", UNEVEN), full("soap", EVEN)])
def test_with_replicas(make: str, cuts: tuple[int, int]) -> None:
    on_ranks(make, "patterns", (2, 2), cuts, restored=True)
