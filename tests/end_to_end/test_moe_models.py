"""Whole-model lines for models with experts: what they train, and the bits of the unsharded run in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from canzona_compile import hidden_matrices, optimizer_for, plan
from canzona_compile.api.whole_model import MUON, chained, in_groups, tells_sides_apart
from canzona_compile.ir.split import rows_of
from canzona_compile.optimizers import KLSOAP, SOAP, KLShampoo, NorMuon, Shampoo
from tests.data_parallel.models import different
from tests.harness.layouts import mesh_of
from tests.harness.marks import crossed, full, only
from tests.harness.moe_models import MODELS, TITAN, moe_model
from tests.harness.optimizers import shared_captures
from tests.harness.ranks import run

pytestmark = pytest.mark.filterwarnings("ignore")  # of the imports of transformers and torchtitan
STEPS = 3
LR = 0.02
KINDS: dict[str, Any] = {
    "muon": MUON,
    "normuon": NorMuon,
    "soap": partial(SOAP, every=2),
    "kl_soap": partial(KLSOAP, every=2),
    "shampoo": partial(Shampoo, every=2),
    "kl_shampoo": partial(KLShampoo, every=2),
}
ADAMW = partial(torch.optim.AdamW, lr=LR)


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    """Skip the experts of a package that is not there."""
    if request.node.callspec.params["name"] == TITAN:
        why = "the package torchtitan is not installed"
        pytest.importorskip("torchtitan.models.common.moe", reason=why, exc_type=ImportError)


@pytest.mark.parametrize("name", MODELS)
def test_muon_trains_nine_tenths(name: str) -> None:
    """Of what is no embedding and no head."""
    model = moe_model(name)
    choice = hidden_matrices(model, batch_dims=True)
    outside = {row.name for row in choice.rows if "embedding" in row.why or "output head" in row.why}
    elements = {row.name: row.elements for row in choice.rows if row.name not in outside}
    trained = sum(elements[name] for name, _ in choice.matrices)
    assert trained >= 0.9 * sum(elements.values())
    assert {row.kind for row in choice.rows if "stack of 4 experts" in row.why} == {"matrix"}


@pytest.mark.parametrize(("kind", "name"), crossed(list(KINDS), [*MODELS], most=2))
def test_every_optimizer_trains_as_much(kind: str, name: str) -> None:
    """Planned from shapes, without ranks: what Muon would train, whichever the optimizer."""
    with torch.device("meta"):
        model = moe_model(name)
    planned = plan(model, mesh={"fsdp": 2}, optimizer=kind.replace("_", "-"), hardware="cpu", alternatives=False)
    choice = hidden_matrices(model, batch_dims=True)
    assert planned.forecast.elements == sum(param.numel() for _, param in choice.matrices)


# -- layouts ---------------------------------------------------------------------------------------


def fsdp(model: nn.Module, mesh: DeviceMesh, dim: int = 0) -> None:
    """FSDP2, experts along this dim where it divides."""

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(dim) if param.ndim == 3 and param.shape[dim] % mesh.size(mesh.ndim - 1) == 0 else None

    fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def ep(model: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Experts on the outer mesh dim, and FSDP2 of all on the inner one."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if is_stack(module, param):
                own = distribute_tensor(param.detach(), mesh["outer"], [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(own))
    fsdp(model, mesh["inner"], dim)


def is_stack(module: nn.Module, param: nn.Parameter) -> bool:
    return param.ndim == 3 and "conv" not in type(module).__name__.lower()


def placed(model: nn.Module, mesh: DeviceMesh, experts: list[Placement], others: list[Placement]) -> None:
    """Every parameter as a DTensor."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            placements = experts if is_stack(module, param) else others
            own = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
            setattr(module, name, nn.Parameter(own))


def line(ranks: int) -> DeviceMesh:
    return mesh_of((ranks,), ("line",))


def plane(ranks: int) -> DeviceMesh:
    return mesh_of((2, ranks // 2), ("outer", "inner"))


LAYOUTS: dict[str, Callable[[nn.Module, int], None]] = {
    "fsdp": lambda model, ranks: fsdp(model, line(ranks)),
    "fsdp dim 1": lambda model, ranks: fsdp(model, line(ranks), 1),
    "hsdp": lambda model, ranks: fsdp(model, plane(ranks)),
    "ep": lambda model, ranks: placed(model, line(ranks), [Shard(0)], [Replicate()]),
    "ep fsdp": lambda model, ranks: ep(model, plane(ranks), 1),
    "ep fsdp dim 0": lambda model, ranks: ep(model, plane(ranks), 0),
    "tp": lambda model, ranks: placed(model, line(ranks), [Shard(2)], [Shard(0)]),
    "zero1": lambda model, ranks: None,
}


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(param.shape, generator=random) for name, param in model.named_parameters()}


def give(model: nn.Module, grads: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        grad = grads[name].clone()
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


class Unsharded:
    """The model in one process, trained by plain optimizers; what is fused as the matrices that it consists of.

    Args:
        sharded: the same model in a layout. What tensor parallelism cuts there is one matrix.
    """

    def __init__(self, kind: str, name: str, sharded: nn.Module) -> None:
        self.model, splits = moe_model(name), hidden_matrices(sharded, batch_dims=True).splits
        choice = hidden_matrices(self.model, batch_dims=True)
        turned = choice.rows_are_inputs if tells_sides_apart(KINDS[kind], {}) else frozenset[str]()
        self.parts: list[tuple[nn.Parameter, int, Tensor, nn.Parameter]] = []  # whole, dim, rows of a part, the part
        matrices: list[tuple[str, nn.Parameter]] = []
        for own, param in choice.matrices:
            split = splits.get(own)
            for key, rows in ({} if split is None else rows_of(split)).items():
                assert split is not None
                part = nn.Parameter(param.detach().index_select(split.dim, rows))
                self.parts.append((param, split.dim, rows, part))
                matrices.append((f"{own}[{key}]", part))
            matrices += [(own, param)] if split is None else []
        given = {own: {"rows_are_inputs": True} if own.partition("[")[0] in turned else {} for own, _ in matrices}
        self.optimizer = chained(in_groups(matrices, given), choice.others, partial(KINDS[kind], lr=LR), ADAMW)

    def step(self, grads: dict[str, Tensor]) -> None:
        give(self.model, grads)
        for whole, dim, rows, part in self.parts:
            assert whole.grad is not None
            part.grad = whole.grad.index_select(dim, rows)
        self.optimizer.step()
        with torch.no_grad():
            for whole, dim, rows, part in self.parts:
                whole.index_copy_(dim, rows, part)


def sharded(kind: str, name: str, layout: str, ranks: int) -> tuple[nn.Module, Any]:
    """The model in a layout, and its optimizer."""
    model = moe_model(name)
    zero1 = line(ranks) if layout == "zero1" and ranks > 1 else None
    if ranks > 1:
        LAYOUTS[layout](model, ranks)
    with shared_captures():
        return model, optimizer_for(model, partial(KINDS[kind], lr=LR), ADAMW, zero1=zero1)


def train(kind: str, name: str, layout: str, ranks: int) -> list[str]:
    model, optimizer = sharded(kind, name, layout, ranks)
    plain = Unsharded(kind, name, model)
    for step in range(STEPS):
        grads = gradients(plain.model, step)
        if layout == "zero1":  # what ranks average
            losses = [(param * grads[own]).sum() for own, param in model.named_parameters()]
            torch.stack(losses).sum().backward()
        else:
            give(model, grads)
        plain.step(grads)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.canzona.report().fallbacks == {}
    return different(model, plain.model)


CASES = [("hsdp", 4), ("ep fsdp", 4), ("ep fsdp dim 0", 4), ("fsdp dim 1", 2), ("ep", 2), ("tp", 2), ("zero1", 2)]
CASES += [("fsdp", 2)]
MORE = [(layout, 4) for layout, ranks in CASES if ranks == 2]


@pytest.mark.parametrize(
    ("kind", "name", "case"),
    [*crossed([*KINDS], MODELS, CASES), *itertools.starmap(full, itertools.product(KINDS, MODELS, MORE))],
    ids=str,
)
def test_bits_of_the_unsharded_run(kind: str, name: str, case: tuple[str, int]) -> None:
    layout, ranks = case
    assert run(ranks, train, kind, name, layout, ranks, after=partial(train, kind, name, layout, 1)) == [[]] * ranks


# -- checkpoints -----------------------------------------------------------------------------------


def go_on(kind: str, name: str, layout: str, ranks: int, folder: str, begin: int) -> list[str]:
    """Load what other ranks saved, if they did, train for two steps, and save."""
    model, optimizer = sharded(kind, name, layout, ranks)
    plain = Unsharded(kind, name, model)
    if begin:
        parts = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(parts, checkpoint_id=folder)
        set_model_state_dict(model, parts["model"])
        set_optimizer_state_dict(model, optimizer, parts["optimizer"])
    for step in range(begin + 2):
        grads = gradients(plain.model, step)
        plain.step(grads)
        if step >= begin:
            give(model, grads)
            optimizer.step()
            optimizer.zero_grad()
    parts = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(parts, checkpoint_id=folder)
    return different(model, plain.model)


@pytest.mark.parametrize(("kind", "name"), only([("normuon", "mixtral")], [*KINDS], MODELS))
def test_checkpoints_go_to_other_numbers_of_ranks_and_back(kind: str, name: str, tmp_path: Path) -> None:
    """From gathered stacks to entries of a rank, to whole ones, and to one process."""
    for i, (layout, ranks) in enumerate([("fsdp dim 1", 2), ("ep fsdp", 4), ("hsdp", 4), ("fsdp", 1)]):
        ready = partial(train, kind, name, layout, 1)
        assert run(ranks, go_on, kind, name, layout, ranks, str(tmp_path), 2 * i, after=ready) == [[]] * ranks
