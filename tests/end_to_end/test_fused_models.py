"""Fused weights of models are trained as their parts: the bits of a plain optimizer that has each part by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from tests.api.choice_models import ARCHITECTURES, DECODER, made
from tests.harness.layouts import full as whole
from tests.harness.layouts import mesh_of
from tests.harness.marks import full
from tests.harness.model_pairs import update
from tests.harness.optimizers import StackMuon, shared_captures
from tests.harness.pairs import same_bits
from tests.harness.ranks import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers

RATE = 1e-2
MODELS: dict[str, Callable[[], nn.Module]] = {
    "phi3": made("Phi3ForCausalLM", "Phi3Config", **{**DECODER, "num_hidden_layers": 1}),
    "qwen3-moe": ARCHITECTURES["qwen3-moe"].make,
    "gpt-oss": ARCHITECTURES["gpt-oss"].make,
}
PARTS: dict[str, dict[str, Callable[[Tensor], Sequence[Tensor]]]] = {  # by how the name of a weight ends
    "phi3": {"qkv_proj.weight": lambda w: w.split([32, 16, 16]), "gate_up_proj.weight": lambda w: w.chunk(2)},
    "qwen3-moe": {"experts.gate_up_proj": lambda w: w.chunk(2, dim=1)},
    "gpt-oss": {"experts.gate_up_proj": lambda w: (w[..., ::2], w[..., 1::2])},
}
PIECES = {
    "phi3": {f"weight[{part}]" for part in ("q", "k", "v", "gate", "up")},
    "qwen3-moe": {"gate_up_proj[gate]", "gate_up_proj[up]"},
    "gpt-oss": {"gate_up_proj[gate]", "gate_up_proj[up]"},
}
STACKS: dict[str, Any] = {"matrix_optimizer": partial(StackMuon, lr=RATE), "other_optimizer": partial(AdamW, lr=RATE)}


def apart(model: str, name: str, weight: Tensor) -> list[Tensor]:
    """The matrices in a weight, by hand."""
    cut = next((cut for end, cut in PARTS[model].items() if name.endswith(end)), lambda w: [w])
    return [part.clone(memory_format=torch.contiguous_format) for part in cut(weight.detach())]


def wrapped(model: str, trained: nn.Module, **options: Any) -> Any:
    """The optimizer of a line."""
    if model == "phi3":
        return canzona_compile.muon_adamw(trained, lr=RATE, **options)
    return canzona_compile.optimizer_for(trained, **STACKS, others="*.weight", batch_dims=True)


def plain(model: str, parts: dict[str, list[nn.Parameter]]) -> list[Optimizer]:
    """The optimizers of all parts by themselves."""
    if model == "phi3":
        hidden = [name for name in parts if not any(word in name for word in ("embed", "norm", "lm_head"))]
    else:
        hidden = [name for name in parts if parts[name][0].ndim == 3]
    first = [part for name in hidden for part in parts[name]]
    rest = [part for name in parts if name not in hidden for part in parts[name]]
    if model == "phi3":
        common: dict[str, Any] = {"lr": RATE, "weight_decay": 0.1}
        return [Muon(first, adjust_lr_fn="match_rms_adamw", **common), AdamW(rest, **common)]
    return [StackMuon([{"params": first}], lr=RATE), AdamW(rest, lr=RATE)]


def train(model: str, layout: str, steps: int = 3) -> dict[str, Any]:
    """Train a model beside plain parts; what differs, and the names of tasks."""
    torch.manual_seed(0)
    trained: Any = MODELS[model]()
    torch.manual_seed(0)
    parts = {
        name: [nn.Parameter(part) for part in apart(model, name, param)]
        for name, param in MODELS[model]().named_parameters()
    }
    rank, options = 0, {}
    if layout != "alone":
        rank, mesh = dist.get_rank(), mesh_of((dist.get_world_size(),), ("dp",))
        options = {"zero1": mesh} if layout == "zero1" else {}
    if layout == "fsdp":
        for layer in trained.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(trained, mesh=mesh)
    with shared_captures():
        made = wrapped(model, trained, **options)
    optimizers, found = plain(model, parts), []
    for step in range(steps):
        tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        trained(input_ids=tokens, labels=tokens).loss.backward()
        for name, param in trained.named_parameters():
            reduced = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
            for part, grad in zip(parts[name], apart(model, name, reduced), strict=True):
                part.grad = grad
        update((made, *optimizers))
        for name, param in trained.named_parameters():
            pairs = zip(parts[name], apart(model, name, whole(param)), strict=True)
            found += [f"step {step}: {name}" for part, own in pairs if not same_bits(own, part.detach())]
    report = made.canzona.report()
    return {"different": found, "tasks": {task.name for task in (*report.tasks, *report.local)}}


def alone(model: str) -> None:
    """Train in one process, which captures what ranks need."""
    found = train(model, "alone")
    assert found["different"] == []
    pieces = {name for name in found["tasks"] if "[" in name}
    assert {name.rpartition(".")[2] for name in pieces} >= PIECES[model]


@pytest.mark.parametrize("model", [full("phi3"), "qwen3-moe", "gpt-oss"])  # phi3 runs alone before its ranks do
def test_in_one_process(model: str) -> None:
    alone(model)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("phi3", "fsdp"), full("qwen3-moe", "fsdp"), full("gpt-oss", "fsdp"), full("phi3", "zero1")],
)
def test_on_ranks(model: str, layout: str) -> None:
    for found in run(2, train, model, layout, after=partial(alone, model)):
        assert found["different"] == []
        assert {name.rpartition(".")[2] for name in found["tasks"]} >= PIECES[model]
