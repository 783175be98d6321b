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
from canzona_compile.capture.fake_twin import FakeTwin
from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.separability import check_separable
from canzona_compile.capture.templates import Capture
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Layout, Shape
from canzona_compile.ir.printer import dtype_name
from canzona_compile.ir.split import part_of_layout
from canzona_compile.ir.step import Form, Leaf, Role, Step, Task, Template
from canzona_compile.ir.variant_period import VariantPeriod
from canzona_compile.machine.hardware import Machine
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.replica.raised import Untraceable
from canzona_compile.session import stacks
from canzona_compile.session.plan import joined
from canzona_compile.tools.planning.mesh import Mesh, WeightSharding, check
from canzona_compile.tools.planning.weights import Model, ModelWeight

SMALL = 32  # smallest dim of the matrices on which captured graphs are compared with eager steps
DTYPE = torch.float32  # of parameters and gradients
ENTRY = re.compile(r"(@\d+)?(\[\d+(:\d+)?\])?$")  # what tasks add to the name of a weight
RANGE = re.compile(r"\[\d+:\d+\.")  # and to that of a piece
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


def captured_step(
    model: Model,
    mesh: Mesh,
    optimizer: Optimizer,
    machine: Machine,
    everything: bool = False,
    capacity: int | None = None,
) -> Captured:
    """Make the step of all matrices of a model on a mesh, as binding makes it on real ranks.

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
    captures = [Capture(own) for own in members]
    matrices_only = {m for m, own in enumerate(members) if any(w.experts for w in weights) and not steps_stacks(own)}
    divided = {
        w.name: captures[w.member if chained else 0]
        for w in weights
        if not w.elementwise and w.member not in matrices_only and len(w.shape) > 2
    }
    alike = {(w.member, sharding.stage(w), w.name.partition("[")[0]) for w in weights if w.name in divided}
    numbers = Counter((member, stage) for member, stage, _ in alike)  # of stacks that share their owners
    layouts: dict[tuple[int, int], Layout] = {}
    planned = []
    for weight in weights:
        found = parts(weight, sharding, weight.member in matrices_only)
        if weight.name in divided:
            number = numbers[weight.member, sharding.stage(weight)]
            found = shared_out(weight, found, divided[weight.name], number, capacity, layouts)
        planned += [(weight, name, layout) for name, layout in found]
    steps: list[Step] = []
    periods: dict[str, VariantPeriod] = {}
    for number, own in enumerate(members):
        mine = [(i, *entry) for i, entry in enumerate(planned) if entry[0].member == number or not chained]
        step, periodic = captured_by(own, captures[number], mine, machine, chained)
        steps.append(step)
        periods |= periodic
    names = tuple((step.optimizer, frozenset(task.name for task in step.tasks)) for step in steps)
    return Captured(joined(steps), periods, names)


def captured_by(
    optimizer: Optimizer,
    capture: Capture,
    planned: Sequence[tuple[int, ModelWeight, str, Layout]],
    machine: Machine,
    chained: bool,
) -> tuple[Step, dict[str, VariantPeriod]]:
    """Make the step of one optimizer.

    Args:
        planned: what it updates: the number of the task, the weight, the name of the task, and the layout.
        chained: whether it updates elementwise weights, too. If not, a stand-in of their optimizer does.
    """
    kinds: dict[tuple[Shape, int], ParamKind] = {}
    separable: dict[tuple[int, int], bool] = {}

    def kind_of(shape: Shape, g: int, name: str) -> ParamKind:
        spec = ParameterSpec(shape, DTYPE, DTYPE, torch.device("cpu"))
        like = ParamExample(optimizer.param_groups[g], spec, name)
        if (g, len(shape)) not in separable:  # nothing is rehearsed here, which costs more
            one = replace(like, spec=replace(spec, shape=shape[num_batch_dims(optimizer, like.group, len(shape)) :]))
            separable[g, len(shape)] = check_separable(optimizer, one)
        return stacks.kind_of(capture, like)

    tasks: list[Task] = []
    periods: dict[str, VariantPeriod] = {}
    # One comparison of a graph with an eager step holds for all sizes, so small matrices of the same kind come first.
    own = dict.fromkeys(
        (layout.shape, weight.group) for _, weight, _, layout in planned if chained or not weight.elementwise
    )
    for shape, g in dict.fromkeys((miniature(shape), g) for shape, g in own):
        kind_of(shape, g, "a small matrix")
    others: dict[Shape, Template] = {}
    used: set[tuple[Shape, int]] = set()
    for index, weight, name, layout in planned:
        if mine := chained or not weight.elementwise:
            key = layout.shape, weight.group
            if key not in kinds:
                kinds[key] = kind_of(*key, weight.name)
            template = kinds[key].template
            used.add(key)
            if (period := kinds[key].variant_period) is not None:
                periods[name] = period
        else:
            template = others.setdefault(layout.shape, elementwise_template(layout.shape))
        tasks.append(Task(name, index, weight.group if mine else 1, template.name, layout))
    found = {t.name: t for key, kind in kinds.items() if key in used for t in kind.templates.values()}
    templates = (*found.values(), *others.values())
    return Step(Form.CAPTURED, plain_class(optimizer).__name__, machine, templates, tuple(tasks)), periods


def elementwise_template(shape: Shape) -> Template:
    """Make code that stands for any optimizer with elementwise updates: it subtracts the gradient."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("param", "grad")]
    new = graph.call_function(torch.ops.aten.sub.Tensor, tuple(nodes))
    for node in (*nodes, new):
        node.meta["val"] = torch.empty(shape, dtype=DTYPE, device="meta")
    graph.output((new,))
    name = f"elementwise_{'x'.join(map(str, shape)) or 'scalar'}_{dtype_name(DTYPE)}"
    leaves = (Leaf(Role.PARAM, "param", shape, DTYPE), Leaf(Role.GRAD, "grad", shape, DTYPE))
    return Template(name, shape, DTYPE, leaves, ("param",), graph)


def miniature(shape: Shape) -> Shape:
    """Return a small shape whose dims have the same order of size."""
    sizes = sorted(set(shape))
    return tuple(SMALL * (1 + sizes.index(n)) for n in shape)


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


def shared_out(
    weight: ModelWeight,
    tasks: Sequence[tuple[str, Layout]],
    capture: Capture,
    number: int,
    capacity: int | None,
    layouts: dict[tuple[int, int], Layout],
) -> list[tuple[str, Layout]]:
    """Divide stacks that ranks would gather among their owners, as binding does.

    Args:
        number: how many stacks share these owners.
        layouts: of ranges, by the layout of the whole and the length, for all weights: each is looked at once.
    """
    found: list[tuple[str, Layout]] = []
    for name, layout in tasks:
        spec = ParameterSpec(miniature(layout.shape), DTYPE, DTYPE, torch.device("cpu"))
        like = ParamExample(capture.optimizer.param_groups[weight.group], spec, name)
        if not (ranges := stacks.ranges(capture, like, layout, number, capacity)):
            found.append((name, layout))
        for first, length in ranges:
            if (id(layout), length) not in layouts:
                layouts[id(layout), length] = part_of_layout(layout, torch.arange(length, device="cpu"), 0)
            found.append((in_range(name, f"{first}:{first + length}"), layouts[id(layout), length]))
    return found


def in_range(name: str, label: str) -> str:
    """The name of a task that is a range of a stack, as `PiecesView` gives it to pieces: "w[0:8.gate]"."""
    whole, bracket, piece = name.partition("[")
    return f"{whole}[{label}.{piece}" if bracket and piece.endswith("]") else f"{name}[{label}]"


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
