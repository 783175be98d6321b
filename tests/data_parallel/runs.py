"""Training runs on ranks, for tests of ZeRO-1."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from tests.data_parallel.models import MAKERS, Model, batch, different, different_state


def compare_with_ddp(
    make: str,
    steps: int,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
    accumulate: int = 1,
    **options: Any,
) -> list[str]:
    """Train under zero1 and under DDP with plain optimizers; what differs, by step."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Model(seed=rank).to(dtype)  # the first rank's values count
    plain = copy.deepcopy(model)
    reference = DistributedDataParallel(plain)
    expected = MAKERS[make](plain)
    found = canzona_compile.zero1(model, MAKERS[make](model), mesh=mesh, **options)
    handle = found[0].canzona
    schedules = [LambdaLR(o, lambda k: 1.0 / (1 + k)) for o in (*expected, *found)]
    differences: list[str] = []
    for step in range(steps):
        for one, sync in ((reference, reference.no_sync), (model, handle.no_sync)):
            for micro in range(accumulate):
                with sync() if micro < accumulate - 1 else contextlib.nullcontext():
                    (one(batch(step, rank, micro)) / accumulate).backward()
        if clip is not None:
            one = nn.utils.clip_grad_norm_(plain.parameters(), clip)
            two = handle.clip_grad_norm_(clip)
            if not torch.allclose(one, two, rtol=1e-6):
                differences.append(f"step {step}: norm {two} for {one}")
        for optimizer in (*expected, *found):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        handle.synchronize()
        differences += [f"step {step}: {name}" for name in different(model, plain)]
    for one, two in zip(expected, found, strict=True):
        differences += [f"state {p}" for p in different_state(two.state_dict()["state"], one.state_dict()["state"])]
    return differences


def whole_gradients(engine: Any) -> dict[str, torch.Tensor | None]:
    """The reduced gradients of all parameters, put together from what all ranks own. This is a collective."""
    own = []
    for name, fragment in engine.fragments.items():
        if fragment.param.grad is not None:
            own += [(name, p.start, v) for p, v in zip(fragment.owned, fragment.param.grad.parts, strict=True)]
    everybody: list[Any] = [None] * engine.group.size
    dist.all_gather_object(everybody, own, group=engine.group.shard)
    found: dict[str, Any] = {}
    for name, start, values in (part for parts in everybody for part in parts):
        param = engine.fragments[name].param
        flat = found.setdefault(name, torch.full(param.shape, torch.nan, dtype=param.dtype)).view(-1)
        flat[start : start + values.numel()] = values
    return found


def compare_with_plain(
    make: str,
    steps: int,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
    accumulate: int = 1,
    **options: Any,
) -> list[str]:
    """Train under zero1; a plain optimizer on this rank takes the reduced gradients. What differs, by step."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Model(seed=rank).to(dtype)
    found = canzona_compile.zero1(model, MAKERS[make](model), mesh=mesh, **options)
    plain = copy.deepcopy(model)
    expected = MAKERS[make](plain)
    handle = found[0].canzona
    schedules = [LambdaLR(o, lambda k: 1.0 / (1 + k)) for o in (*expected, *found)]
    differences: list[str] = []
    for step in range(steps):
        for micro in range(accumulate):
            with handle.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                (model(batch(step, rank, micro)) / accumulate).backward()
        if clip is not None:
            handle.clip_grad_norm_(clip)
        grads = whole_gradients(handle.zero1)
        for name, param in plain.named_parameters():
            param.grad = grads.get(name)
        for optimizer in (*expected, *found):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        handle.synchronize()
        differences += [f"step {step}: {name}" for name in different(model, plain)]
    for one, two in zip(expected, found, strict=True):
        differences += [f"state {p}" for p in different_state(two.state_dict()["state"], one.state_dict()["state"])]
    return differences
