"""Trainings on the stand-in: the wrapped optimizer on thread ranks beside the plain one.

Gradients are written on the caller's stream before each step and overwritten on it after the step, as backward and
`zero_grad` do. Nothing waits for the device in between, unless the step plans anew.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Muon, Optimizer
from torch.utils._pytree import tree_leaves

import canzona_compile
from canzona_compile.ir.storage import Stored
from canzona_compile.runtime.step_clock import MeasuredStep
from examples.optimizers.muon import Muon as StackedMuon
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.fake_cuda.device import current_device
from tests.fake_cuda.on_device import look, on_stand_in
from tests.fake_cuda.rank_programs import torch_alone, write
from tests.harness import layouts
from tests.harness.layouts import Case, Laid, replicate_of
from tests.harness.optimizers import SHARED, Shared, share_captures
from tests.harness.pairs import different, params_of

SHAPES = ((12, 8), (8, 12), (12, 8), (7, 5), (12, 8))
STACKS = ((3, 12, 8), (2, 8, 12), (3, 12, 8), (2, 7, 5), (3, 12, 8))
BLOCKS = ((12, 128), (8, 256), (12, 128), (7, 130), (4, 128))  # all but one have whole blocks of codes
SHAPES_OF = {
    "stacks": STACKS,
    "blocks": BLOCKS,
    "several leaves": BLOCKS[:2],
    "sent as it is": BLOCKS[:2],
}  # by the name of a script; others have SHAPES
EVERY = 3


class MatrixByMatrix(Optimizer):
    """Calls `one` for each parameter that has a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.one(param, self.state[param], self.param_groups[0]["lr"] / 64)

    def one(self, param: Any, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class SeveralLeaves(MatrixByMatrix):
    """Of its leaves prepare may open two: not `read`, which apply reads, nor `one` and `two`, which get one value."""

    def one(self, param: Any, state: dict[str, Any], lr: float) -> None:
        for leaf in ("m", "m_codes", "read", "one", "two"):
            state.setdefault(leaf, torch.zeros_like(param))
        for leaf, weight in (("m", 0.1), ("m_codes", 0.2), ("read", 0.3), ("one", 0.4)):
            state[leaf].lerp_(param.grad, weight)
        state["two"].copy_(state["one"])
        sent = (state["m"] - state["m_codes"] + state["one"]).bfloat16()
        param.add_(sent @ sent.T @ sent, alpha=-lr)
        param.add_(state["read"], alpha=-0.01)


class SentAsItIs(MatrixByMatrix):
    """The owner reads the new momentum in float32."""

    def one(self, param: Any, state: dict[str, Any], lr: float) -> None:
        momentum = state.setdefault("m", torch.zeros_like(param))
        momentum.lerp_(param.grad, 0.1)
        param.add_(momentum @ (momentum.T @ momentum), alpha=-lr)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sent as it is": SentAsItIs,
    "several leaves": SeveralLeaves,
    **dict.fromkeys(("muon", "blocks"), lambda params: Muon(params, lr=0.05, momentum=0.9, weight_decay=0.1)),
    "stacks": lambda params: StackedMuon(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "soap": lambda params: SOAP(params, lr=0.01, every=EVERY),
    "shampoo": lambda params: Shampoo(params, lr=0.05, every=EVERY),
}
# Where a rank finds new code in a step, others must not know of it from the captures that they share.
APART: dict[int, Shared] = defaultdict(dict)
Edit = Callable[[Optimizer], Any]  # what a user does to an optimizer between steps


@dataclass(frozen=True)
class Script:
    """A training.

    Attributes:
        name: of the optimizer.
        case: how parameters are laid out on ranks.
        steps: how many steps it takes.
        edits: by step, what is done before it.
        missing: by step, the parameters that have no gradient then.
        joins: the steps before which one more of the last parameters gets into a group of its own.
        moving: whether gradients are elsewhere than on the step before; by rank and step.
        options: of `wrap`.
        kernels: whether elementwise work runs in generated kernels, interpreted.
    """

    name: str
    case: Case
    steps: int = 7
    edits: dict[int, Edit] = field(default_factory=dict)
    missing: dict[int, tuple[int, ...]] = field(default_factory=dict)
    joins: tuple[int, ...] = ()
    moving: Callable[[int, int], bool] = lambda rank, step: False
    options: dict[str, Any] = field(default_factory=dict)
    kernels: bool = False


@dataclass(frozen=True)
class RankResult:
    """What a rank found.

    Attributes:
        different: what differs from the plain training.
        values: its fragments of parameters, and what it holds of their state.
        distance: how far the parameters are at most from those of the plain training.
        how: after each step, how its program runs.
        waits: how often it waited for the device.
        steady: its calls of `torch.cuda` in the last step, by name.
        copied: for each step, the bytes of each copy from the host to the device.
        measured: what its clock saw of the steps that were measured.
    """

    different: list[str]
    values: list[Tensor]
    distance: float
    how: list[str]
    waits: int
    steady: Counter[str]
    copied: list[list[int]]
    measured: tuple[MeasuredStep, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Plain:
    """What plain training gives; all of it follows from the seed. The optimizer is the one after all steps."""

    first: list[Tensor]
    grads: list[list[Tensor]]  # by step
    optimizer: Optimizer


def plain_training(script: Script) -> Plain:
    """The plain optimizer on whole tensors."""
    random = torch.Generator().manual_seed(5)
    shapes = SHAPES_OF.get(script.name, SHAPES)
    first = [torch.randn(shape, generator=random) for shape in shapes]
    grads = [[torch.randn(shape, generator=random) for shape in shapes] for _ in range(script.steps)]
    params = [torch.nn.Parameter(value.clone()) for value in first]
    optimizer = MAKERS[script.name](params[: len(params) - len(script.joins)])
    if "state" in script.options:
        canzona_compile.round_state(optimizer, script.options["state"])
    for step, values in enumerate(grads):
        if step in script.joins:
            optimizer.add_param_group({"params": [params[script.joins.index(step) - len(script.joins)]]})
        if step in script.edits:
            script.edits[step](optimizer)
        for i, (param, grad) in enumerate(zip(params, values, strict=True)):
            param.grad = None if i in script.missing.get(step, ()) else grad.clone()
        optimizer.step()
    return Plain(first, grads, optimizer)


_meshes = threading.local()


def mesh_of_thread(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh per shape and rank."""
    known: dict[Any, DeviceMesh] = _meshes.__dict__.setdefault("known", {})
    if shape not in known:
        known[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return known[shape]


def local_of(tensor: Any) -> Tensor:
    """This rank's fragment of a tensor, as plain memory."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def train(script: Script, plain: Plain, rank: int) -> RankResult:
    """Train on one rank."""
    device = current_device()
    laid = Laid(plain.first, script.case)
    optimizer: Any = MAKERS[script.name](laid.params[: len(laid.params) - len(script.joins)])
    canzona_compile.wrap(optimizer, replicate=replicate_of(script.case), **script.options)
    share_captures(optimizer, APART[rank] if script.missing or script.name != "muon" else SHARED)
    homes: list[Any] = [None] * len(laid.params)
    how: list[str] = []
    steady: Counter[str] = Counter()
    copied: list[list[int]] = []
    for step, values in enumerate(plain.grads):
        if step in script.joins:
            optimizer.add_param_group({"params": [laid.params[script.joins.index(step) - len(script.joins)]]})
        if step in script.edits:
            look()
            script.edits[step](optimizer)
        for i, param in enumerate(laid.params):
            wanted = laid.like_param(values[i], i)
            if homes[i] is None or script.moving(rank, step):
                homes[i] = copy.deepcopy(wanted)
                device.graveyard.append(local_of(homes[i]))
            write(local_of(homes[i]), local_of(wanted))
            param.grad = None if i in script.missing.get(step, ()) else homes[i]
        if step == 0:
            look()
        before, begun = Counter(device.calls), len(device.copied)
        optimizer.step()
        steady = device.calls - before
        copied.append(device.copied[begun:])
        for home in homes:
            write(local_of(home), None)
        how.append(optimizer.canzona.session.driver.last.executor.how)
    waits = device.waits
    look()
    state = [leaf for param in laid.params for leaf in tree_leaves(dict(optimizer.state.get(param, {})))]
    state += [tensor for leaf in state if isinstance(leaf, Stored) for tensor in leaf.tensors]
    values = [local_of(t).clone() for t in (*laid.params, *state) if isinstance(t, Tensor)]
    found = optimizer.canzona.session.measuring.found
    measured = () if found is None else found.own
    return RankResult(
        different(plain.optimizer, optimizer, laid), values, distance(plain, laid), how, waits, steady, copied, measured
    )


def distance(plain: Plain, laid: Laid) -> float:
    """How far an element of this rank's fragments is at most from that of the plain optimizer; NaN if one is NaN."""
    wanted = [p.detach() for p in params_of(plain.optimizer)]
    pairs = ((local_of(param), local_of(laid.like_param(wanted[i], i))) for i, param in enumerate(laid.params))
    return float(torch.stack([(own - right).abs().max() for own, right in pairs if own.numel()]).max())


def run_script(script: Script, seed: int | None, plain: Plain | None = None) -> list[RankResult]:
    """Run a training with one order of the device's work; returns what each rank found."""
    given = plain or plain_training(script)
    with (
        mock.patch.object(layouts, "mesh_of", mesh_of_thread),
        contextlib.nullcontext() if script.kernels else torch_alone(),
        on_stand_in(seed, max(1, script.case.world)) as run,
    ):
        return run(functools.partial(train, script, given))


def wrong(results: Sequence[RankResult]) -> list[str]:
    """What differs from the plain training, on any rank."""
    return [f"rank {rank}: {what}" for rank, result in enumerate(results) for what in result.different]
