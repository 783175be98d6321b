"""Decompositions in stacks: where they gain, by rates or by torch's version; what they cost."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.analysis.flops import symbolic_flops
from canzona_compile.analysis.roofline import graph_time
from canzona_compile.capture.templates import Capture
from canzona_compile.ir import program_ops
from canzona_compile.ir.fx_utils import placeholders
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Form, Leaf, Placed, Role, Step, Task, Template
from canzona_compile.ir.verifier import verify
from canzona_compile.lowering.stacking import gains
from canzona_compile.machine.hardware import Curve, Hardware, Machine, named_hardware
from canzona_compile.passes import Batching, Canonicalize, Emit, Place, lowering_passes, planning_passes
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.tools.calibration.clock import Clock
from canzona_compile.tools.calibration.measure import ALONE, STACKED, factorization
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.marks import first
from tests.harness.random_graphs import evaluate
from tests.harness.samples import Builder, empty, grid_of, rows_layout

aten = torch.ops.aten
SHAPE = (10, 6)


def rates(**factorizations: float) -> Hardware:
    """A GPU on which everything takes next to no time but decompositions, at these FLOP/s, 1 where none is given."""
    curves = {"eigh": 1.0, "qr": 1.0, "other": 1.0, **factorizations}
    flat = {name: Curve(((64.0, rate),)) for name, rate in curves.items()}
    return replace(named_hardware("h200"), launch=0.0, factorizations=tuple(flat.items()))


def gpu(**factorizations: float) -> Machine:
    return Machine("cuda", "nccl", 1, rates(**factorizations))


def step_of(template: Template, machine: Machine, count: int = 1) -> Step:
    layout = rows_layout(template.shape, grid_of(1, 2))
    tasks = tuple(Task(f"w{i}", i, 0, template.name, layout) for i in range(count))
    return Step(Form.CAPTURED, "Toy", machine, (template,), tasks)


@cache
def captured(kind: type[Optimizer]) -> Template:
    """A step that refreshes."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))], every=1)  # type: ignore[call-arg]
    spec = ParameterSpec(SHAPE, torch.float32, torch.float32, torch.device("cpu"))
    template = Capture(optimizer).kind_of(ParamExample(optimizer.param_groups[0], spec, "w")).template
    assert not template.interpreted
    return Canonicalize()(step_of(template, gpu())).templates[0]


def values(template: Template, seed: int) -> dict[str, Any]:
    """Of leaves, as after some steps: statistics are positive definite, bases about those of their eigenvectors."""
    make = torch.Generator().manual_seed(seed)
    numbers = {"eps": 1e-4, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "betas_0": 0.9, "betas_1": 0.95}
    found: dict[str, Any] = {}
    for leaf in template.inputs:
        if leaf.role is Role.SCALAR:
            found[leaf.name] = numbers.get(leaf.name, 0.95 if "beta" in leaf.name else 3)
        else:
            found[leaf.name] = torch.randn(leaf.shape, generator=make)
    for side in ("left", "right"):
        found[side] = found[side] @ found[side].mT + 0.1 * torch.eye(len(found[side]))
        if f"{side}_basis" in found:
            found[f"{side}_basis"] = torch.linalg.eigh(found[side]).eigenvectors.flip(1)
    if "exp_avg_sq" in found:
        found["exp_avg_sq"] = found["exp_avg_sq"].square() + 0.1
    return found


def error(found: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm, by that of what is expected."""
    return float((found - expected).norm() / expected.norm())


def test_costs_count_decompositions() -> None:
    m, n = sympy.symbols("m n", positive=True, integer=True)
    shampoo, soap = (symbolic_flops(captured(kind).graph, captured(kind)) for kind in (Shampoo, SOAP))
    assert shampoo.coeff(m, 3).subs(n, 0) == 9 + 2  # eigh, and its product
    assert soap.coeff(n, 3).subs(m, 0) == 4 + 2  # QR, and its product


def test_degrees_of_dims_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sympy makes a polynomial for each, which took a fifth of the time in which a rank makes its plan."""
    template = captured(Shampoo)
    expected = symbolic_flops(template.graph, template)
    monkeypatch.setattr(sympy, "degree", None)
    assert symbolic_flops(template.graph, template) == expected


def test_time_of_decompositions_is_that_of_their_rates() -> None:
    template = captured(Shampoo)
    slow, fast = (graph_time(template.graph, rates(eigh=rate)).seconds for rate in (1e3, 2e3))
    assert slow - fast == pytest.approx(9 * (10**3 + 6**3) / 2e3)


def cut(template: Template, machine: Machine) -> Placed:
    step = Place(exact=False)(step_of(template, machine))
    verify(step)
    return step.placed[0]


def stacked(template: Template, machine: Machine, exact: bool = False) -> Placed:
    return Batching(exact=exact)._stacked(cut(template, machine), machine)


def test_decompositions_are_stacked_where_that_gains() -> None:
    template = captured(Shampoo)
    rates_of = {"eigh_batched": 2.0, "eigh": 1.0}
    assert ops(stacked(template, gpu(**rates_of)))["_linalg_eigh"] == "stacked"
    assert ops(stacked(template, gpu(**{**rates_of, "eigh": 3.0})))["_linalg_eigh"] == "listed"
    assert ops(stacked(template, Machine("cpu", "gloo", 1, rates(**rates_of))))["_linalg_eigh"] == "listed"
    assert stacked(template, gpu(**rates_of), exact=True).stacked is None


def ops(placed: Placed) -> dict[str, str]:
    """How each operator runs."""
    assert placed.stacked is not None
    found = {}
    for node in placed.stacked.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            found[node.target.overloadpacket.__name__] = "stacked"
        found.update({a.overloadpacket.__name__: "listed" for a in node.args if isinstance(a, torch._ops.OpOverload)})
    return found


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_stacks_give_what_tasks_give_one_by_one(kind: type[Optimizer]) -> None:
    machine, template = gpu(eigh_batched=2.0, qr_batched=2.0), captured(kind)
    placed = stacked(template, machine)
    assert placed.stacked is not None
    names = [str(n.target) for n in placeholders(placed.compute)]
    tasks = [values(template, seed) for seed in range(3)]
    inner = [wire.name for wire in placed.gather]
    for i, task in enumerate(tasks):
        made = evaluate(placed.prepare, task)
        task.update(zip(inner, made, strict=False))
        assert set(names) <= task.keys(), i
    single = {leaf.name for leaf in template.inputs if leaf.role is Role.SCALAR}
    given: dict[str, Any] = {}
    for name in names:
        own = [task[name] for task in tasks]
        given[name] = own[0] if name in single else torch.stack(own) if name in placed.stacked.inputs else own
    together = evaluate(placed.stacked.graph, given)
    apart = [evaluate(placed.compute, task) for task in tasks]
    for place, found in enumerate(together):
        for i in range(3):
            assert error(found[i], apart[i][place]) < 2e-4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_program_decomposes_matrices_of_all_its_tasks_in_one_call(rank: int) -> None:
    """Through all passes, each verified; six tasks on two ranks."""
    options = Options(numerics="fast", strategy="owner", micro_groups=1)
    step = step_of(captured(Shampoo), gpu(eigh_batched=2.0), count=6)
    emitted, _ = run(step, [*planning_passes(options), *lowering_passes(options), Emit(rank)])
    nodes = [n for module in emitted.program.module.children() for n in module.graph.nodes]
    assert len([n for n in nodes if n.target is aten._linalg_eigh.default]) == 2  # left and right


@pytest.mark.parametrize(
    ("operator", "size", "version", "expected"),
    [
        ("eigh", 32, "2.11.0+cu128", True),
        ("eigh", 33, "2.11.0", False),
        ("eigh", 1024, "2.12.1", True),
        ("eigh", 1024, "2.13.0+cu130", True),
        ("qr", 256, "2.13.0", True),
        ("qr", 257, "2.13.0", False),
        ("cholesky_ex", 1024, "2.11.0", True),
        ("solve_triangular", 1024, "2.11.0", True),
        ("svd", 8, "2.13.0", False),
        ("eigh", 1024, "3.0.0a0+git", True),
    ],
)
def test_the_table_of_versions(operator: str, size: int, version: str, expected: bool) -> None:
    assert gains(operator, size, version) is expected


def test_versions_that_are_none() -> None:
    with pytest.raises(ValueError, match="version"):
        gains("eigh", 8, "main")


def test_cholesky_factors_and_solves_are_stacked_too() -> None:
    b = Builder(param=empty((4, 4)), grad=empty((4, 4)))
    factor = b.call("factor", aten.linalg_cholesky_ex.default, b["grad"])
    lower = b.graph.call_function(operator.getitem, (factor, 0))
    lower.meta["val"] = empty((4, 4))
    solved = b.call("solved", aten.linalg_solve_triangular.default, lower, b["param"], upper=False)
    leaves = tuple(Leaf(role, role.value, (4, 4), torch.float32) for role in (Role.PARAM, Role.GRAD))
    template = Template("solve", (4, 4), torch.float32, leaves, ("param",), b.returns(solved))
    found = ops(stacked(template, gpu()))
    assert found["linalg_cholesky_ex"] == found["linalg_solve_triangular"] == "stacked"


def test_loops_over_indices_of_which_some_are_none() -> None:
    """SOAP reorders columns: `matrix[:, order]`."""
    matrices = [torch.arange(6.0).reshape(2, 3) + i for i in range(3)]
    orders = [torch.tensor(order) for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0])]
    found = program_ops.each(aten.index.Tensor, matrices, [None, orders])
    assert all(torch.equal(f, m[:, o]) for f, m, o in zip(found, matrices, orders, strict=True))


# -- measuring ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ALONE, *STACKED])
def test_rates_are_measured(name: str) -> None:
    points = factorization(Clock(torch.device("cpu"), 1), name, (4, 8))
    assert [size for size, _ in points] == [4.0, 8.0]
    assert all(rate > 0.0 for _, rate in points)


@pytest.mark.full
@pytest.mark.parametrize("kind", first([Shampoo, SOAP]))
def test_fast_numerics_on_a_cpu_take_the_same_steps(kind: type[Optimizer]) -> None:
    """Products of three matrices in stacks, decompositions in a loop, refreshed every other step."""
    make = torch.Generator().manual_seed(0)
    values, grads = torch.randn(3, 8, 6, generator=make), torch.randn(6, 3, 8, 6, generator=make)
    mine, yours = ([torch.nn.Parameter(v.clone()) for v in values] for _ in range(2))
    optimizers = [kind(own, every=2) for own in (mine, yours)]  # type: ignore[call-arg]
    canzona_compile.wrap(optimizers[0], numerics="fast")
    for given in grads:
        for own, optimizer in zip((mine, yours), optimizers, strict=True):
            for param, grad in zip(own, given, strict=True):
                param.grad = grad.clone()
            optimizer.step()
    for a, b in zip(mine, yours, strict=True):
        assert error(a.detach(), b.detach()) < 1e-4
