"""Compare the bits of a captured graph with the bits of the eager step.

They may differ, because code can ask whether it is being compiled. torch's own optimizers do: under Dynamo their bias
corrections become tensors and their additions become fused multiply-adds. Such a graph is correct but gives other
bits, so the eager step runs instead. So it does where the step calls functions that users compiled and the graph has
their operators: those functions round in a way of their own, which depends on what they compiled before. A graph that
calls them itself is compared with both sides running them as written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.capture.compiled_calls import compiled_calls
from canzona_compile.capture.recorder import StepRecorder
from canzona_compile.capture.variant import StepInputs
from canzona_compile.compat.matmul_precision import matmul_precision
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.ir.bit_exactness import placed_equally
from canzona_compile.ir.compiled_call import num_compiled_calls
from canzona_compile.ir.fx_utils import from_numbers, graph_module, placeholders, pointwise, tensor_value
from canzona_compile.ir.layout import Layout, LayoutKind, Shape
from canzona_compile.ir.step import Role, Template
from canzona_compile.machine.hardware import Machine
from canzona_compile.replica.copies import deep_copy
from canzona_compile.replica.external_counters import give_counts
from canzona_compile.replica.leaves import read, state_leaves, write
from canzona_compile.replica.randomness import undisturbed
from canzona_compile.replica.twin import as_written, make_twin, step_plainly

SMALL = 32  # smallest dim of a `miniature`
SAMPLES = 3
LARGEST = 2**24  # elements; larger matrices are not compared, because what code asks does not depend on the size


def needs_whole_matrix(template: Template) -> bool:
    """Tell whether the graph of a template does more than elementwise work."""
    graph = template.graph
    if graph not in _beyond_elements:
        numbers = from_numbers(graph)
        work = [n for n in graph.nodes if n.op == "call_function" and n not in numbers]
        calls = [n for n in work if tensor_value(n) is not None]
        _beyond_elements[graph] = not all(pointwise(n) for n in calls)
    return _beyond_elements[graph]


def reads_numbers(template: Template) -> bool:
    """Tell whether the graph of a template reads numbers of tensors, other than hyperparameters, on the host."""
    inputs = zip(placeholders(template.graph), template.inputs, strict=True)
    hypers = {node for node, leaf in inputs if leaf.role is Role.SCALAR}
    reading = torch.ops.aten._local_scalar_dense.default
    return any(node.target is reading and node.args[0] not in hypers for node in template.graph.nodes)


def narrowed_on_owner(template: Template, machine: Machine, layout: Layout) -> bool:
    """Tell whether an owner would run an elementwise graph whose numbers may have fewer bits than those of the step.

    Under Dynamo torch's optimizers make their bias corrections 0-d tensors of 32 bits. Ranks that take the optimizer's
    own step on fragments have no need of the graph; they do unless bits depend on where an element lies.
    """
    calls = {n: tensor_value(n) for n in template.graph.nodes if n.op == "call_function"}
    values = {n: value for n, value in calls.items() if value is not None}
    if layout.grid.size == 1 or not any(value.ndim == 0 and value.is_floating_point() for value in values.values()):
        return False
    numbers, aligned = from_numbers(template.graph), LayoutKind.of(layout, len(template.shape)).aligned
    return not all(placed_equally(n, machine, aligned) for n in values if n not in numbers)


# By graph, because it is asked for every parameter of a kind.
_beyond_elements: WeakKeyDictionary[fx.Graph, bool] = WeakKeyDictionary()


def has_eager_bits(
    optimizer: Optimizer, recorder: StepRecorder, template: Template, moment: StepInputs, known: set[tuple[str, ...]]
) -> bool:
    """Tell whether a graph has the bits of the eager step.

    Nothing is compared where the eager step will run, unless that may be of another formula: with `foreach`, or in code
    that asks for being compiled, as Dynamo may have stumbled over that. Nor are matrices of more than `LARGEST`
    elements.

    Args:
        moment: what the code sees on the step. Its counters lead to the template's variant.
        known: the operators of graphs that have these bits; graphs of equal ones, for other sizes, are not compared.
    """
    foreach = "foreach" in moment.group and not is_torch_s_own(optimizer)
    work = tuple(str(n.target) for n in template.graph.nodes if n.op == "call_function")
    if work in known or not (recorder.why or foreach or needs_whole_matrix(template)):
        return True
    if math.prod(recorder.spec.shape) > LARGEST:
        return not recorder.calls_compiled or num_compiled_calls(template.graph) > 0
    with undisturbed(optimizer):
        held = all(same_bits(optimizer, template, recorder, moment, seed) for seed in range(SAMPLES))
    known |= {work} if held else set()
    return held


def same_bits(optimizer: Optimizer, template: Template, recorder: StepRecorder, moment: StepInputs, seed: int) -> bool:
    """Run one step of a random matrix by graph and eagerly, and compare every leaf that the step writes.

    The step is the one after the first step. Every rank does the same on the same numbers, so all get the same result.
    """
    (group, counters, elsewhere), spec = moment, recorder.spec
    generator = torch.Generator().manual_seed(seed)

    def random(dtype: torch.dtype) -> Tensor:
        return torch.randn(spec.shape, generator=generator, device="cpu").to(spec.device, dtype)

    param = spec.parameter(random)
    first, twin = (make_twin(optimizer, group, [param]) for _ in range(2))
    with as_written():
        step_plainly(first)
    state = twin.state[param] = with_leaves_of(first.state[param], recorder, counters, generator)
    give_counts(twin, elsewhere)
    param.grad = random(spec.grad_dtype)
    before = {name: leaf.clone() for name, leaf in state_leaves(state) if isinstance(leaf, Tensor)}
    recorder.set_leaves(counters)
    _, scalars = recorder.consult(group, elsewhere)
    recorder.set_leaves(counters)
    values = {Role.PARAM: param.detach().clone(), Role.GRAD: param.grad.clone()}
    arguments = [
        before[leaf.name] if leaf.role is Role.STATE else values.get(leaf.role, scalars.get(leaf.name))
        for leaf in template.inputs
    ]
    arguments = [as_input(node, value) for node, value in zip(placeholders(template.graph), arguments, strict=True)]
    with torch.no_grad(), matmul_precision(template.precision), as_written():
        try:
            found = fx.Interpreter(graph_module(template.graph, "Captured")).run(*arguments)
        except RuntimeError:  # an operator of the graph fails; the step may catch that
            found = None
    with compiled_calls() as calls, as_written():
        step_plainly(twin)
    if found is None or len(calls) != num_compiled_calls(template.graph):
        return False
    expected = {**dict(state_leaves(twin.state[param])), "param": param.detach()}
    return all(torch.equal(value, expected[name]) for name, value in zip(template.writes, found, strict=True))


def with_leaves_of(
    state: dict[str, Any], recorder: StepRecorder, counters: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Any]:
    """Make a state with the leaves of the recorder's state.

    Each is the counter of its name if there is one, else the leaf of `state` if it fits, else random.
    """
    made: dict[str, Any] = deep_copy(recorder.structure)  # with its empty containers
    for name, path in recorder.paths.items():
        like, value = recorder.first_leaves[name], read(state, path)
        if isinstance(like, Tensor):
            if not isinstance(value, Tensor) or value.shape != like.shape:
                value = torch.rand(like.shape, generator=generator, device="cpu").to(like.device)
            value = value.to(like.dtype)
        value = counters.get(name, like if value is None else value)
        write(made, path, value, recorder.structure)
    return made


def as_input(node: fx.Node, value: Any) -> Any:
    """Turn a number into the 0-d float64 tensor that the captured graph calls `.item()` on; keep other values."""
    asked = any(user.target is torch.ops.aten._local_scalar_dense.default for user in node.users)
    number = isinstance(value, float) or (asked and isinstance(value, int))
    return torch.tensor(value, dtype=torch.float64, device="cpu") if number else value


def is_torch_s_own(optimizer: Optimizer) -> bool:
    """Tell whether torch wrote the optimizer. If not, its `foreach` may select another formula."""
    return plain_class(optimizer).__module__.startswith("torch.optim")


def miniature(shape: Shape) -> Shape:
    """Return a small shape whose dims have the same order of size.

    One comparison of a graph with an eager step holds for all sizes, so who captures at many sizes begins with this.
    """
    sizes = sorted(set(shape))
    return tuple(SMALL * (1 + sizes.index(n)) for n in shape)
