"""Stacks of matrices: our Muon steps each of them as torch's Muon steps it alone, on ranks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from canzona_compile.optimizers import Muon
from tests.harness.layouts import Case
from tests.harness.marks import crossed
from tests.harness.pairs import Pair, parameters
from tests.harness.training import Training, check, on_ranks

ODD = ((5, 17, 31), (2, 31, 17), (3, 24, 24))  # dims for which a batched product rounds otherwise
EVEN = ((8, 64, 32), (6, 32, 48), (3, 48, 48))
DTYPES = [torch.float32, torch.bfloat16]


def nothing(optimizer: Any) -> Any:
    return lambda step: None


TRAININGS = {
    name: Training(lambda params: Muon(params, lr=0.02), shapes, steps=5, schedule=nothing, sizes=(0.1, 1e-3))
    for name, shapes in {"odd": ODD, "even": EVEN, "one": EVEN[:1]}.items()
}


# -- the plain optimizer ---------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.5, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(24, 16), (5, 17, 31), (2, 3, 31, 17)], ids=str)
def test_each_matrix_gets_the_bits_of_torch(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    (whole,), (own,) = parameters([shape]), parameters([shape])
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in own.detach().flatten(0, -3)] if own.ndim > 2 else [own]
    ours, torchs = Muon([whole], **options), torch.optim.Muon(alone, **options)
    for step in range(4):
        whole.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        for param, grad in zip(alone, whole.grad.flatten(0, -3) if whole.ndim > 2 else [whole.grad], strict=True):
            param.grad = grad.clone()
        ours.step()
        torchs.step()
    found = whole.detach().flatten(0, -3) if whole.ndim > 2 else whole.detach()[None]
    assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


def test_vectors_and_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not shape \[3\]"):
        Muon([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="Learning rate"):
        Muon([torch.nn.Parameter(torch.ones(2, 3, 3))], lr=-1.0)


# -- wrapped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrapped_in_one_process(dtype: torch.dtype) -> None:
    shapes = (*ODD, *EVEN, (24, 16), (2, 2, 31, 17))
    pair = Pair(lambda params: Muon(params, lr=0.02), shapes, dtype=dtype)
    for _ in range(4):
        pair.step()
    assert pair.report.fallbacks == {}


def test_a_graph_is_as_long_as_that_of_one_matrix(tmp_path: Any) -> None:
    """However many matrices there are: what ranks plan and agree on does not grow with them."""
    lengths = []
    for shape in ((3, 24, 16), (300, 24, 16)):
        pair = Pair(lambda params: Muon(params), (shape,))
        for _ in range(2):
            pair.step()
        lengths.append(len(str(pair.wrapped.canzona.plan).splitlines()))
    assert lengths[0] == lengths[1]


LAYOUTS = [
    *(Case(f"stack_dim{dim}", (ranks,)) for ranks in (2, 4) for dim in range(3)),
    Case("ddp", (2,)),
    Case("stack_dims", (2, 2)),
    Case("stack_hsdp", (2, 2)),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "dtype", "shapes"),
    crossed(LAYOUTS, DTYPES, ["odd", "even"]),
    ids=str,
)
def test_on_ranks(case: Case, dtype: torch.dtype, shapes: str) -> None:
    check(on_ranks(__name__, shapes, [case], dtype, strategy="owner"))


@pytest.mark.ranks
def test_matrices_of_one_stack_have_several_owners() -> None:
    report = check(on_ranks(__name__, "one", [Case("stack_dim1", (4,))], strategy="owner"))
    tasks = report["tasks"]
    assert [task["name"] for task in tasks] == [f"group0.param0[{i}:{i + 1}]" for i in range(8)]
    assert len({task["owner"] for task in tasks}) == 4
