"""Makes a captured step without ranks, tensors or devices: what a real run would bind, from shapes and a mesh."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.nn import Parameter
from torch.optim import Optimizer

from canzona_compile.api.chain import Chain
from canzona_compile.api.whole_model import plain_muon_adamw
from canzona_compile.capture.batch_dim import num_batch_dims
from canzona_compile.capture.eager_parity import SMALL, miniature
from canzona_compile.capture.fake_twin import FakeTwin
from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.separability import check_separable
from canzona_compile.capture.templates import Capture
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Layout, Ranks, Shape
from canzona_compile.ir.options import Options
from canzona_compile.ir.printer import dtype_name
from canzona_compile.ir.step import Leaf, Role, Step, Task, Template
from canzona_compile.ir.variant_period import VariantPeriod
from canzona_compile.machine.hardware import Machine
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.replica.raised import Untraceable
from canzona_compile.session.bind import Binder
from canzona_compile.session.plan import BoundParam, captured_step, joined, variant_periods
from canzona_compile.session.stacks import kind_of
from canzona_compile.tools.planning.mesh import Mesh, WeightSharding, check
from canzona_compile.tools.planning.weights import Model, ModelWeight

DTYPE = torch.float32  # of parameters and gradients
ENTRY = re.compile(r"(@\d+)?(\[\d+(:\d+)?\])?$")  # what tasks add to the name of a weight
RANGE = re.compile(r"\[\d+:\d+\.")  # and to that of a piece
PIECE = re.compile(r"\[([^\[\]]+)\]\[(\d+:\d+)\]$")  # a range of one
WHOLE_MODEL = "muon+adamw"  # the chain of `muon_adamw`
NAMED = {
    "muon": "canzona_compile.optimizers:Muon",
    "normuon": "canzona_compile.optimizers:NorMuon",
    "soap": "canzona_compile.optimizers:SOAP",
    "shampoo": "canzona_compile.optimizers:Shampoo",
    "kl-shampoo": "canzona_compile.optimizers:KLShampoo",
    "kl-soap": "canzona_compile.optimizers:KLSOAP",
}


def optimizer_named(name: str, arguments: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer over one matrix that stands for all.

    Args:
        arguments: the arguments of the class beside the parameters; for WHOLE_MODEL those of `muon_adamw`.
    """
    if name == WHOLE_MODEL:
        vector = Parameter(torch.zeros(2, device="cpu"))
        return made(lambda: plain_muon_adamw([one_matrix()], [vector], **arguments), "muon_adamw(model)")
    module, _, attribute = NAMED.get(name, name).partition(":")
    if not (module and attribute):
        raise CanzonaError(
            f"there is no optimizer {name!r}",
            hint=f"one of {', '.join((WHOLE_MODEL, *NAMED))}, or module:Class of your own",
        )
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module may raise whatever it likes
        raise CanzonaError(
            f"the optimizer cannot be imported: {type(error).__name__}: {error}",
            at=name,
            hint="pass module:Class, with the module on PYTHONPATH or in the current folder",
        ) from error
    return optimizer_of(kind, arguments)


def optimizer_of(kind: Any, arguments: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer of a class, over one matrix that stands for all."""
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        raise CanzonaError(f"{kind!r} is not a subclass of torch.optim.Optimizer")
    return made(lambda: kind([one_matrix()], **arguments), f"{kind.__name__}([matrix])")


def one_matrix() -> Parameter:
    """A matrix that stands for all."""
    return Parameter(torch.zeros(2, 2, device="cpu"))


def made(make: Callable[[], Optimizer], call: str) -> Optimizer:
    """Make an optimizer; raise CanzonaError if that fails."""
    try:
        return make()
    except Exception as error:
        raise CanzonaError(
            f"{call} failed: {type(error).__name__}: {error}",
            hint="to set arguments, call canzona_compile.plan(optimizer=...) in Python with an optimizer that you "
            "built",
        ) from error


@dataclass(frozen=True, slots=True)
class Captured:
    """What a plan begins with.

    Attributes:
        step: of all matrices of a model; of a chain, of all parameters.
        periods: by task, how its code continues from step to step, where that is known.
        members: for each optimizer of a chain, its class and the names of its tasks.
    """

    step: Step
    periods: dict[str, VariantPeriod]
    members: tuple[tuple[str, frozenset[str]], ...]


def captured_model(
    model: Model,
    mesh: Mesh,
    optimizer: Optimizer,
    machine: Machine,
    everything: bool = False,
    capacity: int | None = None,
) -> Captured:
    """Make the step of all matrices of a model on a mesh. They are bound as sessions bind them, as whole parameters.

    Args:
        model: its weights are numbered in their order; those of a chain optimizer by optimizer, unless `everything`.
        optimizer: its code is captured, with the hyperparameters of each weight's parameter group.
        everything: whether it has tasks for the parameters that another optimizer updates elementwise, too, in the
            order of the model. The step of a chain always has them.
        capacity: bytes, as users gave them; a range of a stack has at most as many.
    """
    check(mesh, model)
    sharding = WeightSharding(mesh, model.layers)
    chained = isinstance(optimizer, Chain)
    members = optimizer.optimizers if isinstance(optimizer, Chain) else (optimizer,)
    weights = model.everything if everything or chained else model.weights
    if not everything:
        weights = tuple(sorted(weights, key=lambda weight: weight.member))
    matrices_only = {m for m, own in enumerate(members) if any(w.experts for w in weights) and not steps_stacks(own)}
    laid: list[tuple[int | None, BoundParam]] = []
    for weight in weights:
        number = weight.member if chained else None if weight.elementwise else 0
        for name, layout in parts(weight, sharding, weight.member in matrices_only):
            laid.append((number, unbound(name, weight.group if number is not None else 1, layout)))
    binders = []
    for number, own in enumerate(members):
        mine = [one for member, one in laid if member == number]
        binders.append(Binder(own, Options(capacity=capacity), Capture(own), stacks_of_ranks(own, mine)))
        capture_small(binders[-1], mine)
    bound: list[tuple[int, BoundParam]] = []
    for member, one in laid:
        new = replace(one, task=replace(one.task, index=len(bound)))
        found = [new.stepped_by(elementwise(one.task.shape))] if member is None else binders[member].bind_one(new)
        bound += [(member or 0, replace(b, task=replace(b.task, name=in_range(b.task.name)))) for b in found]
    steps = [
        captured_step([b for member, b in bound if member == number], plain_class(own).__name__, Options())
        for number, own in enumerate(members)
    ]
    names = tuple((step.optimizer, frozenset(task.name for task in step.tasks)) for step in steps)
    return Captured(replace(joined(steps), machine=machine), variant_periods(b for _, b in bound), names)


def unbound(name: str, group: int, layout: Layout) -> BoundParam:
    """Make what is bound: a parameter without values, of the shape that all ranks of a layout hold together."""
    param = torch.empty(layout.shape, dtype=DTYPE, device="meta")
    spec = ParameterSpec(layout.shape, DTYPE, DTYPE, torch.device("cpu"))
    return BoundParam(param, Task(name, 0, group, "", layout), spec)


def stacks_of_ranks(optimizer: Optimizer, mine: Sequence[BoundParam]) -> Counter[Ranks]:
    """Count the stacks that ranks share and no others, as they own the matrices of these together."""
    found = {
        (own.task.layout.grid.members(), ENTRY.sub("", own.task.name).partition("[")[0])
        for own in mine
        if num_batch_dims(optimizer, optimizer.param_groups[own.task.param_group], len(own.task.shape))
    }
    return Counter(ranks for ranks, _ in found)


def capture_small(binder: Binder, mine: Sequence[BoundParam]) -> None:
    """Capture small matrices of the kinds of all others, whose graphs then need no comparison with an eager step.

    Nothing is rehearsed here, which costs more: steps at such sizes are checked with labels alone.
    """
    optimizer, checked = binder.optimizer, set[tuple[int, int]]()
    for shape, g in dict.fromkeys((miniature(own.task.shape), own.task.param_group) for own in mine):
        group = optimizer.param_groups[g]
        like = ParamExample(group, ParameterSpec(shape, DTYPE, DTYPE, torch.device("cpu")), "a small matrix")
        if (g, len(shape)) not in checked:
            checked.add((g, len(shape)))
            one = replace(like.spec, shape=shape[num_batch_dims(optimizer, group, len(shape)) :])
            check_separable(optimizer, replace(like, spec=one))
        kind_of(binder.capture, like)


def elementwise(shape: Shape) -> ParamKind:
    """Make code that stands for any optimizer with elementwise updates: it subtracts the gradient."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("param", "grad")]
    new = graph.call_function(torch.ops.aten.sub.Tensor, tuple(nodes))
    for node in (*nodes, new):
        node.meta["val"] = torch.empty(shape, dtype=DTYPE, device="meta")
    graph.output((new,))
    name = f"elementwise_{'x'.join(map(str, shape)) or 'scalar'}_{dtype_name(DTYPE)}"
    leaves = (Leaf(Role.PARAM, "param", shape, DTYPE), Leaf(Role.GRAD, "grad", shape, DTYPE))
    return ParamKind(None, {None: Template(name, shape, DTYPE, leaves, ("param",), graph)}, (), {})


def parts(weight: ModelWeight, sharding: WeightSharding, divided: bool) -> list[tuple[str, Layout]]:
    """Return the tasks of a weight and their layouts.

    A stack of experts becomes several tasks: one for each part of the mesh that holds entries of its own.

    Args:
        divided: whether each entry of a stack is a matrix of its own.
    """
    layouts = sharding.layouts(weight)
    names = [f"{weight.name}@{i}" if len(layouts) > 1 else weight.name for i in range(len(layouts))]
    if not (divided and weight.experts) or weight.elementwise:
        return list(zip(names, layouts, strict=True))
    entries = zip(names, layouts, sharding.entries(weight), strict=True)
    return [(f"{name}[{i}]", own) for name, stack, own in entries for i in range(stack.shape[0])]


def in_range(name: str) -> str:
    """Name a range of a stack that is a piece: "w[0:8.gate]", as `PiecesView` names it, in place of "w[gate][0:8]"."""
    return PIECE.sub(r"[\2.\1]", name)


def weight_name(task: str) -> str:
    """The name of the weight of a task."""
    return ENTRY.sub("", RANGE.sub("[", task))


def steps_stacks(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer steps a stack of matrices, and may be made of one: its class says so, or by trying."""
    if num_batch_dims(optimizer, optimizer.param_groups[0], 3):
        return True
    spec = ParameterSpec((2, SMALL, 2 * SMALL), DTYPE, DTYPE, torch.device("cpu"))
    try:
        FakeTwin(optimizer, ParamExample(optimizer.param_groups[0], spec, "a stack"), with_numbers=False)
    except (CanzonaError, Untraceable):
        return False
    try:
        plain_class(optimizer)([Parameter(torch.zeros(2, 2, 2, device="cpu"))], **optimizer.defaults)
    except ValueError:  # what optimizers raise for parameters that they do not take
        return False
    except Exception:  # it is made of something else than parameters and its defaults
        return True
    return True
