"""Symmetric products in whole optimizers, symmetric state, and the operators that compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

import canzona_compile
from canzona_compile.analysis.flops import symbolic_flops
from canzona_compile.analysis.roofline import graph_time
from canzona_compile.analysis.symmetry_proof import symmetric_leaves
from canzona_compile.capture.templates import Capture
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.printer import differences, show
from canzona_compile.ir.step import Form, Leaf, Placed, Role, Step, Task, Template
from canzona_compile.kernels import gemm_axpby, sym_gemm
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM
from canzona_compile.machine.hardware import Machine, named_hardware
from canzona_compile.passes import Symmetry, lowering_passes, planning_passes
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.session.state import StateStore
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.conftest import Golden
from tests.harness.marks import also
from tests.harness.random_graphs import evaluate
from tests.harness.samples import Builder, empty, grid_of, rows_layout
from tests.passes.symmetric_graphs import GPU, M, N, aten, calls, close, in_float64, muon_history


def test_state_is_symmetric_if_that_of_all_tasks_is() -> None:
    store, placed = object.__new__(StateStore), SimpleNamespace(template=SimpleNamespace(family="", name="t"))
    store.plan = mock.Mock(**{"placed.return_value": placed})
    even, odd = torch.eye(2), torch.ones(2, 2).triu()
    for pair in ((even, odd), (odd, even)):
        store.residents = {(str(i), "gram"): value for i, value in enumerate(pair)}
        assert store.symmetric() == frozenset()
    store.residents = {("0", "gram"): even, ("1", "gram"): even, ("0", "tall"): torch.zeros(3, 2), ("0", "odd"): odd}
    assert store.symmetric() == {("t", "gram")}


# -- state, by induction ---------------------------------------------------------------------------


def variant(name: str, write: Callable[[Builder], tuple[fx.Node, fx.Node]]) -> Placed:
    """The compute graph of a step that keeps two square matrices `left` and `right`."""
    b = Builder(x=empty((M, N)), left=empty((M, M)), right=empty((M, M)))
    graph = b.returns(*write(b))
    leaves = tuple(Leaf(Role.STATE, n, (M, M), torch.float32) for n in ("left", "right"))
    template = Template(name, (M, N), torch.float32, leaves, ("left", "right"), fx.Graph(), family="f")
    none: Any = fx.Graph()
    return Placed(name, template, None, none, graph, none, (), (), (), (), ("left", "right"), None, 1)  # type: ignore[arg-type]


def gram_of(b: Builder) -> fx.Node:
    return b.call("gram", aten.mm.default, b["x"], b.call("turned", aten.permute.default, b["x"], [1, 0]))


def follows(b: Builder) -> tuple[fx.Node, fx.Node]:
    left = b.call("new_left", aten.lerp.Scalar, b["left"], gram_of(b), 0.1)
    return left, b.call("new_right", aten.add.Tensor, b["right"], b["left"])


def rests(b: Builder) -> tuple[fx.Node, fx.Node]:
    return b["left"], b["right"]


def breaks(b: Builder) -> tuple[fx.Node, fx.Node]:
    return b.call("new_left", aten.tril.default, b["left"]), b["right"]


def exchanges(b: Builder) -> tuple[fx.Node, fx.Node]:
    return b["right"], b["left"]


BOTH = frozenset({"left", "right"})


@pytest.mark.parametrize(
    ("variants", "candidates", "expected"),
    [
        ([follows], BOTH, BOTH),
        ([follows, rests, exchanges], BOTH, BOTH),
        ([follows, breaks], BOTH, frozenset()),  # right takes from left
        ([rests, breaks], BOTH, {"right"}),
        ([exchanges], {"left"}, frozenset()),  # right is not known to be symmetric at the start
        ([rests], {"left"}, {"left"}),
    ],
)
def test_induction_over_all_variants(
    variants: list[Callable[[Builder], tuple[fx.Node, fx.Node]]], candidates: set[str], expected: set[str]
) -> None:
    cuts = [variant(f"v{i}", write) for i, write in enumerate(variants)]
    assert symmetric_leaves(cuts, candidates) == expected


# -- whole optimizers ------------------------------------------------------------------------------


@cache
def captured(kind: type[torch.optim.Optimizer]) -> tuple[Template, ...]:
    """All variants of an optimizer's step for float64 matrices [6, 10]."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))], every=2)  # type: ignore[call-arg]
    spec = ParameterSpec((6, 10), torch.float64, torch.float64, torch.device("cpu"))
    kinds = Capture(optimizer).kind_of(ParamExample(optimizer.param_groups[0], spec, "weight"))
    return tuple(kinds.templates.values())


def lowered(kind: type[torch.optim.Optimizer], symmetric: bool) -> tuple[Step, Step]:
    """A step on CUDA, before the pass and after it."""
    templates = captured(kind)
    layout = rows_layout((6, 10), grid_of(1, 2))
    tasks = (Task("w", 0, 0, templates[0].name, layout),)
    step = Step(Form.CAPTURED, kind.__name__, GPU, templates, tasks)
    owned, _ = run(step, planning_passes(Options()))
    family = templates[0].family or templates[0].name
    state = frozenset((family, leaf.name) for leaf in templates[0].state if leaf.name in ("left", "right"))
    _, history = run(owned, lowering_passes(Options(), state if symmetric else frozenset()))
    record = next(r for r in history.records if r.name == "symmetry")
    return record.before, record.after


def state_like(template: Template, graph: fx.Graph) -> dict[str, Any]:
    random = torch.Generator().manual_seed(3)
    given_values: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                made = torch.randn(value.shape, generator=random, dtype=torch.float64)
                square = len(value.shape) == 2 and value.shape[0] == value.shape[1]
                given_values[str(node.target)] = made @ made.T if square else made
            else:
                given_values[str(node.target)] = 0.4
    return given_values


@pytest.mark.parametrize("kind", [*also([SOAP]), Shampoo])
@pytest.mark.parametrize("symmetric", [True, False])
def test_preconditioners(kind: type[torch.optim.Optimizer], symmetric: bool) -> None:
    before, after = lowered(kind, symmetric)
    assert len(before.placed) == len(after.placed) >= 2
    for old, new in zip(before.placed, after.placed, strict=True):
        given_values = state_like(old.template, old.compute)
        assert close(evaluate(new.compute, given_values), evaluate(old.compute, given_values), 1e-8)
        assert (new.cost, new.flops) == (old.cost, old.flops)
        statistics = [n for n in new.compute.nodes if n.target is SYM_GEMM and len(n.args) == 3]
        assert {str(n.args[2]) for n in statistics} == ({"left", "right"} if symmetric else set())
        assert calls(new.compute).count(SYM_GEMM) >= 2


def test_eigenvalue_roots_are_symmetric_products() -> None:
    _, after = lowered(Shampoo, True)
    most = max(calls(p.compute).count(SYM_GEMM) for p in after.placed)
    assert most == 4  # two statistics, two roots


SHAPES = ((64, 32), (6, 20), (32, 32))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_muon(golden: Golden, numerics: Any) -> None:
    for record in muon_history(numerics, *SHAPES).records:
        if record.name in ("gram", "symmetry"):
            golden(differences(show(record.before), show(record.after)), f"rewrites/{numerics}_{record.name}.diff")


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_muon_computes_the_same(numerics: Any) -> None:
    history = muon_history(numerics, *SHAPES)
    before, after = history.step_at("place"), history.step_at("symmetry")
    weighed = history.step_at("assign-owners")
    for old, weight, new in zip(before.placed, weighed.placed, after.placed, strict=True):
        assert not {aten.addmm.default, aten.baddbmm.default} & set(calls(new.compute))
        wire = torch.randn(old.template.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        given_values = {"_to_copy": wire, "eps": 1e-7}
        found, expected = (evaluate(in_float64(p.compute), given_values) for p in (new, old))
        assert close(found, expected, 1e-8)
        assert (new.cost, new.flops, new.scatter) == (weight.cost, weight.flops, weight.scatter)
        assert weight.cost == symbolic_flops(weight.compute, weight.template)
        assert numerics == "fast" or weight.cost == old.cost


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [(((64, 32), (64, 32)), {SYM_GEMM, aten.diagonal_scatter.default}), (((32, 32), (32, 32)), {SYM_GEMM, GEMM_AXPBY})],
    ids=["Gram matrices", "updates"],
)
def test_stacks_of_tasks_compute_the_same(shapes: tuple[tuple[int, int], ...], expected: set[Any]) -> None:
    (cut,) = muon_history("fast", *shapes).step_at("scheduled").placed
    assert cut.stacked is not None
    assert expected <= set(calls(cut.stacked.graph))
    each = [n.args[0] for n in cut.stacked.graph.nodes if getattr(n.target, "__name__", "") == "each"]
    assert not each  # nothing loops over tasks, as CUDA promises no bits of norms
    wires = torch.randn(3, *shapes[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found,) = evaluate(in_float64(cut.stacked.graph), {"_to_copy": wires, "eps": 1e-7})
    one_by_one = [evaluate(in_float64(cut.compute), {"_to_copy": w, "eps": 1e-7})[0] for w in wires]
    assert close(list(found), one_by_one)


def test_on_cpu_nothing_changes() -> None:
    history = muon_history("exact", *SHAPES)
    step = replace(history.step_at("fuse-collectives"), machine=Machine("cpu", "gloo", 1))
    assert Symmetry()(step) is step


def test_costs_count_whole_products() -> None:
    history = muon_history("exact", *SHAPES)
    before, after = history.step_at("fuse-collectives"), history.step_at("symmetry")
    hardware = named_hardware("h100")
    for old, new in zip(before.placed, after.placed, strict=True):
        assert symbolic_flops(new.compute, new.template) == old.cost
        times = [graph_time(p.compute, hardware) for p in (old, new)]
        assert dict(times[0].products) == dict(times[1].products)
        assert 0.5 < times[1].seconds / times[0].seconds <= 1.0  # no addend is copied first


# -- state as it is --------------------------------------------------------------------------------


@pytest.mark.full
def test_state_is_looked_at() -> None:
    torch.manual_seed(0)
    # Some processors round x @ x.T symmetrically only if the dims are multiples of their vectors.
    params = [torch.nn.Parameter(torch.randn(8, 16)) for _ in range(2)]
    optimizer: Any = canzona_compile.wrap(Shampoo(params))
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    store = optimizer.canzona.session.driver.store
    assert {"left", "right"} <= {leaf for _, leaf in store.symmetric()}
    assert "momentum_buffer" not in {leaf for _, leaf in store.symmetric()}
    optimizer.state[params[1]]["left"][0, 1] += 1.0
    assert "left" not in {leaf for _, leaf in store.symmetric()}
    assert "right" in {leaf for _, leaf in store.symmetric()}


# -- the operators ---------------------------------------------------------------------------------


def operands() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 5, 3, generator=random) for _ in range(2))
    c = torch.randn(2, 5, 5, generator=random)
    return [
        ((x,), {}),
        ((x[0],), {"alpha": 2.0, "diag": 0.5}),
        ((x, x, c + c.mT), {"alpha": 0.5, "beta": -2.0}),
        ((y, None, None), {"trans": True}),
    ]


@pytest.mark.parametrize("case", range(4))
def test_sym_gemm(case: int) -> None:
    args, kwargs = operands()[case]
    torch.library.opcheck(SYM_GEMM, args, kwargs, test_utils=("test_schema", "test_faketensor"))
    found = SYM_GEMM(*args, **kwargs)
    a, c = args[0].double(), args[2] if len(args) > 2 else None
    expected = kwargs.get("alpha", 1.0) * (a.mT @ a if kwargs.get("trans") else a @ a.mT)
    expected = expected + kwargs.get("diag", 0.0) * torch.eye(expected.shape[-1], dtype=torch.float64)
    expected = expected if c is None else expected + kwargs["beta"] * c.double()
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, found.mT)
    assert torch.equal(found, sym_gemm.reference(*args, **kwargs))


@pytest.mark.parametrize("right", [False, True])
def test_gemm_axpby(right: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, generator=random)
    factor = torch.randn(2, 3, 3, generator=random) if right else torch.randn(2, 5, 5, generator=random)
    kwargs = {"alpha": 2.0, "beta": 0.5, "right": right}
    torch.library.opcheck(GEMM_AXPBY, (factor, x), kwargs, test_utils=("test_schema", "test_faketensor"))
    found = GEMM_AXPBY(factor, x, **kwargs)
    product = x.double() @ factor.double() if right else factor.double() @ x.double()
    assert torch.allclose(found.double(), 2.0 * x.double() + 0.5 * product, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, gemm_axpby.reference(factor, x, **kwargs))  # type: ignore[arg-type]


def test_operators_refuse_what_does_not_fit() -> None:
    x = torch.empty(4, 3, device="meta")
    with pytest.raises(ValueError, match="they must have the same shape"):
        SYM_GEMM(x, torch.empty(3, 4, device="meta"))
    with pytest.raises(ValueError, match=r"c is \[3, 3\], but the product is \[4, 4\]"):
        SYM_GEMM(x, None, torch.empty(3, 3, device="meta"))
    with pytest.raises(ValueError, match=r"the factor is \[3, 3\], not \[4, 4\]"):
        GEMM_AXPBY(torch.empty(3, 3, device="meta"), x)
