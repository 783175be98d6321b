"""Parameters of one rank or stage alone, and whole trainings: forward, backward, clipping, schedule."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import canzona_compile
from tests.harness.layouts import Net, full, mesh_of
from tests.harness.optimizers import MUON_GROUPS, muon, param_groups, shapes_of, share_captures
from tests.harness.pairs import capture_alone, parameters
from tests.harness.ranks import collectives, run

STEPS = 12
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.full)]

# -- tensors that belong to one rank ---------------------------------------------------------------


def step_alone(dtype: torch.dtype, *shapes: tuple[int, int]) -> None:
    """What ranks would capture, each by itself."""
    capture_alone(torch.optim.Muon(parameters(shapes, dtype), lr=2e-2))


def train_own(dtype: torch.dtype) -> tuple[list[bool], int]:
    """Plain tensors without replicate=, different ones on every rank; one shape for all."""
    random = torch.Generator().manual_seed(dist.get_rank())
    values = [torch.randn(16, 8, generator=random).to(dtype) for _ in range(2)]
    own = [torch.nn.Parameter(v.clone()) for v in values]
    alone = [torch.nn.Parameter(v.clone()) for v in values]
    optimizers = [torch.optim.Muon(own, lr=2e-2), torch.optim.Muon(alone, lr=2e-2)]
    canzona_compile.wrap(optimizers[0])
    share_captures(optimizers[0])
    before = 0
    for _ in range(4):
        for x, y in zip(own, alone, strict=True):
            x.grad = torch.randn(x.shape, generator=random).to(dtype)
            y.grad = x.grad.clone()
        before = collectives()
        for optimizer in optimizers:
            optimizer.step()
    states = [o.state_dict()["state"] for o in optimizers]
    same = [torch.equal(x, y) for x, y in zip(own, alone, strict=True)]
    same += [
        torch.equal(x["momentum_buffer"], y["momentum_buffer"])
        for x, y in zip(states[0].values(), states[1].values(), strict=True)
    ]
    return same, collectives() - before


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_tensors_belong_to_their_rank(dtype: torch.dtype) -> None:
    assert run(2, train_own, dtype, after=partial(step_alone, dtype, (16, 8))) == [([True] * 4, 0)] * 2


def train_stage(dtype: torch.dtype) -> tuple[list[bool], int, list[str]]:
    """Two pipeline stages with other shapes and numbers of parameters, each on two replicas."""
    mesh = mesh_of((2, 2), ("stages", "replicas"))
    stage = mesh.get_local_rank("stages")
    random = torch.Generator().manual_seed(stage)
    shapes = [[(16, 8)] * 3, [(24, 40)] * 2][stage]
    values = [torch.randn(s, generator=random).to(dtype) for s in shapes]
    own = [torch.nn.Parameter(v.clone()) for v in values]
    alone = [torch.nn.Parameter(v.clone()) for v in values]
    optimizers = [torch.optim.Muon(own, lr=2e-2), torch.optim.Muon(alone, lr=2e-2)]
    canzona_compile.wrap(optimizers[0], replicate=mesh["replicas"], strategy="owner")
    share_captures(optimizers[0])
    before = 0
    for _ in range(4):
        for x, y in zip(own, alone, strict=True):
            x.grad = torch.randn(x.shape, generator=random).to(dtype)
            y.grad = x.grad.clone()
        before = collectives()
        for optimizer in optimizers:
            optimizer.step()
    started = collectives() - before
    tasks = optimizers[0].canzona.report().to_dict()["tasks"]  # type: ignore[attr-defined]
    same = [torch.equal(x, y) for x, y in zip(own, alone, strict=True)]
    return same, started, [str(task["owner"]) for task in tasks]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
def test_pipeline_stages(dtype: torch.dtype) -> None:
    # One collective with which ranks agree, and one that carries updates.
    first, second = ([True] * 3, 2, ["0", "1", "0"]), ([True] * 2, 2, ["2", "3"])
    captured = partial(step_alone, dtype, (16, 8), (24, 40))
    assert run(4, train_stage, dtype, after=captured) == [first, first, second, second]


# -- whole training --------------------------------------------------------------------------------


def train_model(parallelism: str, dtype: torch.dtype) -> tuple[list[bool], float]:
    """Forward, backward, clipping, scheduler: by FSDP2 or DDP, beside plain Muon with gathered gradients."""
    random = torch.Generator().manual_seed(7)
    shapes = shapes_of(MUON_GROUPS)
    values = [(torch.randn(s, generator=random) * 0.1).to(dtype) for s in shapes]
    alone = [torch.nn.Parameter(v.clone()) for v in values]
    net = Net(values)
    if parallelism == "fsdp":
        fully_shard(net, mesh=mesh_of((dist.get_world_size(),), ("dp",)))
    model = DistributedDataParallel(net) if parallelism == "ddp" else net
    plain, optimizer = (muon(param_groups(MUON_GROUPS, p)) for p in (alone, net.weights()))
    schedulers = [CosineAnnealingLR(o, STEPS) for o in (plain, optimizer)]
    replicate = dist.group.WORLD if parallelism == "ddp" else None
    canzona_compile.wrap(optimizer, replicate=replicate, strategy="owner")
    share_captures(optimizer)
    data = torch.Generator().manual_seed(dist.get_rank())
    first = last = 0.0
    for step in range(STEPS):
        inputs = [torch.randn(3, n, generator=data).to(dtype) for _, n in shapes]
        optimizer.zero_grad()
        loss = model(inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for x, y in zip(alone, net.weights(), strict=True):
            assert y.grad is not None
            x.grad = full(y.grad).clone()
        for o in (plain, optimizer):
            o.step()
        for scheduler in schedulers:
            scheduler.step()
        first, last = (float(loss), 0.0) if step == 0 else (first, float(loss))
    same = [torch.equal(x, full(y)) for x, y in zip(alone, net.weights(), strict=True)]
    return same, last / first


def groups_alone(dtype: torch.dtype) -> None:
    """What ranks would capture, each by itself."""
    capture_alone(muon(param_groups(MUON_GROUPS, parameters(shapes_of(MUON_GROUPS), dtype))))


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parallelism", "ranks"), [("fsdp", 3), pytest.param("ddp", 2, marks=pytest.mark.full)])
def test_training(parallelism: str, ranks: int, dtype: torch.dtype) -> None:
    for same, progress in run(ranks, train_model, parallelism, dtype, after=partial(groups_alone, dtype)):
        assert same == [True] * 9
        assert progress < 0.99


# -- counters on ranks without elements ------------------------------------------------------------


def train_one_row(shape: tuple[int, int]) -> tuple[bool, list[float]]:
    """A matrix of which some ranks have nothing, under an optimizer whose counter is a tensor."""
    random = torch.Generator().manual_seed(3)
    value = torch.randn(shape, generator=random).bfloat16()
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    own = torch.nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)]))
    alone = torch.nn.Parameter(value.clone())
    optimizers = [torch.optim.RMSprop([p], lr=1e-2, centered=True, momentum=0.9) for p in (own, alone)]
    canzona_compile.wrap(optimizers[0], strategy="owner")
    for _ in range(4):
        alone.grad = torch.randn(shape, generator=random).bfloat16()
        own.grad = distribute_tensor(alone.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert len(optimizers[0].canzona.report().tasks) == 1, "elementwise, so this would show nothing"  # type: ignore[attr-defined]
    steps = [float(o.state_dict()["state"][0]["step"]) for o in optimizers]
    return torch.equal(full(own), alone), steps


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "shape"), [(2, (1, 9)), pytest.param(3, (2, 9), marks=pytest.mark.full)])
def test_tensors_that_count_do_so_where_a_fragment_is_empty(ranks: int, shape: tuple[int, int]) -> None:
    assert run(ranks, train_one_row, shape) == [(True, [4.0, 4.0])] * ranks
