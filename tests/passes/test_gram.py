"""Iterations are recognised by algebra, rewritten only where that is safe and pays, and as exact as is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import canzona_compile
from canzona_compile.analysis.flops import flops_of, symbolic_flops
from canzona_compile.analysis.newton_schulz import chains, normalised
from canzona_compile.analysis.roofline import product_flops
from canzona_compile.capture.templates import Capture
from canzona_compile.ir.options import Numerics, Options
from canzona_compile.ir.pipeline import PassHistory
from canzona_compile.kernels.ops import SYM_GEMM
from canzona_compile.lowering.symmetric_products import rewritten as with_halves
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.passes import lowering_passes, planning_passes
from canzona_compile.passes.gram import PUBLISHED, rewritten
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.report.build import Facts, make_report
from examples.optimizers.shampoo import Shampoo
from tests.harness.marks import crossed
from tests.harness.random_graphs import evaluate
from tests.passes.iterations import JORDAN, SPELLINGS, YOU, Iteration, changed, products, rewrite, template_of
from tests.passes.symmetric_graphs import muon_history

aten = torch.ops.aten

# -- what is recognised ----------------------------------------------------------------------------


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str, tall: bool) -> None:
    graph = Iteration(4, 12, tall=tall).iterated(YOU[:3], spelling)
    (chain,) = chains(graph)
    assert chain.flipped is tall
    assert [tuple(round(c, 12) for c in p) for p in chain.polynomials] == list(YOU[:3])
    assert (chain.start.target, chain.end) == (aten.div.Tensor, next(iter(reversed(graph.nodes))).args[0][0])


@pytest.mark.parametrize(
    ("name", "spelling", "tall", "stack"), crossed(list(PUBLISHED), SPELLINGS, [False, True], [0, 2])
)
def test_rewritten_iterations_compute_the_same(name: str, spelling: str, tall: bool, stack: int) -> None:
    graph = Iteration(4, 16, tall=tall, stack=stack).iterated(PUBLISHED[name], spelling)
    new = rewrite(graph)
    assert new is not graph
    x = torch.randn(next(iter(graph.nodes)).meta["val"].shape, generator=torch.Generator().manual_seed(0)).double()
    ((found,), (expected,)) = (evaluate(g, {"x": x, "c": 0.5}) for g in (new, graph))
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm())
    ((halved,),) = (evaluate(with_halves(new), {"x": x, "c": 0.5}),)
    assert float((halved - expected).norm()) <= 1e-9 * float(expected.norm())


@pytest.mark.parametrize("steps", [JORDAN[:4], (*JORDAN, JORDAN[0]), (*YOU[:4], JORDAN[0]), ((1.5, -0.5, 0.0),) * 5])
def test_other_steps_stay_as_they_are(steps: Any) -> None:
    graph = Iteration(4, 40).iterated(steps)
    assert len(chains(graph)) == 1
    assert rewrite(graph) is graph


def test_work_is_what_the_formula_says() -> None:
    """2 m n k per product: 20 r + 10 before, 8 r + 28 after, in m^3 for n = r m and five steps."""
    m, r = 8, 4
    graph = Iteration(m, r * m, torch.bfloat16).iterated(JORDAN)
    new = rewrite(graph)
    assert product_flops(graph, template_of(graph)) == {"bfloat16": (20 * r + 10) * m**3}
    assert product_flops(new, template_of(new)) == {"float16": (8 * r + 28) * m**3}
    assert products(new).count((m, r * m)) == 2
    halved = with_halves(new)
    assert sum(n.target is SYM_GEMM for n in halved.nodes) == 16


@pytest.mark.parametrize(("n", "pays"), [(8, False), (11, False), (12, True), (13, True)])
def test_it_pays_from_an_aspect_ratio_of_three_to_two_on(n: int, pays: bool) -> None:
    assert changed(Iteration(8, n).iterated(JORDAN)) is pays
    assert changed(Iteration(8, n, tall=True).iterated(JORDAN)) is pays


def test_no_gram_matrix_of_the_long_side() -> None:
    assert not changed(Iteration(24, 8).iterated(JORDAN))


# -- what is not -------------------------------------------------------------------------------------


def escaping(which: str) -> fx.Graph:
    """Three steps of which something more is returned."""
    it = Iteration(4, 40)
    first = it.normalised(it.b["x"])
    second = it.step(first, JORDAN[0], "fused")
    third = it.step(second, JORDAN[1], "fused")
    last = it.step(third, JORDAN[2], "fused")
    gram = next(n for n in it.b.graph.nodes if n.target is aten.mm.default and n.args[0] is second)
    more = {"the start": first, "an iterate": second, "a Gram matrix": gram}[which]
    return it.b.returns(last, more)


@pytest.mark.parametrize(("which", "lengths"), [("the start", [3]), ("an iterate", [1, 2]), ("a Gram matrix", [1, 1])])
def test_values_that_others_need_end_a_chain(which: str, lengths: list[int]) -> None:
    graph = escaping(which)
    assert [len(chain.steps) for chain in chains(graph)] == lengths


def test_coefficients_that_only_the_run_knows() -> None:
    it = Iteration(4, 40)
    assert chains(it.iterated([(it.b["c"], -0.5, 0.1)] * 3)) == ()


def test_products_that_are_no_iteration() -> None:
    it = Iteration(4, 40)
    x = it.b["x"]
    other = it.times(x, 0.5)
    graph = it.b.returns(it.mm(it.mm(x, it.turned(other)), x), it.gram(x))
    assert chains(graph) == ()


Started = Callable[[Iteration, fx.Node, fx.Node], fx.Node]  # from a matrix and its norm


def by(it: Iteration, x: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A matrix divided by the result of a call."""
    return it.call(aten.div.Tensor, x, it.call(target, *args, **kwargs))


NORM, VIEW = aten.linalg_vector_norm.default, aten.view.default
UNBOUNDED: dict[str, Started] = {
    "as it is": lambda it, x, norm: x,
    "times its norm": lambda it, x, norm: it.call(aten.mul.Tensor, x, norm),
    "another's norm": lambda it, x, norm: by(it, x, NORM, it.call(aten.exp.default, x)),
    "a bounded norm": lambda it, x, norm: by(it, x, aten.clamp.default, norm, 0.0, 1.0),
    "a norm less something": lambda it, x, norm: by(it, x, aten.add.Tensor, norm, -0.5),
    "an unknown eps": lambda it, x, norm: by(it, x, aten.add.Tensor, norm, it.b["c"]),
    "norms of rows": lambda it, x, norm: by(it, x, NORM, x, 2, [-1], True),
    "norms of others": lambda it, x, norm: by(it, x, VIEW, it.call(NORM, x, 2, [-2, -1], True), [1, 1, it.stack]),
    "ones": lambda it, x, norm: by(it, x, NORM, x, ord=1),
    "largest element": lambda it, x, norm: by(it, x, NORM, x, float("inf")),
}


@pytest.mark.parametrize("how", UNBOUNDED)
def test_without_a_bound_nothing_is_rewritten(how: str) -> None:
    it = Iteration(4, 40, torch.bfloat16, stack=40 if how == "norms of others" else 0)
    x = UNBOUNDED[how](it, it.b["x"], it.call(NORM, it.b["x"]))
    assert not normalised(x)
    for p in JORDAN:
        x = it.step(x, p, "fused")
    graph = it.b.returns(x)
    assert len(chains(graph)) == 1
    assert not changed(graph)


def low(it: Iteration, x: fx.Node) -> fx.Node:
    return it.call(aten._to_copy.default, x, dtype=torch.bfloat16)


DIVIDED: dict[str, Started] = {
    "clamp": lambda it, x, norm: by(it, x, aten.clamp.default, norm, it.b["c"]),
    "eps": lambda it, x, norm: by(it, x, aten.add.Tensor, norm, 1e-7),
    "safety": lambda it, x, norm: by(it, x, aten.add.Tensor, it.call(aten.mul.Tensor, norm, 1.25), 1e-6),
    "broadcast": lambda it, x, norm: by(it, x, aten.expand.default, it.call(NORM, x, 2, [-2, -1], True), [4, 40]),
    "turned and cast": lambda it, x, norm: it.call(
        aten._to_copy.default, by(it, x, NORM, it.turned(x)), dtype=torch.float32
    ),
    "norm before the cast": lambda it, x, norm: it.call(aten.div.Tensor, low(it, x), low(it, norm)),
}


@pytest.mark.parametrize("how", DIVIDED)
def test_divisions_by_the_norm(how: str) -> None:
    it = Iteration(4, 40, torch.float32)
    node = DIVIDED[how](it, it.b["x"], it.call(NORM, it.b["x"]))
    assert normalised(node)
    for size in (1e-3, 1.0, 1e3):
        x = size * torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
        (value,) = evaluate(it.b.returns(node), {"x": x, "c": 0.5})
        assert float(value.double().norm()) <= 1.01
        it.b.graph.erase_node(next(iter(reversed(it.b.graph.nodes))))


# -- in plans and in runs ------------------------------------------------------------------------------


def scheduled(numerics: Numerics, *shapes: tuple[int, int]) -> PassHistory:
    return muon_history(numerics, *shapes, strategy="owner", micro_groups=1)


def test_exact_numerics_has_no_such_pass() -> None:
    for numerics in ("exact", "fast"):
        options = Options(numerics=numerics)
        assert "gram" not in [p.name for p in lowering_passes(options)]
        names = [p.name for p in planning_passes(options)]
        assert ("gram" in names) == (numerics == "fast")
        if numerics == "fast":
            assert names.index("place") < names.index("gram") < names.index("assign-owners")


@pytest.mark.full
def test_costs_are_those_of_the_graphs_that_run() -> None:
    """Of wide and tall matrices those of the iteration on Gram matrices; with exact numerics of the captured one."""
    wide, tall, square = (16, 256), (256, 16), (32, 32)
    exact, fast = (scheduled(n, wide, tall, square).step_at("scheduled") for n in ("exact", "fast"))
    less = {cut.template.shape: cut.flops / old.flops for cut, old in zip(fast.placed, exact.placed, strict=True)}
    assert less[wide] == less[tall] < 0.6
    assert less[square] == 1
    owned = scheduled("fast", wide, tall, square).step_at("assign-owners")
    for cut, old in zip(fast.placed, owned.placed, strict=True):
        assert cut.cost == old.cost == symbolic_flops(old.compute, old.template)
        assert cut.flops == flops_of(cut.cost, cut.template.shape)


def test_owners_share_the_work_that_runs() -> None:
    """A wide matrix is more work than a square one where its graph is not rewritten, and less where it is."""
    shapes = (16, 256), (16, 256), (16, 256), (32, 32), (32, 32)
    owned = {n: scheduled(n, *shapes).step_at("scheduled") for n in ("exact", "fast")}
    by_owner = {n: [{t.shape for t in step.tasks if t.owner == (0, s)} for s in range(2)] for n, step in owned.items()}
    assert {(16, 256), (32, 32)} in by_owner["exact"]
    assert {(16, 256)} in by_owner["fast"]
    assert {(32, 32)} in by_owner["fast"]
    report = make_report(owned["fast"], Facts(numerics="fast"))
    assert report.imbalance < 1.05
    assert sum(load.flops for load in report.loads) == sum(task.flops for task in report.tasks)
    assert {t.formula for t in report.templates} == {str(cut.cost) for cut in owned["fast"].placed}


@pytest.mark.full
def test_statistics_are_no_iteration() -> None:
    """Shampoo's L and R are products of a matrix with its transpose, and nothing is iterated."""
    optimizer = Shampoo([torch.nn.Parameter(torch.zeros(2, 2))], every=1)
    spec = ParameterSpec((6, 40), torch.float32, torch.float32, torch.device("cpu"))
    kind = Capture(optimizer).kind_of(ParamExample(optimizer.param_groups[0], spec, "weight"))
    assert all(chains(t.graph) == () for t in kind.templates.values())


def stepped(make: Callable[[Any], Any], steps: int = 3) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(16, 48)) for _ in range(2)]
    params.append(torch.nn.Parameter(torch.randn(48, 16)))
    optimizer = make(params)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return [p.detach() for p in params], optimizer


def test_where_float16_is_slow_16_bits_stay_as_they_are() -> None:
    graph, single = (Iteration(8, 32, dtype).iterated(JORDAN) for dtype in (torch.bfloat16, torch.float32))
    slow = named_hardware("cpu")
    assert rewritten(graph, template_of(graph), slow) is graph
    assert rewritten(single, template_of(single), slow) is not single


@pytest.mark.full
def test_a_run_on_cpu() -> None:
    """Muon with fast numerics takes Gram iterations, and the steps of the plain one but for rounding.

    With the rates of a GPU, as float16 is slow on CPUs.
    """

    def muon(params: Any) -> Any:
        return torch.optim.Muon(params, lr=0.1, weight_decay=0.0)

    plain, _ = stepped(muon)
    start, _ = stepped(muon, 0)
    fast, optimizer = stepped(lambda p: canzona_compile.wrap(muon(p), numerics="fast", hardware="h100"))
    step = optimizer.canzona.step
    assert all(any(n.target is aten.diagonal_scatter.default for n in cut.compute.nodes) for cut in step.placed)
    assert "gram" in [record.name for record in optimizer.canzona.passes().records]
    for a, b, first in zip(fast, plain, start, strict=True):
        assert float((a - b).norm() / (b - first).norm()) < 0.03
