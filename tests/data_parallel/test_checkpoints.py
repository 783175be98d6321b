"""What zero1 saves others load, and the other way round, with the bits of an unbroken run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon

import canzona_compile
from canzona_compile import CanzonaError, chain
from tests.data_parallel import fused
from tests.data_parallel.models import MAKERS, Model
from tests.data_parallel.runs import tensor_parallel
from tests.harness.checkpoint_routes import quietly
from tests.harness.layouts import full, mesh_of
from tests.harness.marks import only
from tests.harness.model_pairs import update, zero1
from tests.harness.optimizers import shared_captures
from tests.harness.pairs import unlike
from tests.harness.ranks import run

STEPS = 3


def gradient(shape: torch.Size, step: int, index: int) -> Tensor:
    """The gradient of a parameter in a step, the same on every rank.

    Its elements are multiples of 3/64, so that a mean over up to four ranks gives the same bits.
    """
    random = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(shape, generator=random).mul(64).round().mul(3 / 64)


def plain_run(make: str, steps: int) -> tuple[list[Tensor], list[Any]]:
    """The plain optimizers in one process: parameters, and the state of each optimizer."""
    model = Model()
    optimizers = MAKERS[make](model)
    for step in range(steps):
        for i, param in enumerate(model.parameters()):
            param.grad = gradient(param.shape, step, i)
        update(optimizers)
    return [p.detach() for p in model.parameters()], [o.state_dict()["state"] for o in optimizers]


def apart_run(make: str, split: str, steps: int) -> fused.Apart:
    """The same for the model with fused weights: plain optimizers of their pieces."""
    model = fused.FusedModel()
    plain = fused.Apart(make, model, fused.SPLITS[split])
    for step in range(steps):
        for i, param in enumerate(model.parameters()):
            param.grad = gradient(param.shape, step, i)
        plain.step()
    return plain


def alone(make: str, split: str = "") -> None:
    """Capture in one process what ranks need."""
    Trained("wrap", make, split).steps(0, 2)


class Trained:
    """A model and its optimizers on this rank, in a layout.

    Args:
        layout: "plain" and "wrap" are one process. "zero1", "zero1 replicas" and "zero1 tp" are data parallelism over
            all ranks, over half of them in two replicas, and over half of them beside tensor parallelism. "fsdp" and
            "tp" are sharded parameters under `wrap`; "replicate" is `wrap(replicate=)`, and "replicate tp" that on the
            tensor-parallel parameters of two replicas.
        make: the optimizers, a key of `MAKERS`.
        split: for the model with fused weights, a key of `fused.SPLITS`; empty for the other one.
    """

    def __init__(self, layout: str, make: str, split: str = "") -> None:
        self.split = split
        self.layout, self.zero1 = layout, layout.startswith("zero1")
        # The first data-parallel rank's values count. Tensor-parallel ranks hold plain parameters alike.
        seed = dist.get_rank() // (2 if layout == "zero1 tp" else 1) if self.zero1 else 0
        self.model: Any = fused.FusedModel(seed) if split else Model(seed)
        data: Any = self._lay_out()
        self.optimizers: Any = fused.named(make, self.model) if split else MAKERS[make](self.model)
        splits = fused.SPLITS[split] if split else {}
        size = fused.BUCKETS if split else 40_000
        with shared_captures():
            if self.zero1:
                canzona_compile.zero1(self.model, self.optimizers, mesh=data, bucket_bytes=size, split=splits)
            for i, optimizer in enumerate(self.optimizers if not self.zero1 and layout != "plain" else ()):
                canzona_compile.wrap(optimizer, replicate=data, model=self.model, split={} if i else splits)

    def _lay_out(self) -> DeviceMesh | None:
        """Shard the parameters; the mesh over which they are equal, if there is one."""
        if self.layout in ("plain", "wrap"):
            return None
        world = dist.get_world_size()
        match self.layout:
            case "fsdp":
                for block in () if self.split else self.model.blocks:
                    fully_shard(block)
                fully_shard(self.model)
                return None
            case "tp":
                self._cut(self.model, mesh_of((world,), ("tp",)))
                return None
            case "zero1 tp" | "replicate tp":
                mesh = mesh_of((world // 2, 2), ("dp", "tp"))
                self._cut(self.model, mesh["tp"])
                return mesh["dp"]
            case "zero1 replicas":
                return mesh_of((2, world // 2), ("replicas", "dp"))
        return mesh_of((world,), ("dp",))

    @property
    def _cut(self) -> Callable[[Any, DeviceMesh], None]:
        return fused.tensor_parallel if self.split else tensor_parallel

    def steps(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            if self.zero1:
                given_loss(self.model, step).backward()
            else:
                for i, param in enumerate(self.model.parameters()):
                    param.grad = like(param, gradient(param.shape, step, i))
            update(self.optimizers)

    def differs(self, make: str, steps: int) -> list[str]:
        """What differs from the plain run after so many steps; a collective."""
        if self.split:
            return fused.differences(self.model, self.optimizers, apart_run(make, self.split, steps))
        params, states = plain_run(make, steps)
        pairs = zip(self.model.named_parameters(), params, strict=True)
        found = [name for (name, one), two in pairs if not torch.equal(full(one), two)]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            found += unlike("state ", optimizer.state_dict()["state"], state)
        return found


def like(param: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's part of a gradient, laid out like its parameter."""
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements)


def part(tensor: Any) -> Any:
    """What this rank holds of a tensor; gradients flow back through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(layout: str, make: str, folder: Path, split: str = "") -> list[str]:
    """Train, and save shards."""
    run = Trained(layout, make, split)
    run.steps(0, STEPS)
    model, optimizer = get_state_dict(run.model, list(run.optimizers))
    with quietly():
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return run.differs(make, STEPS)


def load(layout: str, make: str, folder: Path, split: str = "") -> list[str]:
    """Load into a new run and train on; what differs from the plain run."""
    run = Trained(layout, make, split)
    model, optimizer = get_state_dict(run.model, list(run.optimizers))
    found = {"model": model, "optimizer": optimizer}
    with quietly():
        dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        run.model, list(run.optimizers), model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    run.steps(STEPS, 2 * STEPS)
    return run.differs(make, 2 * STEPS)


def named(backwards: bool, others: Sequence[str] = ("embed", "head")) -> tuple[nn.Module, Any]:
    """A model under zero1, with a chain that has its parameters by name in one order or the other."""
    model = Model()
    every = list(model.named_parameters())[:: -1 if backwards else 1]
    rest = [entry for entry in every if entry[1].ndim == 1 or entry[0].split(".")[0] in others]
    own = [entry for entry in every if not any(entry is other for other in rest)]
    optimizer = chain(Muon(own, lr=0.02), AdamW(rest, lr=1e-3))
    return model, zero1(model, optimizer, bucket_bytes=40_000)


def by_name() -> list[str]:
    """Load into an optimizer with the parameters in another order, and into one with another choice of them."""
    model, optimizer = named(backwards=False)
    train(model, optimizer, 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loaded, its_optimizer = named(backwards=True)
    loaded.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    for own in ((model, optimizer), (loaded, its_optimizer)):
        train(*own, 1)
    pairs = zip(model.named_parameters(), loaded.parameters(), strict=True)
    wrong = [name for (name, one), two in pairs if not torch.equal(one, two)]
    try:
        named(backwards=True, others=["embed"])[1].load_state_dict(saved[1])
    except CanzonaError as error:
        return wrong + ([] if "none where the optimizer has head.weight" in str(error) else [str(error)])
    return [*wrong, "loaded for another choice"]


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    given_loss(model, step).backward()
    update([optimizer])


def given_loss(model: nn.Module, step: int) -> Tensor:
    """Its gradients are the given ones of parameters, or of this rank's part of them."""
    params = list(model.parameters())
    grads = [like(param, gradient(param.shape, step, i)) for i, param in enumerate(params)]
    return torch.stack([(part(p) * part(g)).sum() for p, g in zip(params, grads, strict=True)]).sum()


def test_state_goes_by_names() -> None:
    assert run(2, by_name, after=partial(alone, "muon and adamw")) == [[], []]


Place = tuple[str, int]  # a layout, and the number of ranks

ZERO1, PLAIN = ("zero1", 4), ("plain", 1)
OTHERS = [("zero1", 3), ("fsdp", 2), PLAIN, ("replicate", 2), ("zero1 tp", 4), ("zero1 replicas", 4), ("tp", 2)]
BESIDE_TP = [(("zero1 tp", 4), other) for other in (PLAIN, ("fsdp", 2), ("tp", 2), ("replicate tp", 4))]
ROUTES = [(ZERO1, other) for other in OTHERS] + BESIDE_TP
BOTH_WAYS = [*ROUTES, *[(other, one) for one, other in ROUTES]]
FAST = [((PLAIN, ZERO1), "muon and adamw"), ((("zero1 tp", 4), PLAIN), "muon and adamw")]


@pytest.mark.parametrize(("route", "make"), only(FAST, BOTH_WAYS, ["muon and adamw", "soap"]))
def test_every_route(route: tuple[Place, Place], make: str, tmp_path: Path) -> None:
    (layout, world), (other, others) = route
    after = partial(alone, make)
    assert run(world, save, layout, make, tmp_path, group=layout != "plain", after=after) == [[]] * world
    assert run(others, load, other, make, tmp_path, group=other != "plain", after=after) == [[]] * others


FUSED = [("zero1", 3), ("wrap", 1), ("fsdp", 2), ("tp", 2), ("replicate", 2), ("zero1 tp", 4), ("zero1 replicas", 4)]
FUSED_ROUTES = [(ZERO1, other) for other in FUSED] + [(other, ZERO1) for other in FUSED[1:]]
FUSED_TP = [(("zero1 tp", 4), other) for other in (("fsdp", 2), ("replicate tp", 4))]


@pytest.mark.parametrize(("route", "make"), only([], [*FUSED_ROUTES, *FUSED_TP], ["muon", "soap"]))
def test_every_route_of_fused_weights(route: tuple[Place, Place], make: str, tmp_path: Path) -> None:
    (layout, world), (other, others) = route
    after = partial(alone, make, "interleaved")
    parts = (make, tmp_path, "interleaved")
    assert run(world, save, layout, *parts, group=layout != "wrap", after=after) == [[]] * world
    assert run(others, load, other, *parts, group=other != "wrap", after=after) == [[]] * others
