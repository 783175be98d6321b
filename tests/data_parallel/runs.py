"""Training runs on ranks, for tests of ZeRO-1."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from tests.data_parallel.models import ALL_MAKERS, MAKERS, VOCABULARY, Model, batch, different
from tests.harness.layouts import full, mesh_of
from tests.harness.model_pairs import train_alone, update, zero1
from tests.harness.pairs import different as unlike


def step_alone(make: str = "sgd", dtype: torch.dtype = torch.float32) -> None:
    """Capture in one process what ranks need: their optimizers update the same matrices."""
    model = Model().to(dtype)
    train_alone(model, ALL_MAKERS[make](model))


def set_up(model: nn.Module | None = None, make: str = "sgd", **options: Any) -> tuple[Any, Any, Any]:
    made = model or Model()
    optimizers = zero1(made, ALL_MAKERS[make](made), **{"bucket_bytes": 40_000, **options})
    return made, optimizers, optimizers[0].canzona


def clipped(plain: nn.Module, handle: Any, clip: float, dtype: torch.dtype) -> list[str]:
    """Clip gradients both ways, by the norm that zero1 finds; what is wrong with that norm.

    It has the bits of torch's unless a parameter is cut: the sum over its elements then has another order.
    """
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    expected = nn.utils.get_total_norm(grads)
    found: Tensor = handle.clip_grad_norm_(clip)
    nn.utils.clip_grads_with_norm_(plain.parameters(), clip, found)
    cut = any(fragment.spread for fragment in handle.zero1.fragments.values())
    near = torch.allclose(found, expected, rtol=max(1e-6, torch.finfo(dtype).eps), atol=0.0)
    return [] if (near if cut else torch.equal(found, expected)) else [f"norm {found} for {expected}"]


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of the blocks over a mesh, the first of each by rows and the second by columns."""
    styles = {}
    for name, _ in model.named_modules():
        if name.endswith((".up", ".down")):
            styles[name] = ColwiseParallel() if name.endswith(".up") else RowwiseParallel()
    parallelize_module(model, mesh, styles)


def backward(forward: Any, no_sync: Callable[[], Any], step: int, rank: int, accumulate: int) -> None:
    """Accumulate the gradients of a step over its micro-steps, of which only the last one communicates."""
    for micro in range(accumulate):
        with no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
            (forward(batch(step, rank, micro)) / accumulate).backward()


def compare(
    make: str,
    steps: int,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
    accumulate: int = 1,
    ddp: bool = False,
    tp: int = 1,
    replicas: int = 1,
    vocabulary: int = VOCABULARY,
    **options: Any,
) -> list[str]:
    """Train under zero1 and by plain optimizers that get the mean of all ranks' gradients. What differs, by step.

    Args:
        make: the optimizers, a key of `MAKERS`.
        steps: how many.
        dtype: of the model.
        clip: the largest norm of gradients.
        accumulate: micro-steps per step.
        ddp: whether DDP takes that mean, or this rank computes the gradients of all in the order in which gloo adds.
        tp: the size of the tensor-parallel mesh dim.
        replicas: the size of the mesh dim that replicates groups of ZeRO-1.
        vocabulary: rows of the embedding.
        options: of `zero1`.
    """
    shape = (replicas, dist.get_world_size() // tp // replicas, tp)
    mesh = mesh_of(shape, ("replicas", "dp", "tp"))
    rank = mesh.get_local_rank("dp") + 10 * mesh.get_local_rank("replicas")
    model = Model(seed=rank, vocabulary=vocabulary).to(dtype)  # the first rank's values count
    plain, twin = copy.deepcopy(model), copy.deepcopy(model)  # the twin computes the gradients of every rank
    for sharded in (model, twin) if tp > 1 else ():
        tensor_parallel(sharded, mesh["tp"])
    found = zero1(model, MAKERS[make](model), mesh=mesh["replicas", "dp"] if replicas > 1 else mesh["dp"], **options)
    with torch.no_grad():
        for one, two in zip(plain.parameters(), model.parameters(), strict=True):
            one.copy_(full(two))
    expected = MAKERS[make](plain)  # before DDP, which asks which parameters are trained
    for own in expected if "state" in options else ():
        canzona_compile.round_state(own, options["state"])
    trained = [param for param in plain.parameters() if param.requires_grad]
    for one, two in zip(twin.parameters(), model.parameters(), strict=True):
        one.requires_grad_(two.requires_grad)
    reference = DistributedDataParallel(plain) if ddp else None
    handle = found[0].canzona
    schedules = [LambdaLR(optimizer, lambda k: 1.0 / (1 + k)) for optimizer in (*expected, *found)]
    differences: list[str] = []
    for step in range(steps):
        if reference is not None:
            backward(reference, reference.no_sync, step, rank, accumulate)
        else:
            for param, grad in zip(trained, summed(twin, model, shape[:2], step, accumulate), strict=True):
                param.grad = grad
        backward(model, handle.no_sync, step, rank, accumulate)
        if clip is not None:
            differences += [f"step {step}: {what}" for what in clipped(plain, handle, clip, dtype)]
        update((*expected, *found))
        for schedule in schedules:
            schedule.step()
        handle.synchronize()
        differences += [f"step {step}: {name}" for name in different(model, plain)]
    return differences + [what for one, two in zip(expected, found, strict=True) for what in unlike(one, two)]


def summed(twin: nn.Module, model: nn.Module, ranks: tuple[int, int], step: int, accumulate: int) -> list[Tensor]:
    """The mean of the whole gradients of all ranks, of what is trained, added up as gloo moves them: in the order of
    ranks, then replicas.

    Args:
        twin: a copy of the model, which is given its parameters.
        model: the model; its parameters are whole.
        ranks: how many replicas there are, and how many ranks in each.
        step: the number of the step.
        accumulate: micro-steps per step.
    """
    with torch.no_grad():
        for one, two in zip(twin.parameters(), model.parameters(), strict=True):
            one.copy_(two)
    rows: list[list[list[Tensor]]] = []  # by replica, rank and parameter
    for replica, rank in product(*map(range, ranks)):
        for micro in range(accumulate):
            (twin(batch(step, rank + 10 * replica, micro)) / accumulate).backward()
        grads = [full(p.grad) * (1.0 / (ranks[0] * ranks[1])) for p in twin.parameters() if p.grad is not None]
        twin.zero_grad()
        rows += [[]] if rank == 0 else []
        rows[-1].append(grads)
    replicas = [[reduce(torch.add, parts) for parts in zip(*row, strict=True)] for row in rows]
    return [reduce(torch.add, parts) for parts in zip(*replicas, strict=True)]
