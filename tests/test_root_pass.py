"""Which eigendecompositions and QR decompositions become matrix products, which stay, and how near the results are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from canzona_compile.capture.capture import Capture
from canzona_compile.capture.oracle import ParameterSpec
from canzona_compile.cost import symbolic_flops
from canzona_compile.hardware import Curve, Hardware, named_hardware
from canzona_compile.ir import Form, Leaf, Machine, Placed, Role, Step, Task, Template, placeholders
from canzona_compile.kernels import batched, cholesky_qr, inverse_root
from canzona_compile.kernels.root_ops import CHOLESKY_QR, INVERSE_ROOT
from canzona_compile.layout import Shape
from canzona_compile.options import Options
from canzona_compile.passes import Batching, Canonicalize, Place, Roots
from canzona_compile.planner import planning_passes
from canzona_compile.timing import graph_time
from canzona_compile.verifier import verify
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.random_graphs import evaluate
from tests.samples import Builder, empty, grid_of, rows_layout
from tests.test_roots import error, spectrum, with_spectrum

aten = torch.ops.aten
EIGH, QR = aten._linalg_eigh.default, aten.linalg_qr.default
N = 12


def rates(**factorizations: float) -> Hardware:
    """A GPU on which everything takes next to no time but decompositions, at these FLOP/s; 1 where none is given."""
    curves = {"eigh": 1.0, "qr": 1.0, "other": 1.0, **factorizations}
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


# -- forms -------------------------------------------------------------------------------------


def traced(function: Callable[..., Tensor], shape: Shape = (N, N)) -> Template:
    """A template whose new parameter is `function` of the gradient, which is symmetric, and of a number."""

    def step(grad: Tensor, eps: Tensor) -> Tensor:
        return function(grad, eps.item())

    example = with_spectrum(spectrum("even", shape[-1], 1e2), count=max(1, *shape[:-2], 1)).reshape(shape)
    graph = make_fx(step, tracing_mode="fake")(example, torch.tensor(0.25)).graph
    leaf = (Leaf(Role.GRAD, "grad", shape, torch.float32), Leaf(Role.SCALAR, "eps"))
    for node, name in zip(placeholders(graph), ("grad", "eps"), strict=True):
        node.target = name
    placeholders(graph)[1].meta.clear()  # a captured number has no value
    graph.output_node().args = ((graph.output_node().args[0],),)
    param = Leaf(Role.PARAM, "param", shape, torch.float32)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("param").meta["val"] = placeholders(graph)[0].meta["val"]
    return Template("traced", shape, torch.float32, (param, *leaf), ("param",), graph)


def parts(a: Tensor) -> tuple[Tensor, Tensor]:
    eigenvalues, eigenvectors = torch.linalg.eigh(a)
    return eigenvalues, eigenvectors


def rows(a: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    e, v = parts(a)
    return v * f(e).unsqueeze(-2) @ v.mT


def with_diag(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v @ torch.diag(e.clamp(min=eps).pow(-0.5)) @ v.T


def columns(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v @ (e.add(eps).rsqrt()[:, None] * v.t())


def halves(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    half = v * (e + eps).pow(-0.125)
    return half @ half.T


def divided(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v / (e + eps).sqrt().sqrt() @ v.transpose(0, 1)


def of_product(a: Tensor, eps: float) -> Tensor:
    root = rows(a, lambda e: (e + eps) ** -0.25)
    return root @ root


def twice(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return (v * e.clamp(min=eps).pow(-0.5) @ v.T) - 2 * (v * e.clamp(min=eps).pow(-0.25) @ v.T)


FORMS: dict[str, tuple[Callable[..., Tensor], list[int]]] = {
    "rows": (lambda a, eps: rows(a, lambda e: (e + eps).pow(-0.25)), [4]),
    "clamp": (lambda a, eps: rows(a, lambda e: e.clamp(min=eps).pow(-0.25)), [4]),
    "clamp_min": (lambda a, eps: rows(a, lambda e: e.clamp_min(0.5).pow(-1 / 8)), [8]),
    "relu, then add": (lambda a, eps: rows(a, lambda e: (e.relu() + eps).pow(-0.5)), [2]),
    "clamp, then add": (lambda a, eps: rows(a, lambda e: (e.clamp(min=0.1) + eps + 0.5).rsqrt()), [2]),
    "reciprocal": (lambda a, eps: rows(a, lambda e: 1.0 / (e + eps).sqrt()), [2]),
    "scaled": (lambda a, eps: rows(a, lambda e: 3.0 * (e - 0.0 + 1.0).pow(-0.25)), [4]),
    "squared": (lambda a, eps: rows(a, lambda e: (e + eps).pow(-0.25).square()), [2]),
    "diag": (with_diag, [2]),
    "columns": (columns, [2]),
    "halves": (halves, [4]),
    "divided": (divided, [4]),
    "product of roots": (of_product, [2]),
    "two roots": (twice, [2, 4]),
}


def applied(template: Template, a: Tensor, eps: float) -> Tensor:
    # The graph takes the number as a tensor, or, once canonical, as what the leaf says it is: a number.
    number: Any = torch.tensor(eps) if calls(template.graph, aten._local_scalar_dense.default) else eps
    names = [str(n.target) for n in placeholders(template.graph)]
    given = {"param": a, "grad": a, "eps": number}
    found: Tensor = evaluate(template.graph, {name: given[name] for name in names})[0]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_roots_are_found_however_they_are_written(form: str) -> None:
    function, powers = FORMS[form]
    template = traced(function)
    found = after(template, gpu())
    assert not calls(found.graph, EIGH)
    assert sorted(n.args[1] for n in calls(found.graph, INVERSE_ROOT)) == powers  # type: ignore[type-var]
    a = with_spectrum(spectrum("even", N, 1e2))[0]
    for eps in (0.25, 0.01):
        assert error(applied(found, a, eps)[None], function(a.double(), eps)[None]) < 2e-5


@pytest.mark.parametrize("form", ["rows", "clamp"])
def test_roots_of_stacks(form: str) -> None:
    function, _ = FORMS[form]
    found = after(traced(function, (3, N, N)), gpu())
    assert not calls(found.graph, EIGH)
    a = with_spectrum(spectrum("even", N, 1e2), count=3)
    assert error(applied(found, a, 0.25), function(a.double(), 0.25)) < 2e-5


def kept_vectors(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v * (e + eps).pow(-0.25) @ v.T + v


def kept_values(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v * (e + eps).pow(-0.25) @ v.T + e.sum()


def shifted_by_the_least(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v * (e - e.min().clamp(max=0.0) + eps).pow(-0.25) @ v.T


def two_bases(a: Tensor, eps: float) -> Tensor:
    (e, v), (_, w) = parts(a), parts(a + 1.0)
    return v * (e + eps).pow(-0.25) @ w.T


def mixed(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v * (e + eps).pow(-0.25) * e.clamp(min=eps).pow(-0.25) @ v.T


LEFT_ALONE: dict[str, Callable[..., Tensor]] = {
    "logarithm": lambda a, eps: rows(a, lambda e: (e + eps).log()),
    "tanh": lambda a, eps: rows(a, lambda e: e.tanh()),
    "positive power": lambda a, eps: rows(a, lambda e: (e + eps).pow(0.25)),
    "no power of two": lambda a, eps: rows(a, lambda e: (e + eps).pow(-1 / 3)),
    "no root": lambda a, eps: rows(a, lambda e: (e + eps).pow(-0.3)),
    "added after the power": lambda a, eps: rows(a, lambda e: e.pow(-0.25) + eps),
    "absolute": lambda a, eps: rows(a, lambda e: e.abs().pow(-0.25)),
    "clamped above": lambda a, eps: rows(a, lambda e: e.clamp(min=eps, max=1.0).pow(-0.25)),
    "floor of nothing": lambda a, eps: rows(a, lambda e: e.clamp(min=0.0).pow(-0.25)),
    "not transposed": lambda a, eps: (lambda e, v: v * (e + eps).pow(-0.25) @ v)(*parts(a)),
    "the other way round": lambda a, eps: (lambda e, v: v.T * (e + eps).pow(-0.25) @ v)(*parts(a)),
    "upper triangle": lambda a, eps: (lambda e: e[1] * (e[0] + eps).pow(-0.25) @ e[1].T)(torch.linalg.eigh(a, "U")),
    "more digits": lambda a, eps: rows(a.double(), lambda e: (e + eps).pow(-0.25)).float(),
    "vectors used elsewhere": kept_vectors,
    "values used elsewhere": kept_values,
    "shifted by a value": shifted_by_the_least,
    "two bases": two_bases,
    "two spectra": mixed,
}


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_what_only_looks_like_a_root_stays(form: str) -> None:
    template = traced(LEFT_ALONE[form])
    step = Canonicalize()(step_of(template, gpu()))
    assert calls(step.templates[0].graph, EIGH)
    assert Roots()(step).templates[0] is step.templates[0]


def test_what_does_not_pay_stays() -> None:
    template = traced(FORMS["rows"][0])
    for machine in (gpu(eigh=1e30), gpu(inverse_root=1e-9), Machine("cpu", "gloo", 1, rates())):
        assert calls(after(template, machine).graph, EIGH)
    assert not calls(after(template, gpu(eigh=1e3, inverse_root=1e6)).graph, EIGH)


def test_tasks_that_share_an_owner_are_judged_by_rates_of_stacks() -> None:
    template, machine = traced(FORMS["rows"][0]), gpu(eigh=1e3, eigh_batched=1e12, inverse_root=1e6)
    assert not calls(after(template, machine, count=2).graph, EIGH)  # one for each of two ranks
    assert calls(after(template, machine, count=3).graph, EIGH)


def test_fast_numerics_alone_rewrite() -> None:
    names = {numerics: [p.name for p in planning_passes(Options(numerics=numerics))] for numerics in ("exact", "fast")}
    assert "roots" in names["fast"]
    assert "roots" not in names["exact"]


# -- whole optimizers --------------------------------------------------------------------------

SHAPE = (10, 6)


@cache
def captured(kind: type[Optimizer]) -> Template:
    """A step that refreshes."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))], every=1)  # type: ignore[call-arg]
    spec = ParameterSpec(SHAPE, torch.float32, torch.float32, torch.device("cpu"))
    template = Capture(optimizer).kind_of(optimizer.param_groups[0], spec, "w").template
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


def results(template: Template, given: Mapping[str, Any]) -> dict[str, Tensor]:
    return dict(zip(template.writes, evaluate(template.graph, dict(given)), strict=True))


def test_shampoo_takes_products_and_the_same_step() -> None:
    template = captured(Shampoo)
    found = after(template, gpu())
    assert len(calls(template.graph, EIGH)) == len(calls(found.graph, INVERSE_ROOT)) == 2
    assert not calls(found.graph, EIGH)
    for seed in range(3):
        given = values(template, seed)
        new, old = results(found, given), results(template, given)
        for name, value in old.items():
            assert error(new[name][None], value[None]) < 2e-5, name


def test_soap_takes_products_where_they_were_measured_and_the_same_step() -> None:
    template = captured(SOAP)
    assert len(calls(after(template, gpu()).graph, QR)) == 2  # nobody knows how long ours takes
    assert len(calls(after(template, gpu(cholesky_qr=1e-9)).graph, QR)) == 2
    found = after(template, gpu(cholesky_qr=1e6))
    assert len(calls(template.graph, QR)) == len(calls(found.graph, CHOLESKY_QR)) == 2
    assert not calls(found.graph, QR)
    for seed in range(3):
        given = values(template, seed)
        new, old = results(found, given), results(template, given)
        for side in ("left_basis", "right_basis"):
            signs = (new[side] * old[side]).sum(dim=0).sign()
            new[side] = new[side] * signs  # no QR decomposition prescribes them
        for name, value in old.items():
            assert error(new[name][None], value[None]) < 2e-4, name


def test_qr_of_what_is_no_product_stays() -> None:
    machine = gpu(cholesky_qr=1e6)
    assert calls(after(traced(lambda a, eps: torch.linalg.qr(a + eps).Q), machine).graph, QR)
    assert calls(after(traced(lambda a, eps: torch.linalg.qr(a @ a, "complete").Q), machine).graph, QR)
    wide = traced(lambda a, eps: torch.linalg.qr((a @ a)[:4]).R.sum() * a, (N, N))
    assert calls(after(wide, machine).graph, QR)
    both = after(traced(lambda a, eps: torch.linalg.qr(a @ a).Q @ torch.linalg.qr(a @ a).R), machine)
    assert not calls(both.graph, QR)
    a = with_spectrum(spectrum("even", N, 10.0))[0]
    assert error(applied(both, a, 0.0)[None], (a.double() @ a.double())[None]) < 1e-5


# -- costs and batches -------------------------------------------------------------------------


def test_costs_count_decompositions_and_what_replaces_them() -> None:
    m, n = sympy.symbols("m n", positive=True, integer=True)
    template = captured(Shampoo)
    found = after(template, gpu())
    plain, products = (symbolic_flops(t.graph, t) for t in (template, found))
    assert plain.coeff(m, 3).subs(n, 0) == 9 + 2  # eigh, and its product
    assert products.coeff(m, 3).subs(n, 0) == 2 * inverse_root.products(4, True)
    soap = after(captured(SOAP), gpu(cholesky_qr=1e6))
    assert symbolic_flops(captured(SOAP).graph, captured(SOAP)).coeff(n, 3).subs(m, 0) == 4 + 2
    expected = 2 + cholesky_qr.flops(sympy.Integer(1), sympy.Integer(1))
    assert symbolic_flops(soap.graph, soap).coeff(n, 3).subs(m, 0) == expected


def test_time_of_decompositions_is_that_of_their_rates() -> None:
    template = captured(Shampoo)
    slow, fast = (graph_time(template.graph, rates(eigh=rate)).seconds for rate in (1e3, 2e3))
    assert slow - fast == pytest.approx(9 * (10**3 + 6**3) / 2e3)
    found = after(template, gpu())
    slow, fast = (graph_time(found.graph, rates(inverse_root=rate)).seconds for rate in (1e3, 2e3))
    assert slow - fast == pytest.approx(2 * inverse_root.products(4, True) * (10**3 + 6**3) / 2e3)


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
    assert ops(stacked(after(template, gpu()), gpu()))["inverse_root"] == "stacked"


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
@pytest.mark.parametrize("rewrite", [False, True])
def test_stacks_give_what_tasks_give_one_by_one(kind: type[Optimizer], rewrite: bool) -> None:
    machine = gpu(eigh_batched=2.0, qr_batched=2.0, cholesky_qr=1e6)
    template = after(captured(kind), machine) if rewrite else captured(kind)
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
            assert error(found[i][None], apart[i][place][None]) < 2e-4


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
    assert batched.gains(operator, size, version) is expected


def test_versions_that_are_none() -> None:
    with pytest.raises(ValueError, match="version"):
        batched.gains("eigh", 8, "main")


def test_cholesky_factors_and_solves_are_stacked_too() -> None:
    b = Builder(param=empty((4, 4)), grad=empty((4, 4)))
    factor = b.call("factor", aten.linalg_cholesky_ex.default, b["grad"])
    lower = b.graph.call_function(__import__("operator").getitem, (factor, 0))
    lower.meta["val"] = empty((4, 4))
    solved = b.call("solved", aten.linalg_solve_triangular.default, lower, b["param"], upper=False)
    leaves = tuple(Leaf(role, role.value, (4, 4), torch.float32) for role in (Role.PARAM, Role.GRAD))
    template = Template("solve", (4, 4), torch.float32, leaves, ("param",), b.returns(solved))
    found = ops(stacked(template, gpu()))
    assert found["linalg_cholesky_ex"] == found["linalg_solve_triangular"] == "stacked"
