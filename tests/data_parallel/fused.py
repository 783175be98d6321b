"""A model with fused weights under zero1, beside plain optimizers that have q, k, v, gate and up as parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from canzona_compile import Split
from canzona_compile.ir.split import rows_of
from examples.optimizers.soap import SOAP
from tests.harness.layouts import full, mesh_of
from tests.harness.model_pairs import train as train_model
from tests.harness.model_pairs import update, zero1
from tests.harness.optimizers import shared_captures
from tests.harness.pairs import unlike
from tests.harness.plain_shards import CopyIn, ReduceOut
from tests.harness.toy_optimizers import HostReading

WIDTH, LAYERS, BATCH = 24, 2, 4
BUCKETS = 4000  # bytes: pieces of one weight lie in several buckets
QKV, GATE_UP = {"q": 24, "k": 12, "v": 12}, {"gate": 40, "up": 40}
SPLITS: dict[str, dict[str, Split]] = {
    "block": {"*.qkv.weight": Split(QKV), "*.gate_up.weight": Split(GATE_UP)},
    "interleaved": {
        "*.qkv.weight": Split(QKV, interleaved=4),
        "*.gate_up.weight": Split(GATE_UP, interleaved=2),
    },
    "heads": {"*.qkv.weight": Split(QKV, head=12), "*.gate_up.weight": Split(GATE_UP)},
    "uneven": {
        "*.qkv.weight": Split({"q": 22, "k": 22, "v": 4}),
        "*.gate_up.weight": Split({"gate": 30, "up": 50}),
    },
}
MAKERS: dict[str, Callable[[list[Any], list[Any]], list[Optimizer]]] = {
    "muon": lambda matrices, rest: [Muon(matrices, lr=0.02, weight_decay=0.1), AdamW(rest, lr=1e-2)],
    "soap": lambda matrices, rest: [SOAP(matrices, lr=1e-2, every=3), AdamW(rest, lr=1e-2)],
    "interpreted": lambda matrices, rest: [HostReading(matrices, lr=1e-2), AdamW(rest, lr=1e-2)],
    "adamw": lambda matrices, rest: [AdamW([*matrices, *rest], lr=1e-2)],
}


class FusedModel(nn.Module):
    """Blocks of two fused weights, each followed by a projection back; a tensor-parallel rank may hold fragments."""

    def __init__(self, seed: int = 0, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.group = None if mesh is None else mesh.get_group()
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            block = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH)})
            for first, second, rows in (("qkv", "out", QKV), ("gate_up", "down", GATE_UP)):
                inside = sum(rows.values())
                for name, shape in ((first, (inside, WIDTH)), (second, (WIDTH, inside))):
                    own = part_of(name, torch.randn(shape, generator=random) / 5, mesh)
                    block[name] = nn.Linear(*own.T.shape, bias=False)
                    block[name].weight = nn.Parameter(own)
            self.blocks.append(block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            own: Any = block
            for first, second in (("qkv", "out"), ("gate_up", "down")):
                y = own["norm"](x)
                y = y if self.group is None else CopyIn.apply(y, self.group)
                y = own[second](F.silu(own[first](y)))
                x = x + (y if self.group is None else ReduceOut.apply(y, self.group))
        return x.square().mean()


def cut_dim(name: str) -> int | None:
    """The dim of a parameter that tensor parallelism cuts."""
    return next((dim for word, dim in {"qkv": 0, "gate_up": 0, "out": 1, "down": 1}.items() if word in name), None)


def part_of(name: str, whole: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """What this rank of a tensor-parallel mesh holds of a tensor shaped like a parameter."""
    dim = cut_dim(name)
    if mesh is None or dim is None:
        return whole
    return whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of the blocks over a mesh, as DTensors."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    styles = {name: ColwiseParallel() if cut_dim(name) == 0 else RowwiseParallel() for name in names}
    parallelize_module(model, mesh, styles)


def mark(model: nn.Module) -> None:
    """Give parameters the attributes that Megatron gives them: gate and up are sharded each, and lie side by side."""
    for name, param in model.named_parameters():
        own: Any = param
        dim = cut_dim(name)
        own.tensor_model_parallel, own.partition_dim = dim is not None, -1 if dim is None else dim
        own.partition_stride = 2 if "gate_up" in name else 1


def named(make: str, model: nn.Module) -> list[Optimizer]:
    """The optimizers of a model."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return MAKERS[make](matrices, [p for p in model.parameters() if p.ndim < 2])


def inputs(step: int, rank: int, micro: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(BATCH, WIDTH, generator=random)


class Apart:
    """Plain optimizers that have each logical matrix of a model as a parameter, all of them whole.

    Attributes:
        params: the parameters of the model, by name.
        optimizers: the optimizers.
    """

    def __init__(self, make: str, model: nn.Module, splits: Mapping[str, Split]) -> None:
        self.params = dict(model.named_parameters())
        self.rows: dict[str, dict[str, Tensor]] = {}
        self.pieces: dict[str, dict[str, nn.Parameter]] = {}
        for name, param in self.params.items():
            split = next((s for pattern, s in splits.items() if name.endswith(pattern.removeprefix("*"))), None)
            if make == "adamw" or split is None:
                self.pieces[name] = {"": param}
                continue
            self.rows[name] = rows_of(split)
            self.pieces[name] = {key: nn.Parameter(param.detach()[rows]) for key, rows in self.rows[name].items()}
        everything = [piece for own in self.pieces.values() for piece in own.values()]
        self.optimizers = MAKERS[make]([p for p in everything if p.ndim == 2], [p for p in everything if p.ndim < 2])

    def step(self) -> None:
        """Step with the gradients of the model's parameters, and give the model the results."""
        for name, rows in self.rows.items():
            grad = self.params[name].grad
            for key, piece in self.pieces[name].items():
                piece.grad = None if grad is None else grad[rows[key]]
        update(self.optimizers)
        with torch.no_grad():
            for name, rows in self.rows.items():
                for key, piece in self.pieces[name].items():
                    self.params[name].index_copy_(0, rows[key], piece)
                self.params[name].grad = None

    def state(self, name: str, joined: bool) -> dict[str, Any]:
        """The state of a parameter as it is saved: leaves shaped like their pieces in one tensor, others by piece.

        Args:
            name: the name of the parameter.
            joined: whether no leaf is saved whole for its shape.
        """
        state: dict[Tensor, dict[str, Any]] = {}
        for optimizer in self.optimizers:
            state |= optimizer.state
        pieces = self.pieces[name]
        if name not in self.rows:
            return state[pieces[""]]
        found: dict[str, Any] = {}
        for leaf in state[next(iter(pieces.values()))]:
            values = {key: state[piece][leaf] for key, piece in pieces.items()}
            if joined and all(isinstance(v, Tensor) and v.shape == pieces[key].shape for key, v in values.items()):
                found[leaf] = torch.empty_like(self.params[name])
                for key, value in values.items():
                    found[leaf][self.rows[name][key]] = value
            else:
                found |= {f"{key}.{leaf}": value for key, value in values.items()}
        return found


def differences(
    model: nn.Module, optimizers: Sequence[Optimizer], plain: Apart, tp: DeviceMesh | None = None
) -> list[str]:
    """What of a model's parameters and of the saved state is not that of the plain optimizers; a collective."""
    # What no tracer can follow has whole state beside a parameter that is sharded.
    sharded = tp is not None or any(isinstance(param, DTensor) for param in model.parameters())
    joined = not sharded or not isinstance(plain.optimizers[0], HostReading)
    params = dict(model.named_parameters())
    found = [name for name, p in params.items() if not torch.equal(full(p), part_of(name, plain.params[name], tp))]
    names = {id(param): name for name, param in params.items()}
    for optimizer in optimizers:
        state = optimizer.state_dict()["state"]
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        for i, name in enumerate(order):
            mine = state.get(i, {})
            shape = plain.params[name].shape
            theirs = {
                key: part_of(name, v, tp) if isinstance(v, Tensor) and v.shape == shape else v
                for key, v in plain.state(name, joined).items()
            }
            found += unlike(f"state of {name} ", mine, theirs)
    return found


def alone(make: str, split: str) -> None:
    """Capture in one process what ranks need."""
    model = FusedModel()
    optimizers: Any = named(make, model)
    with shared_captures():
        for optimizer in optimizers:
            own = SPLITS[split] if any(p.ndim == 2 for p in optimizer.param_groups[0]["params"]) else {}
            canzona_compile.wrap(optimizer, model=model, split=own)
    train_model(model, optimizers, 2, lambda model, step, _: model(inputs(step, 0)))


def train(
    make: str,
    split: str,
    steps: int = 8,
    tp: str = "",
    replicas: int = 1,
    clip: float | None = 1e-2,
    restored: bool = False,
    **options: Any,
) -> list[str]:
    """Train under zero1 and, with the same gradients, by plain optimizers of the pieces. What differs, by step.

    On two data-parallel ranks without tensor parallelism the gradients of the plain ones are those of DDP.

    Args:
        make: the optimizers, a key of `MAKERS`.
        split: a key of `SPLITS`.
        steps: how many.
        tp: "" for none, "dtensor", or "by hand" for plain fragments; over two ranks.
        replicas: the size of the mesh dim that replicates groups of ZeRO-1.
        clip: the largest norm of gradients.
        restored: whether the state is loaded into the optimizers in mid-run, and unwrapped in the end.
        options: of `zero1`.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = 2 if tp else 1
    mesh = mesh_of((replicas, world // ranks // replicas, ranks), ("replicas", "dp", "tp"))
    data = mesh["replicas", "dp"] if replicas > 1 else mesh["dp"]
    by_hand = mesh["tp"] if tp == "by hand" else None
    place = rank // ranks
    model, plain = FusedModel(0 if tp else rank, by_hand), FusedModel()
    if by_hand is not None:
        mark(model)
        options["layout"] = by_hand
    elif tp:
        tensor_parallel(model, mesh["tp"])
    found = zero1(model, named(make, model), mesh=data, split=SPLITS[split], **options)
    handle = found[0].canzona
    expected = Apart(make, plain, SPLITS[split])
    reference = DistributedDataParallel(plain) if world == 2 else None
    schedules = [LambdaLR(o, lambda k: 1.0 / (1 + k)) for o in (*found, *expected.optimizers)]
    said: list[str] = []
    for step in range(steps):
        for micro in range(2):
            last = micro == 1
            with contextlib.nullcontext() if last else handle.no_sync():
                model(inputs(step, place, micro)).backward()
            if reference is not None:
                with contextlib.nullcontext() if last else reference.no_sync():
                    reference(inputs(step, place, micro)).backward()
        for name, param in model.named_parameters():
            if reference is None:
                plain.get_parameter(name).grad = gathered(name, param.grad.full_tensor(), by_hand)  # type: ignore[union-attr]
        if clip is not None:
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
            mine = handle.clip_grad_norm_(clip)
            nn.utils.clip_grads_with_norm_(plain.parameters(), clip, mine)
            said += [] if torch.allclose(mine, norm, rtol=1e-5) else [f"step {step}: norm {mine} for {norm}"]
        update(found)
        expected.step()
        for schedule in schedules:
            schedule.step()
        if restored and step == steps // 2:
            for optimizer in found:
                optimizer.load_state_dict(optimizer.state_dict())
        handle.synchronize()
        said += [f"step {step}: {what}" for what in differences(model, found, expected, by_hand)]
    if restored:
        for optimizer in found:
            canzona_compile.unwrap(optimizer)
        said += [f"unwrapped: {what}" for what in differences(model, found, expected, by_hand)]
    return said


def gathered(name: str, value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The whole tensor of which the ranks of a tensor-parallel mesh have these fragments. A collective."""
    dim = cut_dim(name)
    if mesh is None or dim is None:
        return value
    parts = [torch.empty_like(value) for _ in range(mesh.size())]
    dist.all_gather(parts, value.contiguous(), group=mesh.get_group())
    return torch.cat(parts, dim)
