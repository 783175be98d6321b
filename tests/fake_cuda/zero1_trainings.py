"""Trainings under ZeRO-1 on the stand-in, beside the plain optimizer that is given the same reduced gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.optim import AdamW, Muon, Optimizer
from torch.utils import _pytree as pytree

import canzona_compile
from canzona_compile.capture.templates import Capture
from canzona_compile.data_parallel import gradient
from canzona_compile.data_parallel.engine import Zero1
from canzona_compile.data_parallel.fragment import Fragment
from canzona_compile.passes.symmetry import Symmetry
from canzona_compile.replica.twin import step_plainly
from canzona_compile.session import planning, step_driver
from canzona_compile.session.session import Session
from canzona_compile.session.step_driver import StepDriver
from canzona_compile.views.view import ParamView
from tests.fake_cuda.device import current_device
from tests.fake_cuda.model_on_device import (
    READ,
    Parts,
    backward,
    beside_training,
    parameters_on_device,
    plain_of,
    shown,
    training,
)
from tests.fake_cuda.on_device import look, on_stand_in
from tests.fake_cuda.rank_programs import torch_alone
from tests.fake_cuda.tensors import CallsForDevice, adopted
from tests.fake_cuda.trainings import mesh_of_thread
from tests.harness.optimizers import SHARED, adopt

Values = dict[str, dict[str, Tensor]]  # by module and parameter
Shapes = dict[str, dict[str, tuple[int, ...]]]
Maker = Callable[[nn.Module], Any]

# In buckets of 2 KiB each of two ranks owns one matrix of every bucket, so all are uniform.
LEVEL: Shapes = {
    "a": {"weight": (24, 16), "bias": (24,)},
    "b": {"weight": (24, 16), "bias": (24,)},
    **{name: {"weight": (24, 16)} for name in "cdef"},
}
UNEVEN: Shapes = {
    "a": {"weight": (24, 16), "bias": (24,)},
    "b": {"weight": (56, 24)},
    "c": {"weight": (24, 16), "bias": (24,)},
    "d": {"weight": (7, 5), "bias": (300,)},
}
# A table that is cut, so that several ranks own elements of it.
CUT: Shapes = {"a": {"table": (1100, 32)}, "b": {"weight": (24, 16), "bias": (24,)}}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("weight")]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if not name.endswith("weight")]


def muon(params: Any) -> Optimizer:
    return Muon(params, lr=0.05, momentum=0.9, weight_decay=0.1)


MAKERS: dict[str, Maker] = {
    "two": lambda model: [muon(matrices(model)), AdamW(others(model), lr=0.01)],
    "chain": lambda model: canzona_compile.chain(muon(matrices(model)), AdamW(others(model), lr=0.01)),
    "adamw": lambda model: [AdamW(model.parameters(), lr=0.01)],
}


@dataclass(frozen=True)
class Script:
    """A training under ZeRO-1.

    Attributes:
        make: the optimizers, a key of `MAKERS`.
        shapes: the parameters.
        world: how many ranks there are.
        replicas: how many groups of them hold the same shards.
        tp: over how many ranks the rows of matrices are cut beside that, as plain tensors.
        steps: how many steps it takes.
        accumulate: how many backward passes before each.
        clip: the largest norm of gradients.
        missing: by step, the modules that take no part on which ranks.
        side: whether the model runs on another stream than steps do.
        rates: by step, a new learning rate.
        dtype: of parameters and gradients.
        reads: whether the whole gradients of the last step are gathered, and compared as the state is.
        options: of `zero1`.
    """

    make: str = "two"
    shapes: Shapes = field(default_factory=lambda: LEVEL)
    world: int = 2
    replicas: int = 1
    tp: int = 1
    steps: int = 5
    accumulate: int = 1
    clip: float | None = None
    missing: dict[int, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    side: bool = False
    rates: dict[int, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    reads: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankResult:
    """What a rank found.

    Attributes:
        params: the parameters, by name.
        state: what checkpoints hold of the state, tensors alone.
        waits: for each step, how often the host waited for the device in backward passes, and from there to the next.
        calls: for each step, the calls of `torch.cuda` by name.
        launches: the work that the last step put on streams, by name: backward passes, clipping, and updates.
        kinds: whether each bucket is uniform.
    """

    params: dict[str, Tensor]
    state: list[Tensor]
    waits: list[tuple[int, int]]
    calls: list[Counter[str]]
    launches: tuple[Counter[str], ...]
    kinds: list[bool]


def first_values(script: Script) -> Values:
    return made(script, 3)


def cut(script: Script, value: Tensor, rank: int) -> Tensor:
    """What a rank holds of a parameter or of its state: of matrices, its rows."""
    return value.chunk(script.tp)[rank % script.tp].clone() if script.tp > 1 and value.ndim == 2 else value


def cut_all(script: Script, values: Values, rank: int) -> Values:
    return {part: {name: cut(script, value, rank) for name, value in own.items()} for part, own in values.items()}


def made(script: Script, seed: int) -> Values:
    random = torch.Generator().manual_seed(seed)
    return {
        part: {name: torch.randn(shape, generator=random).to(script.dtype) for name, shape in own.items()}
        for part, own in script.shapes.items()
    }


def values_of(script: Script, step: int, micro: int, rank: int) -> Values:
    """What is in the gradients of a rank beside what its forward pass reads."""
    return made(script, 10_000 * step + 100 * micro + rank)


def set_rate(optimizers: Sequence[Optimizer], rate: float | None) -> None:
    for group in (g for own in optimizers for g in own.param_groups) if rate is not None else ():
        group["lr"] = rate


def members(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, list) else list(optimizer.optimizers)


# -- plain ------------------------------------------------------------------------------------------


def plain_training(script: Script) -> RankResult:
    """Train with plain optimizers, given the gradients that reductions in the order of ranks would give."""
    model = Parts(first_values(script))
    optimizers = members(MAKERS[script.make](model))
    read: list[Tensor] = []
    for step in range(script.steps):
        set_rate(optimizers, script.rates.get(step))
        for name, param in model.named_parameters():
            _, part, own = name.split(".")
            param.grad = reduced(script, step, part, own, param.detach())
        if script.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), script.clip)
        if script.reads:
            read = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return RankResult(params_of(model), [*state_of(optimizers), *read], [], [], (), [])


def reduced(script: Script, step: int, part: str, name: str, param: Tensor) -> Tensor | None:
    """The gradient of a parameter, summed over ranks; None if no rank has one."""
    missing = script.missing.get(step, {})
    if all(part in missing.get(rank, ()) for rank in range(script.world // script.tp)):
        return None
    world = script.world // script.tp
    share, wire = 1.0 / world, script.options.get("reduce_dtype") or script.dtype
    found: list[Tensor] = []
    for rank in range(world):
        own = torch.zeros_like(param)
        for micro in range(script.accumulate) if part not in missing.get(rank, ()) else ():
            grad = param * READ + values_of(script, step, micro, rank)[part][name]
            own = grad if micro == 0 else own + grad
        found.append(own.to(wire) * share)
    size = world // script.replicas
    rows = [functools.reduce(torch.add, found[at : at + size]) for at in range(0, world, size)]
    return functools.reduce(torch.add, rows).to(script.dtype)


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def state_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [
        leaf.clone()
        for optimizer in optimizers
        for leaf in pytree.tree_leaves(optimizer.state_dict()["state"])
        if isinstance(leaf, Tensor)
    ]


# -- on ranks ---------------------------------------------------------------------------------------


def train(script: Script, rank: int) -> RankResult:
    """Train on one rank."""
    device = current_device()
    model = Parts(cut_all(script, first_values(script), rank))
    optimizer = MAKERS[script.make](model)
    shape = script.replicas, script.world // script.replicas // script.tp, script.tp
    mesh = mesh_of_thread(shape, ("replicas", "dp", "tp"))
    data = mesh["replicas", "dp"] if script.replicas > 1 else mesh["dp"]
    rows = {"*.weight": (mesh["tp"], [Shard(0)])} if script.tp > 1 else None
    canzona_compile.zero1(model, optimizer, mesh=data, layout=rows, **script.options)
    own = members(optimizer)
    handle = (optimizer if not isinstance(optimizer, list) else own[0]).canzona
    kinds = [bucket.uniform for bucket in own[0].canzona.zero1.buckets]
    caller = device.current
    stream = torch.cuda.Stream(device.index) if script.side else caller
    waits: list[tuple[int, int]] = []
    calls: list[Counter[str]] = []
    launches: list[Counter[str]] = []
    read: list[Tensor] = []
    for step in range(script.steps):
        set_rate(own, script.rates.get(step))
        before, called = device.waits, Counter(device.calls)
        launched = [Counter(device.launches)]
        with training():
            for micro in range(script.accumulate):
                one_pass(script, model, handle, stream, step, micro)
            between = device.waits
            launched.append(Counter(device.launches))
            if script.clip is not None:
                handle.clip_grad_norm_(script.clip)
            launched.append(Counter(device.launches))
            if script.reads:
                read = [param.grad.full_tensor() for param in model.parameters()]
            for member in [optimizer] if not isinstance(optimizer, list) else own:
                member.step()
                member.zero_grad()
        waits.append((between - before, device.waits - between))
        calls.append(device.calls - called)
        launches = [late - early for early, late in pairwise([*launched, device.launches])]
    with training():
        handle.synchronize()
    look()
    state = [*state_of(own), *(plain_of(grad).clone() for grad in read)]
    return RankResult(params_of(model), state, waits, calls, tuple(launches), kinds)


def one_pass(script: Script, model: nn.Module, handle: Any, stream: Any, step: int, micro: int) -> None:
    """Run a forward and a backward pass, as a user does who knows of streams."""
    caller = current_device().current
    rank = dist.get_rank() // script.tp
    values = cut_all(script, values_of(script, step, micro, rank), dist.get_rank())
    missing = script.missing.get(step, {}).get(rank, ())
    last = micro == script.accumulate - 1
    with contextlib.nullcontext() if last else handle.no_sync():
        if stream is not caller:
            stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            loss = model(values, missing)
        if stream is not caller:
            caller.wait_stream(stream)
        backward(loss)


class Beside:
    """A context manager that is entered and left beside a training."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __enter__(self) -> Any:
        with beside_training():
            return self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        with beside_training():
            return self.inner.__exit__(*error)


def beside(function: Any) -> Any:
    """The function, which runs beside a training."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with beside_training():
            return function(*args, **kwargs)

    return called


def step_on_device(twin: Optimizer, **arguments: Any) -> Any:
    """Stands in for `step_plainly`: the optimizer's own step of parameters that are elementwise, on the device."""
    device = current_device()
    params = [param for group in twin.param_groups for param in group["params"]]
    shown_as = {id(param): adopted(param) for param in params}
    for param in params:
        own = shown_as[id(param)]
        own.grad = None if param.grad is None else adopted(param.grad)
        twin.state[own] = {name: there(value) for name, value in twin.state.pop(param, {}).items()}
    for group in twin.param_groups:
        group["params"] = [shown_as[id(param)] for param in group["params"]]
    with CallsForDevice():
        found = step_plainly(twin, **arguments)
    for param in params:
        state = twin.state.pop(shown_as[id(param)], {})
        device.state += state.values()
        twin.state[param] = {name: plain_of(value) for name, value in state.items()}
    return found


def there(value: Any) -> Any:
    """A leaf of the state, as the device's unless it is a number on the host."""
    return adopted(value) if isinstance(value, Tensor) and value.ndim else value


@contextlib.contextmanager
def zero1_on_device() -> Iterator[None]:
    """Inside this context, what ZeRO-1 does around steps runs on devices, and its sessions see plain tensors."""
    ready, local, init, lend = Session.ready, Fragment._local, Zero1.__init__, ParamView.lend
    wrapper = gradient.make_wrapper_subclass

    def local_on_device(fragment: Fragment) -> Tensor:
        found = local(fragment)
        return adopted(found) if current_device().shown else found

    def made_shown(*args: Any, **kwargs: Any) -> None:
        with shown(True):
            init(*args, **kwargs)

    def shared(optimizer: Optimizer, maker: Any) -> Capture:
        capture = Capture(optimizer, maker)
        adopt(capture, SHARED)
        return capture

    with contextlib.ExitStack() as stack:
        stack.enter_context(parameters_on_device())
        for owner, name, value in (
            (Session, "ready", lambda session: Beside(ready(session))),
            (Session, "_dummy_step", beside(Session._dummy_step)),
            (StepDriver, "step", beside(StepDriver.step)),
            # Symmetric products of ours round otherwise. Without them, the plain optimizer's bits are the right ones.
            (Symmetry, "__call__", lambda _, step: step),
            (step_driver, "step_plainly", step_on_device),
            (Fragment, "_local", local_on_device),
            (Zero1, "__init__", made_shown),
            (ParamView, "lend", lambda view, grads: lend(view, grads and [plain_of(grad) for grad in grads])),
            (gradient, "make_wrapper_subclass", lambda *a, **k: wrapper(*a, **k | {"device": torch.device("cpu")})),
            (planning, "Capture", shared),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def distance(results: Sequence[RankResult], right: Sequence[RankResult]) -> float:
    """How far an element of a parameter, or of its state, is at most from where it should be."""
    ranks = list(zip(results, right, strict=True))
    pairs = [(own.params[name], value) for own, other in ranks for name, value in other.params.items()]
    pairs += [pair for own, other in ranks for pair in zip(own.state, other.state, strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs)


def run_script(script: Script, seed: int | None) -> list[RankResult]:
    """Run a training with one order of the device's work; returns what each rank found."""
    given = copy.copy(script)
    with torch_alone(), on_stand_in(seed, script.world) as run, zero1_on_device():
        return run(functools.partial(train, given))


def of_ranks(script: Script, plain: RankResult) -> list[RankResult]:
    """What each rank holds after a plain training."""
    return [
        replace(
            plain,
            params={name: cut(script, value, rank) for name, value in plain.params.items()},
            state=[cut(script, value, rank) for value in plain.state],
        )
        for rank in range(script.world)
    ]


def different(results: Sequence[RankResult], right: Sequence[RankResult]) -> list[str]:
    """What differs on any rank, by a bit."""
    found: list[str] = []
    for rank, (own, other) in enumerate(zip(results, right, strict=True)):
        found += [f"rank {rank}: {n}" for n, value in own.params.items() if not torch.equal(value, other.params[n])]
        pairs = zip(own.state, other.state, strict=True)
        found += [f"rank {rank}: state {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return found
