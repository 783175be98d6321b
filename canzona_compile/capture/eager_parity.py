"""Compare the bits of a captured graph with the bits of the eager step.

They may differ, because code can ask whether it is being compiled. torch's own optimizers do: under Dynamo their bias
corrections become tensors and their additions become fused multiply-adds. Such a graph is correct but gives other
bits, so the eager step runs instead. So it does where the step calls functions that users compiled and the graph has
their operators: those functions round in a way of their own, which depends on what they compiled before. A graph that
calls them itself is compared with both sides running them as written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.capture.compiled_calls import compiled_calls
from canzona_compile.capture.copies import deep_copy
from canzona_compile.capture.dynamo import as_written
from canzona_compile.capture.external_counters import give_counts
from canzona_compile.capture.leaves import read, state_leaves, write
from canzona_compile.capture.oracle import Oracle
from canzona_compile.capture.randomness import undisturbed
from canzona_compile.capture.twin import make_twin, step_plainly
from canzona_compile.capture.variant import StepInputs
from canzona_compile.compat.matmul_precision import matmul_precision
from canzona_compile.ir.compiled_call import num_compiled_calls
from canzona_compile.ir.fx_utils import from_numbers, graph_module, placeholders, pointwise, tensor_value
from canzona_compile.ir.step import Role, Template

SAMPLES = 3
LARGEST = 2**24  # elements; larger matrices are not compared, because what code asks does not depend on the size


def holistic(template: Template) -> bool:
    """Tell whether the graph of a template does more than elementwise work."""
    numbers = from_numbers(template.graph)
    work = [n for n in template.graph.nodes if n.op == "call_function" and n not in numbers]
    calls = [n for n in work if tensor_value(n) is not None]
    return not all(pointwise(n) for n in calls)


def same_bits(optimizer: Optimizer, template: Template, oracle: Oracle, moment: StepInputs) -> bool:
    """Run one step of a random matrix by graph and eagerly, and compare every leaf that the step writes.

    The step is the one after the first step. The counters of `moment` lead the code to the template's variant. Every
    rank does the same on the same numbers, so all ranks get the same result. Matrices of more than `LARGEST` elements
    are not compared and count as equal.

    Args:
        optimizer: the optimizer.
        template: the template with the captured graph.
        oracle: the oracle that captured it.
        moment: what the code sees on the step besides tensors.

    Returns:
        Whether all bits are equal.
    """
    if math.prod(moment.spec.shape) > LARGEST:
        return not oracle.calls_compiled or num_compiled_calls(template.graph) > 0
    with undisturbed(moment.spec.device):
        return all(same_bits_once(optimizer, template, oracle, moment, seed) for seed in range(SAMPLES))


def same_bits_once(optimizer: Optimizer, template: Template, oracle: Oracle, moment: StepInputs, seed: int) -> bool:
    """Do the comparison of `same_bits` for the random matrix of one seed."""
    group, spec, counters, elsewhere = moment
    generator = torch.Generator().manual_seed(seed)

    def random(dtype: torch.dtype) -> Tensor:
        return torch.randn(spec.shape, generator=generator, device="cpu").to(spec.device, dtype)

    param = torch.nn.Parameter(random(spec.dtype))
    if spec.grad_dtype != spec.dtype:
        param.grad_dtype = spec.grad_dtype
    param.grad = random(spec.grad_dtype)
    vars(param).update(spec.marks)
    twin = make_twin(optimizer, group, [param])
    with as_written():
        step_plainly(twin)
    state: dict[Tensor, dict[str, Any]] = {param: alike(twin.state[param], oracle, generator)}
    twin = make_twin(optimizer, group, [param], state)
    give_counts(twin, elsewhere)
    for name, value in counters.items():
        write(twin.state[param], oracle.paths[name], value, {})
    param.grad = random(spec.grad_dtype)
    before = {name: leaf.clone() for name, leaf in state_leaves(twin.state[param]) if isinstance(leaf, Tensor)}
    oracle.count(counters)
    _, scalars = oracle.consult(group, elsewhere)
    oracle.count(counters)
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
    if found is None or calls.count != num_compiled_calls(template.graph):
        return False
    expected = {**dict(state_leaves(twin.state[param])), "param": param.detach()}
    return all(torch.equal(value, expected[name]) for name, value in zip(template.writes, found, strict=True))


def alike(state: dict[str, Any], oracle: Oracle, generator: torch.Generator) -> dict[str, Any]:
    """Make a state with the leaves of the oracle's state. Each is the leaf of `state` if it fits, else random."""
    made: dict[str, Any] = deep_copy(oracle.structure)  # with its empty containers
    for name, path in oracle.paths.items():
        like, value = oracle.first_state[0][name], read(state, path)
        if isinstance(like, Tensor):
            if not isinstance(value, Tensor) or value.shape != like.shape:
                value = torch.rand(like.shape, generator=generator, device="cpu").to(like.device)
            value = value.to(like.dtype)
        write(made, path, like if value is None else value, oracle.structure)
    return made


def as_input(node: fx.Node, value: Any) -> Any:
    """Turn a number into the 0-d float64 tensor that the captured graph calls `.item()` on; keep other values."""
    asked = any(user.target is torch.ops.aten._local_scalar_dense.default for user in node.users)
    number = isinstance(value, float) or (asked and isinstance(value, int))
    return torch.tensor(value, dtype=torch.float64, device="cpu") if number else value
