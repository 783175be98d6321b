"""Compare the bits of a captured graph with those of the eager step. Code may ask whether it is being compiled.

torch's own optimizers ask: under Dynamo, bias corrections become tensors and additions become fused
multiply-adds. Such a graph is right but gives other bits, so exact numerics run the eager step instead.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.capture.dynamo_oracle import Oracle, StepInputs
from canzona_compile.capture.external_counters import give_counts
from canzona_compile.capture.leaves import read, state_leaves, write
from canzona_compile.capture.randomness import undisturbed
from canzona_compile.capture.twin import make_twin, step_plainly
from canzona_compile.ir.fx_utils import from_numbers, graph_module, pointwise, tensor_value
from canzona_compile.ir.step import Role, Template

SAMPLES = 3
LARGEST = 2**24  # elements; whether code asks does not depend on the size


def holistic(template: Template) -> bool:
    """Does a graph do more than elementwise work?"""
    numbers = from_numbers(template.graph)
    work = [n for n in template.graph.nodes if n.op == "call_function" and n not in numbers]
    calls = [n for n in work if tensor_value(n) is not None]
    return not all(pointwise(n) for n in calls)


def same_bits(optimizer: Optimizer, template: Template, oracle: Oracle, moment: StepInputs) -> bool:
    """Run a step of a random matrix both ways and compare every leaf that it writes.

    It is the step after the first one. The counters of `moment` lead the code to the template's variant.

    Every rank does the same on the same numbers, so all ranks come to the same result. Tensors of more than
    `LARGEST` elements are not compared and count as equal.
    """
    if math.prod(moment.spec.shape) > LARGEST:
        return True
    with undisturbed(moment.spec.device):
        return all(same_bits_once(optimizer, template, oracle, moment, seed) for seed in range(SAMPLES))


def same_bits_once(optimizer: Optimizer, template: Template, oracle: Oracle, moment: StepInputs, seed: int) -> bool:
    """The comparison for one random matrix."""
    group, spec, counters, elsewhere = moment
    generator = torch.Generator().manual_seed(seed)

    def random(dtype: torch.dtype) -> Tensor:
        return torch.randn(spec.shape, generator=generator).to(spec.device, dtype)

    param = torch.nn.Parameter(random(spec.dtype))
    if spec.grad_dtype != spec.dtype:
        param.grad_dtype = spec.grad_dtype
    param.grad = random(spec.grad_dtype)
    twin = make_twin(optimizer, group, [param])
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
    with torch.no_grad():
        found = fx.Interpreter(graph_module(template.graph, "Captured")).run(*map(as_input, arguments))
    step_plainly(twin)
    expected = {**dict(state_leaves(twin.state[param])), "param": param.detach()}
    return all(torch.equal(value, expected[name]) for name, value in zip(template.writes, found, strict=True))


def alike(state: dict[str, Any], oracle: Oracle, generator: torch.Generator) -> dict[str, Any]:
    """A state with the leaves of the oracle's state: the leaves of `state` if they fit, else random ones."""
    made: dict[str, Any] = copy.deepcopy(oracle.structure)  # with its empty containers
    for name, path in oracle.paths.items():
        like, value = oracle.first_state[0][name], read(state, path)
        if isinstance(like, Tensor):
            if not isinstance(value, Tensor) or value.shape != like.shape:
                value = torch.rand(like.shape, generator=generator).to(like.device)
            value = value.to(like.dtype)
        write(made, path, like if value is None else value, oracle.structure)
    return made


def as_input(value: Any) -> Any:
    """A number as the 0-d float64 tensor that `.item()` in the captured graph expects."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
