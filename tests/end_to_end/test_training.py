"""Parameters of one rank or stage alone, and whole trainings: forward, backward, clipping, schedule."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

import canzona_compile
from tests.harness.beside import BesidePlain
from tests.harness.layouts import Case, Net, full, mesh_of
from tests.harness.optimizers import MUON_GROUPS, muon, param_groups, shapes_of, share_captures
from tests.harness.pairs import Pair, capture_alone, parameters
from tests.harness.ranks import run

STEPS = 12
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.full)]

# -- tensors that belong to one rank ---------------------------------------------------------------


def step_alone(dtype: torch.dtype, *shapes: tuple[int, int]) -> None:
    """What ranks would capture, each by itself."""
    capture_alone(Muon(parameters(shapes, dtype), lr=2e-2))


def train_own(dtype: torch.dtype) -> int:
    """Plain tensors without replicate=, different ones on every rank; one shape for all."""
    pair = Pair(partial(Muon, lr=2e-2), ((16, 8),) * 2, dtype=dtype, seed=dist.get_rank())
    pair.go(4)
    pair.check()
    return pair.started


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_tensors_belong_to_their_rank(dtype: torch.dtype) -> None:
    assert run(2, train_own, dtype, after=partial(step_alone, dtype, (16, 8))) == [0, 0]


def train_stage(dtype: torch.dtype) -> tuple[int, list[str]]:
    """Two pipeline stages with other shapes and numbers of parameters, each on two replicas."""
    mesh = mesh_of((2, 2), ("stages", "replicas"))
    stage = mesh.get_local_rank("stages")
    shapes = [[(16, 8)] * 3, [(24, 40)] * 2][stage]
    pair = Pair(partial(Muon, lr=2e-2), shapes, dtype=dtype, seed=stage, replicate=mesh["replicas"], strategy="owner")
    pair.go(4)
    pair.check()
    return pair.started, [str(task.owner) for task in pair.report.tasks]


@pytest.mark.parametrize("dtype", DTYPES)
def test_pipeline_stages(dtype: torch.dtype) -> None:
    # One collective with which ranks agree, and one that carries updates.
    first, second = (2, ["0", "1", "0"]), (2, ["2", "3"])
    captured = partial(step_alone, dtype, (16, 8), (24, 40))
    assert run(4, train_stage, dtype, after=captured) == [first, first, second, second]


# -- whole training --------------------------------------------------------------------------------


def train_model(parallelism: str, dtype: torch.dtype) -> tuple[list[str], float]:
    """Forward, backward, clipping, scheduler: by FSDP2 or DDP, beside plain Muon with gathered gradients."""
    shapes = shapes_of(MUON_GROUPS)
    net = Net([param.detach() for param in parameters(shapes, dtype, size=0.1)])
    if parallelism == "fsdp":
        fully_shard(net, mesh=mesh_of((dist.get_world_size(),), ("dp",)))
    model = DistributedDataParallel(net) if parallelism == "ddp" else net
    optimizer = muon(param_groups(MUON_GROUPS, net.weights()))
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    replicate = dist.group.WORLD if parallelism == "ddp" else None
    canzona_compile.wrap(optimizer, replicate=replicate, strategy="owner")
    share_captures(optimizer)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    with BesidePlain() as beside:
        for _ in range(STEPS):
            inputs = [torch.randn(3, n, generator=data).to(dtype) for _, n in shapes]
            optimizer.zero_grad()
            loss = model(inputs)
            loss.backward()
            assert float(full(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))) > 1.0
            optimizer.step()
            scheduler.step()
            losses.append(float(loss))
    assert max(group["lr"] for group in optimizer.param_groups) == pytest.approx(0.0, abs=1e-12)
    return beside.finish(), losses[-1] / losses[0]


def groups_alone(dtype: torch.dtype) -> None:
    """What ranks would capture, each by itself."""
    capture_alone(muon(param_groups(MUON_GROUPS, parameters(shapes_of(MUON_GROUPS), dtype))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parallelism", "ranks"), [("fsdp", 3), pytest.param("ddp", 2, marks=pytest.mark.full)])
def test_training(parallelism: str, ranks: int, dtype: torch.dtype) -> None:
    for wrong, progress in run(ranks, train_model, parallelism, dtype, after=partial(groups_alone, dtype)):
        assert wrong == []
        assert progress < 0.99


# -- counters on ranks without elements ------------------------------------------------------------


def train_one_row(ranks: int, shape: tuple[int, int]) -> None:
    """A matrix of which some ranks have nothing, under an optimizer whose counter is a tensor."""
    make = partial(RMSprop, lr=1e-2, centered=True, momentum=0.9)
    pair = Pair(make, [shape], Case("stack_dim0", (ranks,)), dtype=torch.bfloat16, strategy="owner")
    pair.go(4)
    pair.check()
    assert len(pair.report.tasks) == 1, "elementwise, so this would show nothing"


@pytest.mark.parametrize(("ranks", "shape"), [(2, (1, 9)), pytest.param(3, (2, 9), marks=pytest.mark.full)])
def test_tensors_that_count_do_so_where_a_fragment_is_empty(ranks: int, shape: tuple[int, int]) -> None:
    run(ranks, train_one_row, ranks, shape)
