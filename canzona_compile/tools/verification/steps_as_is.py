"""What processes do for an optimizer that is distributed already: one steps the plain one, ranks step the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from canzona_compile.api.wrapped_class import is_wrapped
from canzona_compile.compat.telling import tell
from canzona_compile.compat.torch_private import TorchDispatchMode, pytree
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.rehearsal.operators import InDouble
from canzona_compile.tools.traffic import TrafficCounter
from canzona_compile.tools.verification.compare import brief, distance, norm_apart, wide
from canzona_compile.tools.verification.findings import LeafDifference, Tally
from canzona_compile.tools.verification.layouts import LayoutName, fragments, give
from canzona_compile.tools.verification.user_model import PARAMETER, Built, CannotVerify, blamed, built, returned
from canzona_compile.tools.verification.workers import Journal, Order, StepPage, check_same_start, gradients

MESH_DIMS = {"hsdp": ("replicate", "shard"), "ddp": ("replicate",), "zero1": ("replicate",)}  # others: shard
Norms = dict[str, float]  # by parameter
Part = tuple[int, ...]  # which part of a parameter a rank holds: ranks with equal ones hold copies


@dataclass(frozen=True, slots=True)
class PlainOutcome:
    """What the plain process saw.

    Attributes:
        precision: the coarsest floats in which the optimizer computes.
        moved: by step, how far each parameter is from where it began.
        rounding: by step, how far it is from that of a run with perturbed gradients, see `Gap`.
    """

    optimizer: str
    precision: str
    moved: tuple[Norms, ...]
    rounding: tuple[Norms, ...]


@dataclass(frozen=True, slots=True)
class AsIsOutcome:
    """What a rank saw.

    Attributes:
        apart: by step and parameter, the rank's part, and its distance from the plain run's.
        bytes_sent, calls: per step after the first.
    """

    optimizer: str
    leaves: tuple[LeafDifference, ...]
    apart: tuple[dict[str, tuple[Part, float]], ...]
    bytes_sent: float
    calls: dict[str, float]


def arithmetic(order: Order) -> contextlib.AbstractContextManager[Any]:
    """Where users' code runs."""
    return seen_by(InDouble()) if order.double else contextlib.nullcontext()


@contextlib.contextmanager
def seen_by(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside this context a mode sees operators, and functions that users compiled run as written: Dynamo refuses
    `fullgraph=True` where there is a mode."""
    with torch.compiler.set_stance("force_eager"), mode:
        yield


# -- plain -----------------------------------------------------------------------------------------


def run_plain_as_is(order: Order, folder: str, given: str | None) -> PlainOutcome:
    """Step the plain optimizer, write the journal, and find out what rounding may do.

    Args:
        given: a folder with the journal of an earlier run, whose gradients it takes; None if it makes some.
    """
    tell("building")
    made, journal = plain(order), Journal(folder, ahead=order.steps + 1)
    journal.write(0, StepPage({}, values(made)))
    for step in range(1, order.steps + 1):
        if given is None:
            grads = gradients(made, order.seed, step)
        else:
            params, found = named(made), Journal(given).read(step).grads
            grads = {name: grad.to(params[name].dtype) for name, grad in found.items()}
            give(params, grads)
        with blamed(f"step {step} of the plain optimizer"), arithmetic(order):
            made.optimizer.step()
        journal.write(step, StepPage(grads, values(made)))
        tell(f"step {step} of {order.steps} of the plain optimizer")
    precision = coarsest(plain(order), journal.read(1), order)
    moved, rounding = zip(*perturbed(order, journal, precision), strict=True)
    return PlainOutcome(type(made.optimizer).__name__, str(precision).removeprefix("torch."), moved, rounding)


def plain(order: Order) -> Built:
    """What build(None) returns."""
    with arithmetic(order):
        return built(order.build, order.seed, None)


def named(made: Built) -> dict[str, Tensor]:
    """All parameters of the model and of the optimizer."""
    return {**canonical_params(made.model), **dict(zip(made.names, made.params, strict=True))}


def values(made: Built) -> dict[tuple[str, str], Tensor]:
    """What they hold."""
    return {(name, PARAMETER): param.detach() for name, param in named(made).items()}


def coarsest(made: Built, page: StepPage, order: Order) -> torch.dtype:
    """The floats with the fewest digits among those that a step makes."""
    give(named(made), page.grads)
    seen = Precisions()
    with blamed("step 1 of the plain optimizer, taken once more,"), arithmetic(order), seen_by(seen):
        made.optimizer.step()
    found: torch.dtype = max(seen.found, key=lambda dtype: torch.finfo(dtype).eps)
    return found


class Precisions(TorchDispatchMode):
    """Inside this mode the floats that operators return are noted, except numbers, which may be counters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = {torch.float64}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [one for one in pytree.tree_leaves(made) if isinstance(one, Tensor)]
        self.found |= {one.dtype for one in tensors if one.ndim and one.is_floating_point()}
        return made


def perturbed(order: Order, journal: Journal, precision: torch.dtype) -> Iterable[tuple[Norms, Norms]]:
    """Of each step, how far parameters have moved, and what rounding may do to them."""
    made, start = plain(order), journal.read(0).leaves
    check_same_start(values(made), start)
    random = torch.Generator().manual_seed(order.seed)
    unit = torch.finfo(precision).eps

    def change(grad: Tensor) -> Tensor:
        signs = torch.randint(0, 2, grad.shape, generator=random, device="cpu") * 2 - 1
        return (grad * (1 + unit * signs)).to(grad.dtype)

    for step in range(1, order.steps + 1):
        page, moved, rounding = journal.read(step), Norms(), Norms()
        give(named(made), page.grads, change)
        with blamed(f"step {step} of the plain optimizer with perturbed gradients"), arithmetic(order):
            made.optimizer.step()
        for (name, _), value in values(made).items():
            expected = page.leaves[name, PARAMETER]
            stored = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
            moved[name] = norm_apart(expected, start[name, PARAMETER])
            rounding[name] = max(norm_apart(value, expected), stored * float(wide(expected).nan_to_num(0, 0, 0).norm()))
        tell(f"step {step} of {order.steps} with perturbed gradients")
        yield moved, rounding


# -- distributed -----------------------------------------------------------------------------------


def run_as_is(rank: int, order: Order, folder: str) -> AsIsOutcome:
    """Step the distributed optimizer on this rank, and compare its parameters after each step. Nothing here waits for
    other ranks, except what the user's code does."""
    tell("building")
    journal = Journal(folder)
    start = journal.read(0).leaves  # once it is there, `build` can be called: what fails is the distributed optimizer
    mesh = mesh_for(order.layout)
    with arithmetic(order):
        _, model, optimizer, _ = returned(order.build, order.seed, mesh)
    check_parameters(canonical_params(model), start)
    tally, apart = Tally(rank), []
    for step in range(1, order.steps + 1):
        tell(f"step {step} of {order.steps}", step - 1, order.steps)
        page = journal.read(step)
        give(canonical_params(model), page.grads)
        with blamed(f"step {step} of the distributed optimizer"), arithmetic(order):
            optimizer.step()
        held = {name: canonical_params(model)[name].detach() for name, _ in start}
        tally.add(step, {(name, PARAMETER): value for name, value in held.items()}, page.leaves)
        parts = {name: fragments(value, page.leaves[name, PARAMETER]) for name, value in held.items()}
        apart.append({name: (part_of(held[name]), norm_apart(*pair)) for name, pair in parts.items()})
    counter, more = TrafficCounter(), 0 if order.double else order.steps - 1
    for step in range(more):  # not compared: what users compiled does not run so where operators are counted
        tell(f"counting in step {step + 1} of {more}")
        give(canonical_params(model), page.grads)
        # A wrapped optimizer asks Dynamo in each step, outside of modes.
        counting = counter if is_wrapped(optimizer) else seen_by(counter)
        with blamed(f"step {order.steps + step + 1} of the distributed optimizer"), counting:
            optimizer.step()
    calls = {name: count / more for name, count in counter.calls.items()}
    return AsIsOutcome(type(optimizer).__name__, tally.rows, tuple(apart), counter.bytes_sent / max(more, 1), calls)


def mesh_for(layout: LayoutName) -> DeviceMesh:
    """What `build` is called with on ranks."""
    names, ranks = MESH_DIMS.get(layout, ("shard",)), dist.get_world_size()
    return init_device_mesh("cpu", (ranks,) if len(names) == 1 else (2, ranks // 2), mesh_dim_names=names)


def check_parameters(params: Mapping[str, Tensor], start: Mapping[tuple[str, str], Any]) -> None:
    """Refuse a distributed model that is not the plain one."""
    for (name, _), whole in start.items():
        if name not in params:
            hint = f"name parameters as build(None) does; there are {', '.join(list(params)[:3])}"
            raise CannotVerify("the model of build(mesh) does not have this parameter", at=name, hint=hint)
        param = params[name].detach()
        if (param.shape, param.dtype) != (whole.shape, whole.dtype):
            problem = f"the parameter is {brief(param)} in build(mesh) but {brief(whole)} in build(None)"
            raise CannotVerify(problem, at=name, hint="build the same model, and shard it by DTensors or not at all")
        if not distance(*fragments(param, whole)).equal:
            hint = "random, torch and numpy are already seeded; make the whole model on every rank, then shard it"
            raise CannotVerify("the parameter starts with other values than in build(None)", at=name, hint=hint)


def part_of(param: Tensor) -> Part:
    """Which part of a parameter this rank holds."""
    if not isinstance(param, DTensor):
        return ()
    place = param.device_mesh.get_coordinate() or ()
    return tuple(at for at, placement in zip(place, param.placements, strict=False) if not placement.is_replicate())
