"""A container of optimizers as torchtitan has one: an Optimizer itself, one wrapped optimizer per part of the model.

State is flattened by `param_names`, without a look at the model, and goes from one process layout to another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from tests.harness.layouts import full, mesh_of
from tests.harness.marks import also, first
from tests.harness.optimizers import share_captures
from tests.harness.pairs import unlike
from tests.harness.ranks import run
from tests.harness.toy_optimizers import TwoKinds

WIDTHS = (12, 20, 12, 20, 12)  # two shapes, that little has to be captured
FIRST, LAST = range(3), range(3, 6)  # steps before the checkpoint, and after it
Groups = list[dict[str, Any]]
Flat = dict[str, Any]

# -- what the training framework has -----------------------------------------------------------


class Part(nn.Module):
    """Some layers of a model, under the names that they have in the whole of it."""

    def __init__(self, numbers: Iterable[int], bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(WIDTHS[i], WIDTHS[i + 1], bias=bias) for i in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = F.silu(layer(x))
        return x


class OptimizersContainer(Optimizer):
    """Is an Optimizer only so that hooks can be registered on it; the real ones are inside."""

    def __init__(self, parts: list[Part], factory: Callable[[Groups], Optimizer]) -> None:
        self.parts = parts
        self.optimizers = [factory(groups_of(part)) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {})

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Flat:
        found: Flat = {}
        for optimizer in self.optimizers:
            for key, value in flatten(optimizer).items():
                assert key not in found
                found[key] = value
        return found

    def load_state_dict(self, state_dict: Flat) -> None:
        for optimizer in self.optimizers:
            init_state(optimizer)
            load(optimizer, state_dict)


def groups_of(part: Part) -> Groups:
    """Matrices and vectors apart; which implementation of an optimizer to take is a key in every group."""
    groups = []
    for matrices in (True, False):
        named = [(name, p) for name, p in part.named_parameters() if (p.ndim == 2) == matrices]
        if named:
            names, params = map(list, zip(*named, strict=True))
            keys = {"weight_decay": 0.1, "use_muon": True} if matrices else {"weight_decay": 0.0, "use_muon": False}
            groups.append({"params": params, "param_names": names, "foreach": False, "fused": False, **keys})
    return groups


def named_by_id(state_dict: Flat) -> Iterator[tuple[dict[str, Any], int, str]]:
    for group in state_dict["param_groups"]:
        for i, name in zip(group["params"], group["param_names"], strict=True):
            yield group, i, name


def flatten(optimizer: Optimizer) -> Flat:
    """`state.<name>.<leaf>` and `param_groups.<name>.<key>`."""
    state_dict = optimizer.state_dict()
    found: Flat = {}
    for group, i, name in named_by_id(state_dict):
        found |= {f"state.{name}.{leaf}": value for leaf, value in state_dict["state"][i].items()}
        keys = group.keys() - {"params", "param_names"}
        found |= {f"param_groups.{name}.{key}": group[key] for key in keys}
    return found


def init_state(optimizer: Optimizer) -> None:
    """A step that changes no parameter, so that there is state for what is loaded to be laid out as."""
    assert not optimizer.state
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def load(optimizer: Optimizer, flat: Flat) -> None:
    state_dict = optimizer.state_dict()
    for group, i, name in named_by_id(state_dict):
        state = state_dict["state"][i]
        assert state, name
        state_dict["state"][i] = {leaf: like(flat[f"state.{name}.{leaf}"], old) for leaf, old in state.items()}
        for key in group.keys() - {"params", "param_names"}:
            group[key] = flat[f"param_groups.{name}.{key}"]
    optimizer.load_state_dict(state_dict)


def like(value: Any, old: Any) -> Any:
    """A saved value laid out as an old one is."""
    if isinstance(old, DTensor):
        return distribute_tensor(value, old.device_mesh, old.placements, src_data_rank=None)
    return value.clone() if isinstance(value, Tensor) else value


# -- a training by it --------------------------------------------------------------------------


def muon(groups: Groups) -> Optimizer:
    return Muon(groups, lr=0.05)


def two_kinds(groups: Groups) -> Optimizer:
    return TwoKinds(groups)


KINDS: dict[str, tuple[Callable[[Groups], Optimizer], bool]] = {"muon": (muon, False), "two kinds": (two_kinds, True)}


class Training:
    """Two parts of a model, on as many ranks as there are, and a checkpoint of whole tensors."""

    def __init__(self, kind: str, wrap: bool) -> None:
        make, bias = KINDS[kind]
        torch.manual_seed(0)
        self.parts = [Part(numbers, bias) for numbers in ((0, 1), (2, 3))]
        if dist.is_initialized():
            for part in self.parts:
                fully_shard(part, mesh=mesh_of((dist.get_world_size(),), ("dp",)))

        def factory(groups: Groups) -> Optimizer:
            optimizer = make(groups)
            if wrap:
                canzona_compile.wrap(optimizer, strategy="owner")
                share_captures(optimizer)
            return optimizer

        self.container = OptimizersContainer(self.parts, factory)
        self.schedulers = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in self.container]
        self.hooked = 0
        self.container.register_step_post_hook(self.count)

    def count(self, *_: Any) -> None:
        self.hooked += 1

    def steps(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            random = torch.Generator().manual_seed(100 + number)
            x, y = (torch.randn(8, width, generator=random) for width in (WIDTHS[0], WIDTHS[-1]))
            self.container.zero_grad(set_to_none=number % 2 == 0)
            for part in self.parts:
                x = part(x)
            F.mse_loss(x, y).backward()
            self.container.step()
            for scheduler in self.schedulers:
                scheduler.step()

    def checkpoint(self) -> Flat:
        """Parameters, flattened state and schedules, whole (a collective)."""
        params = {f"model.{name}": value for part in self.parts for name, value in part.state_dict().items()}
        found = {key: full(v).clone() if isinstance(v, Tensor) else v for key, v in (params | flat_of(self)).items()}
        return found | {"epochs": [scheduler.last_epoch for scheduler in self.schedulers]}

    def resume(self, saved: Flat) -> None:
        with torch.no_grad():
            for part in self.parts:
                for name, param in part.named_parameters():
                    param.copy_(like(saved[f"model.{name}"], param))
        self.container.load_state_dict(saved)
        for scheduler, epoch in zip(self.schedulers, saved["epochs"], strict=True):
            scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": epoch})

    def stepped_by_graphs(self) -> bool:
        """That the wrapper worked on every matrix, in every part, and knows them by name."""
        reports = [optimizer.canzona.report() for optimizer in self.container]
        names = [task.name for report in reports for task in report.tasks]
        assert [report.fallbacks for report in reports] == [{}, {}]
        return names == [f"layers.{i}.weight" for i in range(4)]


def flat_of(training: Training) -> Flat:
    return training.container.state_dict()


def plain(kind: str, *parts: Iterable[int]) -> Flat:
    training = Training(kind, wrap=False)
    training.steps(itertools.chain(*parts))
    return training.checkpoint()


def on_a_rank(kind: str, saved: Flat | None, numbers: Iterable[int]) -> tuple[Flat, bool, int]:
    training = Training(kind, wrap=True)
    if saved is not None:
        training.resume(saved)
    training.steps(numbers)
    return training.checkpoint(), training.stepped_by_graphs(), training.hooked


def on_ranks(kind: str, saved: Flat | None, numbers: Iterable[int]) -> list[tuple[Flat, bool, int]]:
    """The same on two ranks; what they share is captured once, before."""
    return run(2, on_a_rank, kind, saved, numbers, after=partial(on_a_rank, kind, None, FIRST))


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*also(["muon"]), "two kinds"])
def test_state_is_flattened_by_names(kind: str) -> None:
    training = Training(kind, wrap=True)
    training.steps(FIRST)
    flat, expected = training.checkpoint(), plain(kind, FIRST)
    assert unlike("", flat, expected) == []
    assert training.stepped_by_graphs()
    assert training.hooked == len(FIRST)
    leaf = {"muon": "momentum_buffer", "two kinds": "momentum"}[kind]
    assert flat[f"state.layers.3.weight.{leaf}"].shape == (12, 20)
    assert [flat[f"param_groups.layers.0.weight.{key}"] for key in ("fused", "foreach", "use_muon")] == [0, 0, 1]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("kind", first(KINDS))
def test_saved_on_ranks_and_loaded_in_one_process(kind: str) -> None:
    outcomes = on_ranks(kind, None, FIRST)
    for saved, by_graphs, hooked in outcomes:
        assert unlike("", saved, plain(kind, FIRST)) == []
        assert (by_graphs, hooked) == (True, len(FIRST))
    resumed, by_graphs, _ = on_a_rank(kind, outcomes[0][0], LAST)
    assert by_graphs
    assert unlike("", resumed, plain(kind, FIRST, LAST)) == []


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("wrap", first([True, False]), ids=["of a wrapped", "of a plain"])
@pytest.mark.parametrize("kind", first(KINDS))
def test_saved_in_one_process_and_loaded_on_ranks(kind: str, wrap: bool) -> None:
    training = Training(kind, wrap)
    training.steps(FIRST)
    saved, end = training.checkpoint(), plain(kind, FIRST, LAST)
    assert len(unlike("", saved, end)) > 8, "the steps after the checkpoint must show"
    for resumed, by_graphs, hooked in on_ranks(kind, saved, LAST):
        assert (by_graphs, hooked) == (True, len(LAST))
        assert unlike("", resumed, end) == []
