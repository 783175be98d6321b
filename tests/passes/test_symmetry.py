"""What is called symmetric is symmetric, and what is rewritten for it computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from canzona_compile.analysis.symmetry_proof import symmetric_values
from canzona_compile.ir.fx_utils import outputs
from canzona_compile.ir.printer import show_nodes
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM
from canzona_compile.lowering.symmetric_products import rewritten
from tests.harness.random_graphs import evaluate
from tests.harness.samples import Builder, empty
from tests.harness.untimed import untimed
from tests.passes.symmetric_graphs import (
    PRODUCTS,
    SHAPES,
    Algebra,
    M,
    N,
    algebra,
    aten,
    calls,
    close,
    evaluated,
    matrices,
    on_cpu,
    values,
)


def printed(graph: fx.Graph) -> str:
    return "\n".join(show_nodes(graph))


@untimed(120)
@given(algebra(), st.integers(0, 5))
def test_what_is_called_symmetric_is(graph: fx.Graph, seed: int) -> None:
    known = symmetric_values(graph, {"s"})
    found = {
        node: value.double()
        for node, value in evaluated(on_cpu(graph), values(seed, **SHAPES)).items()
        if isinstance(value, torch.Tensor)
    }
    for node, proof in known.items():
        value = found[node]
        assert close([value], [value.mT]), printed(graph)
        alike = [found[n] for n, p in known.items() if p.generator in (proof.generator, None)]
        commuting = [other for other in alike if other.shape == value.shape]
        assert close([value @ other for other in commuting], [other @ value for other in commuting]), node.name


@untimed(120)
@given(algebra(), st.integers(0, 5), st.booleans())
def test_rewritten_graphs_compute_the_same(graph: fx.Graph, seed: int, checked: bool) -> None:
    leaves = {"s"} if checked else set()
    new, known = rewritten(graph, leaves), symmetric_values(graph, leaves)
    given_values = values(seed, **SHAPES)
    found, expected = (evaluate(on_cpu(g), given_values) for g in (new, graph))
    assert close(found, expected), printed(new)
    proved = [n for n in known if n.target in PRODUCTS]
    assert all(n.target not in PRODUCTS for n in new.nodes if n.name in {p.name for p in proved}), printed(new)
    assert calls(new).count(SYM_GEMM) >= bool([n for n in proved if n.users])


def test_random_graphs_have_something_to_prove_and_something_not() -> None:
    proved = unproved = 0

    @untimed(40)
    @given(algebra())
    def count(graph: fx.Graph) -> None:
        nonlocal proved, unproved
        known = symmetric_values(graph, {"s"})
        products = [n for n in graph.nodes if n.target in PRODUCTS]
        proved += sum(n in known for n in products)
        unproved += sum(n not in known for n in products)

    count()
    assert proved > 20
    assert unproved > 20


# -- proofs, one by one --------------------------------------------------------------------------

Expression = Callable[[Algebra], fx.Node]


class Fixed(Algebra):
    """Nothing is drawn."""

    def __init__(self) -> None:
        self.b = matrices(**SHAPES, s2=(M, M))

    def mm(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, a, b)

    def gram(self, name: str = "x") -> fx.Node:
        return self.mm(self.b[name], self.turn(self.b[name]))

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.call(aten._to_copy.default, node, dtype=dtype)


NOT_SYMMETRIC: dict[str, Callable[[Fixed], fx.Node]] = {
    "a product of two matrices": lambda f: f.mm(f.b["x"], f.turn(f.b["y"])),
    "an unknown leaf": lambda f: f.call(aten.neg.default, f.b["p"]),
    "a product of matrices that do not commute": lambda f: f.mm(f.gram("x"), f.gram("y")),
    "a product with a state that does not commute": lambda f: f.mm(f.b["s"], f.gram()),
    "a function that loses commutation": lambda f: (lambda g: f.mm(f.call(aten.abs.default, g), g))(f.gram()),
    "rounded to integers": lambda f: (lambda g: f.mm(f.cast(f.cast(g, torch.int32), torch.float64), g))(f.gram()),
    "a row added to each row": lambda f: f.call(aten.add.Tensor, f.gram(), f.b["v"]),
    "one half": lambda f: f.call(aten.tril.default, f.gram()),
    "memory": lambda f: f.call(aten.empty_like.default, f.gram()),
    "random numbers": lambda f: f.call(aten.bernoulli.p, f.gram(), 0.5),
    "another diagonal": lambda f: f.call(
        aten.diagonal_scatter.default, f.gram(), f.call(aten.diagonal.default, f.b["s"], 1, -2, -1), 1, -2, -1
    ),
    "a broken congruence": lambda f: f.mm(f.mm(f.b["p"], f.b["s"]), f.b["p"]),
    "rows scaled, not columns": lambda f: f.mm(
        f.call(aten.mul.Tensor, f.b["p"], f.call(aten.unsqueeze.default, f.b["v"], 1)), f.turn(f.b["p"])
    ),
}


@pytest.mark.parametrize("name", NOT_SYMMETRIC)
def test_nothing_is_claimed(name: str) -> None:
    fixed = Fixed()
    node = NOT_SYMMETRIC[name](fixed)
    fixed.b.returns(node)
    assert node not in symmetric_values(fixed.b.graph, {"s", "s2"})


def keller(f: Fixed) -> fx.Node:
    """b A + (c A) A, as Muon's first author spells it."""
    a = f.gram()
    return f.call(aten.add.Tensor, f.call(aten.mul.Tensor, a, -4.775), f.mm(f.call(aten.mul.Tensor, a, 2.0), a))


def ridge(f: Fixed) -> fx.Node:
    eye = f.call(aten.eye.default, M, dtype=torch.float64, device=torch.device("meta"))
    return f.call(aten.add.Tensor, f.gram(), eye, alpha=0.5)


def moved(f: Fixed) -> fx.Node:
    gram = f.gram()
    diagonal = f.call(aten.add.Tensor, f.call(aten.diagonal.default, gram, 0, 0, 1), f.b["t"])
    return f.call(aten.diagonal_scatter.default, gram, diagonal, 0, 0, 1)


def root_of_eigenvectors(f: Fixed) -> fx.Node:
    return f.mm(f.call(aten.mul.Tensor, f.b["p"], f.b["v"]), f.turn(f.b["p"]))


EXPECTED: dict[str, tuple[Callable[[Fixed], fx.Node], str]] = {
    "gram": (lambda f: f.gram(), "  %sym_gemm = canzona.sym_gemm.default(%x)"),
    "tall": (lambda f: f.mm(f.turn(f.b["x"]), f.b["x"]), "  %sym_gemm = canzona.sym_gemm.default(%x, trans=True)"),
    "transposed twice": (
        lambda f: f.turn(f.call(aten.mul.Tensor, f.gram(), 0.5)),
        "  %sym_gemm = canzona.sym_gemm.default(%x, alpha=0.5)",
    ),
    "average": (
        lambda f: f.call(aten.lerp.Scalar, f.b["s"], f.gram(), f.b["t"]),
        "  %sub = operator.sub(1.0, %t)\n  %sym_gemm = canzona.sym_gemm.default(%x, None, %s, alpha=%t, beta=%sub)",
    ),
    "sum of statistics": (
        lambda f: f.call(aten.addmm.default, f.b["s"], f.b["x"], f.turn(f.b["x"]), beta=0.5),
        "  %sym_gemm = canzona.sym_gemm.default(%x, None, %s, beta=0.5)",
    ),
    "polynomial": (
        keller,
        "  %sym_gemm = canzona.sym_gemm.default(%x)\n"
        "  %sym_gemm_1 = canzona.sym_gemm.default(%sym_gemm, None, %sym_gemm, alpha=2.0, beta=-4.775)",
    ),
    "identity": (ridge, "  %sym_gemm = canzona.sym_gemm.default(%x, diag=0.5)"),
    "diagonal": (moved, "  %sym_gemm = canzona.sym_gemm.default(%x, diag=%t)"),
    "eigenvectors": (
        root_of_eigenvectors,
        "  %n = aten.mul.Tensor(%p, %v)\n  %sym_gemm = canzona.sym_gemm.default(%n, %p)",
    ),
    "congruence": (
        lambda f: f.mm(f.turn(f.b["p"]), f.mm(f.b["s"], f.b["p"])),
        "  %n = aten.permute.default(%p, [1, 0])\n  %n = aten.mm.default(%s, %p)\n"
        "  %permute = aten.permute.default(%n, [1, 0])\n  %sym_gemm = canzona.sym_gemm.default(%n, %permute)",
    ),
    "twice": (
        lambda f: (lambda g: f.call(aten.add.Tensor, g, g, alpha=2.0))(f.gram()),
        "  %sym_gemm = canzona.sym_gemm.default(%x, alpha=3.0)",
    ),
    "two sums": (
        lambda f: f.call(aten.add.Tensor, f.gram("x"), f.gram("y"), alpha=0.5),
        "  %sym_gemm = canzona.sym_gemm.default(%y)\n"
        "  %sym_gemm_1 = canzona.sym_gemm.default(%x, None, %sym_gemm, beta=0.5)",
    ),
    "not symmetric, half of it": (
        lambda f: f.call(aten.addmm.default, f.b["p"], f.b["x"], f.turn(f.b["x"]), beta=0.5, alpha=2.0),
        "  %sym_gemm = canzona.sym_gemm.default(%x, alpha=2.0)\n  %add = aten.add.Tensor(%sym_gemm, %p, alpha=0.5)",
    ),
    "update": (
        lambda f: f.call(aten.addmm.default, f.b["x"], f.b["p"], f.b["x"], beta=3.0),
        "  %gemm_axpby = canzona.gemm_axpby.default(%p, %x, alpha=3.0)",
    ),
    "update, spelt out": (
        lambda f: f.call(aten.add.Tensor, f.call(aten.mul.Tensor, f.b["x"], f.b["t"]), f.mm(f.b["p"], f.b["x"])),
        "  %gemm_axpby = canzona.gemm_axpby.default(%p, %x, alpha=%t)",
    ),
    "update from the right": (
        lambda f: f.call(aten.addmm.default, f.b["p"], f.b["p"], f.b["s"], alpha=2.0),
        "  %gemm_axpby = canzona.gemm_axpby.default(%s, %p, beta=2.0, right=True)",
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_calls(name: str) -> None:
    fixed = Fixed()
    write, expected = EXPECTED[name]
    graph = fixed.b.returns(write(fixed))
    new = rewritten(graph, {"s"})
    body = [f"  {line.rsplit(' : ', 1)[0]}" for line in show_nodes(new)][:-1]
    text = "\n".join(body)
    for node in new.nodes:
        if node.name.startswith("n") and node.name[1:].isdigit():
            text = text.replace(f"%{node.name}", "%n")
    assert text == expected
    given_values = values(0, **SHAPES, s2=(M, M))
    assert close(evaluate(on_cpu(new), given_values), evaluate(on_cpu(graph), given_values))


def test_numbers_that_keep_a_product_in_range_stay_before_it() -> None:
    fixed = Fixed()
    for number in (1e-25, 1e25, fixed.b["t"]):
        scaled = fixed.call(aten.mul.Tensor, fixed.b["s"], number)
        new = rewritten(fixed.b.returns(fixed.mm(scaled, scaled)), {"s"})
        assert calls(new) == [aten.mul.Tensor, SYM_GEMM]
        fixed.b.graph.erase_node(next(iter(reversed(fixed.b.graph.nodes))))
        if isinstance(number, float):
            s = torch.eye(M) / number
            assert torch.equal(
                evaluate(new, {**values(0, **SHAPES, s2=(M, M)), "s": s})[0], (s * number) @ (s * number)
            )


def test_views_of_values_that_lie_otherwise_now() -> None:
    """Twice G^T plus P lies in columns, as G^T does, and its transpose may be viewed as a vector; with G in place of
    G^T it lies in rows."""
    fixed = Fixed()
    sum_ = fixed.call(aten.add.Tensor, fixed.call(aten.mul.Tensor, fixed.turn(fixed.gram()), 2.0), fixed.b["p"])
    graph = fixed.b.returns(fixed.call(aten.view.default, fixed.turn(sum_), [M * M]))
    given_values = values(0, **SHAPES, s2=(M, M))
    assert close(evaluate(rewritten(graph), given_values), evaluate(graph, given_values))


def test_what_two_values_need_is_not_folded_away() -> None:
    fixed = Fixed()
    gram = fixed.gram()
    graph = fixed.b.returns(fixed.call(aten.mul.Tensor, gram, 0.5), gram)
    new = rewritten(graph)
    assert calls(new) == [SYM_GEMM, aten.mul.Tensor]


def test_sixteen_bits_are_rounded_once() -> None:
    """A symmetric product plus a matrix that is not would be rounded in between."""
    b = Builder(x=empty((M, N), torch.bfloat16), p=empty((M, M), torch.bfloat16))
    turned = b.call("turned", aten.permute.default, b["x"], [1, 0])
    graph = b.returns(b.call("sum", aten.addmm.default, b["p"], b["x"], turned))
    assert calls(rewritten(graph)) == [aten.permute.default, aten.addmm.default]


def test_stacks_of_matrices() -> None:
    b = Builder(x=empty((3, M, N), torch.float64), z=empty((3, 1, 1), torch.float64))
    turned = b.call("turned", aten.transpose.int, b["x"], -1, -2)
    gram = b.call("gram", aten.bmm.default, b["x"], turned)
    scaled = b.call("scaled", aten.mul.Tensor, gram, b["z"])
    square = b.call("square", aten.baddbmm.default, scaled, scaled, scaled, beta=0.5, alpha=2.0)
    graph = b.returns(b.call("new", aten.baddbmm.default, b["x"], square, b["x"], beta=3.0))
    new = rewritten(graph)
    assert calls(new) == [SYM_GEMM, aten.mul.Tensor, SYM_GEMM, GEMM_AXPBY]
    given_values = {k: v for k, v in values(1, x=(3, M, N), z=(3, 1, 1)).items() if k != "t"}
    assert close(evaluate(new, given_values), evaluate(graph, given_values))


def test_results_of_the_rewrite_are_the_outputs_it_had() -> None:
    """An output that is a transpose of a symmetric value is that value."""
    fixed = Fixed()
    gram = fixed.gram()
    new = rewritten(fixed.b.returns(gram, fixed.turn(gram)))
    first, second = outputs(new)
    assert first is second
