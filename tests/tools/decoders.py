"""A small decoder, optimizers of it, and runs of both with the plans that their user can make of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon

import canzona_compile
from tests.harness.optimizers import share_captures
from tests.harness.toys import TwoKinds
from tests.session.test_planned_runs import give_gradients

BUCKETS = 8000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)
        self.norm = nn.LayerNorm(32, bias=False)


class Decoder(nn.Module):
    """A module whose embeddings have none of the usual names; of its head, the name or the size tells what it is."""

    def __init__(self, head: str = "head", size: int = 48) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.add_module(head, nn.Linear(32, size, bias=False))


def decoder(kind: str, device: str = "cpu") -> Any:
    """A decoder for a kind of `optimizer_of`: that of a chain has a head without a name that tells."""
    with torch.device(device):
        return Decoder() if kind == "groups" else Decoder("last", 64)


def optimizer_of(kind: str, model: nn.Module, named: bool = True) -> Any:
    """One optimizer with groups for matrices and all else, the chain of `muon_adamw`, or a chain of three."""
    if kind == "muon+adamw":
        return canzona_compile.muon_adamw(model, hardware="cpu")
    if kind == "three":
        return three(model)
    pairs = [(n, p) if named else p for n, p in model.named_parameters()]
    hidden = [p.ndim == 2 and "layers" in n for n, p in model.named_parameters()]
    muon = [pair for pair, is_hidden in zip(pairs, hidden, strict=True) if is_hidden]
    adam = [pair for pair, is_hidden in zip(pairs, hidden, strict=True) if not is_hidden]
    return TwoKinds([{"params": muon[::-1], "use_muon": True}, {"params": adam, "use_muon": False}])


def three(model: nn.Module) -> canzona_compile.Chain:
    """Two optimizers with matrices, in another order than the model's, and AdamW with two groups."""
    choice = canzona_compile.hidden_matrices(model)
    ups, downs = ([pair for pair in choice.matrices if word in pair[0]] for word in ("up", "down"))
    return canzona_compile.chain(
        Muon(downs[::-1], lr=0.02),
        Muon(ups, lr=0.01, nesterov=False, weight_decay=0.0),
        AdamW([{"params": choice.others[:1]}, {"params": choice.others[1:], "weight_decay": 0.0}], lr=1e-3),
    )


def planned(model: Any, mesh: str = "fsdp=2", optimizer: Any = "muon+adamw", **options: Any) -> Any:
    return canzona_compile.plan(
        model, mesh=mesh, optimizer=optimizer, hardware="cpu", alternatives=False, **{"split": "none", **options}
    )


def stepped(model: nn.Module, kind: str) -> Any:
    """A wrapped optimizer after two steps."""
    optimizer = optimizer_of(kind, model)
    if kind != "muon+adamw":
        optimizer = canzona_compile.wrap(optimizer, hardware="cpu")
    share_captures(optimizer)
    for _ in range(2):
        give_gradients(list(model.parameters()))
        optimizer.step()
    return optimizer


def sharded_run(kind: str) -> dict[str, str]:
    """The fingerprint of a run under three wrappers, and on rank 0 those of the plans that its user can make of it."""
    torch.manual_seed(0)
    model = decoder(kind)
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_shard(checkpoint_wrapper(layer))
    model = torch.compile(fully_shard(model))
    optimizer = stepped(model, kind)
    found = {"run": optimizer.canzona.plan().fingerprint}
    if dist.get_rank() > 0:
        return found
    meta = decoder(kind, "meta")
    found["its model"] = planned(model, optimizer=optimizer).fingerprint
    found["its optimizer, by names"] = planned(meta, optimizer=optimizer).fingerprint
    if kind == "groups":
        found["by shapes"] = planned(meta, optimizer=optimizer_of(kind, meta, named=False)).fingerprint
    if kind == "muon+adamw":
        found["its name"] = planned(meta).fingerprint
    return found


def sharded_alone(kind: str) -> None:
    """What a rank would capture twice: for its run, and for its plans."""
    model = decoder(kind)
    planned(model, optimizer=stepped(model, kind))


def zero1_run(kind: str) -> dict[str, str]:
    """The same of a chain under ZeRO-1."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = decoder(kind)
    options: dict[str, Any] = {"hardware": "cpu", "bucket_bytes": BUCKETS}
    if kind == "three":
        optimizer = canzona_compile.zero1(model, three(model), mesh=mesh, **options)
    else:
        optimizer = canzona_compile.muon_adamw(model, zero1=mesh, **options)
    hidden = model.tok(torch.arange(8)) + model.pos(torch.arange(8))
    for layer in model.layers:
        hidden = hidden + layer.down(layer.up(layer.norm(hidden)))
    model.last(hidden).square().mean().backward()
    optimizer.step()
    offline, meta = partial(planned, mesh="dp=2", updates="zero1", bucket_bytes=BUCKETS), decoder(kind, "meta")
    found = {
        "run": optimizer.canzona.plan().fingerprint,  # type: ignore[attr-defined]
        "its optimizer": offline(meta, optimizer=three(meta) if kind == "three" else optimizer).fingerprint,
    }
    return found if kind == "three" else {**found, "its name": offline(decoder(kind, "meta")).fingerprint}
