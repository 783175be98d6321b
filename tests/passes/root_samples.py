"""Steps on a GPU that is not there: rates at which a rewrite pays or does not, Shampoo and SOAP as captured."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from canzona_compile.capture.templates import Capture
from canzona_compile.ir.step import Form, Role, Step, Task, Template
from canzona_compile.ir.verifier import verify
from canzona_compile.machine.hardware import Curve, Hardware, Machine, named_hardware
from canzona_compile.passes import Canonicalize, Roots
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from tests.harness.samples import grid_of, rows_layout
from tests.kernels.test_roots import with_spectrum


def rates(**factorizations: float) -> Hardware:
    """A GPU on which everything takes next to no time but decompositions, at these FLOP/s.

    Where none is given it is 1, and 1e6 for roots by products.
    """
    curves = {"eigh": 1.0, "qr": 1.0, "other": 1.0, "inverse_root": 1e6, **factorizations}
    flat = {name: Curve(((64.0, rate),)) for name, rate in curves.items()}
    return replace(named_hardware("h200"), launch=0.0, factorizations=tuple(flat.items()))


def gpu(**factorizations: float) -> Machine:
    return Machine("cuda", "nccl", 1, rates(**factorizations))


def step_of(template: Template, machine: Machine, count: int = 1) -> Step:
    layout = rows_layout(template.shape, grid_of(1, 2))
    tasks = tuple(Task(f"w{i}", i, 0, template.name, layout) for i in range(count))
    return Step(Form.CAPTURED, "Toy", machine, (template,), tasks)


def after(template: Template, machine: Machine, count: int = 1) -> Template:
    """The template once canonical and rewritten, and valid."""
    step = Roots()(Canonicalize()(step_of(template, machine, count)))
    verify(step)
    return step.templates[0]


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is target]


SHAPE = (10, 6)


@cache
def captured(kind: type[Optimizer]) -> Template:
    """A step that refreshes."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))], every=1)  # type: ignore[call-arg]
    spec = ParameterSpec(SHAPE, torch.float32, torch.float32, torch.device("cpu"))
    template = Capture(optimizer).kind_of(ParamExample(optimizer.param_groups[0], spec, "w")).template
    assert not template.interpreted
    return Canonicalize()(step_of(template, gpu())).templates[0]


def values(template: Template, seed: int = 0) -> dict[str, Any]:
    """Of leaves, as after some steps: statistics are positive definite, bases about those of their eigenvectors."""
    make = torch.Generator().manual_seed(seed)
    numbers = {"eps": 1e-4, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "betas_0": 0.9, "betas_1": 0.95}
    found: dict[str, Any] = {}
    for leaf in template.inputs:
        if leaf.role is Role.SCALAR:
            found[leaf.name] = numbers.get(leaf.name, 0.95 if "beta" in leaf.name else 3)
        elif leaf.name in ("left", "right"):
            found[leaf.name] = with_spectrum(torch.logspace(0, -2, leaf.shape[0]), seed, 1)[0]
        else:
            found[leaf.name] = torch.randn(leaf.shape, generator=make)
    for side in ("left", "right"):
        if f"{side}_basis" in found:
            found[f"{side}_basis"] = torch.linalg.eigh(found[side]).eigenvectors.flip(1)
    if "exp_avg_sq" in found:
        found["exp_avg_sq"] = found["exp_avg_sq"].square() + 0.1
    return found
