"""Rewrite iterations on wide matrices as iterations on their small Gram matrices."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import fx

from canzona_compile.analysis.flops import flops_of, symbolic_flops
from canzona_compile.analysis.gram_restarts import plan_restarts
from canzona_compile.analysis.linear_algebra import any_strides, flipped
from canzona_compile.analysis.newton_schulz import Polynomial, ProductChain, chains
from canzona_compile.analysis.norm_bounds import Wide, norm_bound
from canzona_compile.analysis.roofline import product_seconds
from canzona_compile.ir.fx_utils import drop_dead_code, insert_call, tensor_value
from canzona_compile.ir.step import Form, Placed, Step, Template
from canzona_compile.machine.hardware import Hardware, hardware_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class GramIterations:
    """Rewrite chains of X <- (a I + p(X X^T)) X, with X [m, n], as products of m x m matrices; for numerics="fast".

    With R = X X^T a step becomes Q <- (a I + p(R)) Q and R <- (a I + p(R))^2 R. At the end X <- Q X. That takes two
    products with X in all instead of two per step (Dao AI Lab, "Gram Newton-Schulz"). Rounding makes restarts
    necessary: after some steps the graph forms X <- Q X and a new R. `canzona_compile.analysis.gram_restarts` finds
    them from the coefficients; five steps of the usual quintics restart after step 2. The products add a Q and a R in
    their epilogue. Only the first Q is formed as a I + p(R).

    The pass rewrites a chain only if all of this holds:

    * Its coefficients are numbers in the graph, and nothing else reads a value between its steps.
    * The graph bounds the norm of X at the start, because it divides by a norm. So nothing can overflow.
    * The products of the rewritten graph take no more time by the machine's rates. For quintics they are less work from
      n = 1.5 m on. If the dtype changes, its rate counts as well: float16 is slow on CPUs.

    The pass normalises 16-bit matrices in float32 and iterates them in float16, whose roundoff is an eighth of
    bfloat16's. Other matrices keep their dtype. Results keep theirs.

    The pass runs before owners are chosen. The cost of a cut becomes that of the rewritten graph, so owners,
    micro-groups and reports weigh what will run.

    `tests/passes/test_gram_errors.py` measures errors against float64 on 64 x 192 matrices with four spectra: from 1 to
    1e-10 in logarithmic steps, from 1 to 1e-3, 10 equal singular values beside zeros, and 2 beside a tail of 1e-3. Five
    steps of Jordan's, You's, Polar Express and CANS coefficients are at most 0.1 off, relative to the exact result in
    the Frobenius norm. No singular value exceeds the exact largest one by more than 0.06. Newton-Schulz in bfloat16,
    which this replaces, is 0.06 to 0.58 off. The tests run on CPU, with the products of the library and with the
    references of `sym_gemm`, so the pass rewrites on CPU as well. Errors on CUDA are not measured yet.
    """

    name: ClassVar[str] = "gram"
    requires: ClassVar[Form] = Form.PLACED
    ensures: ClassVar[Form] = Form.PLACED

    def __call__(self, step: Step) -> Step:
        hardware = hardware_of(step.machine)
        return replace(step, placed=tuple(rewritten_cut(cut, hardware) for cut in step.placed))


def rewritten_cut(cut: Placed, hardware: Hardware) -> Placed:
    """Rewrite the compute graph of a cut, and count its FLOPs again. The optimizer's own eager step does not change."""
    if cut.template.interpreted:
        return cut
    compute = rewritten(cut.compute, cut.template, hardware)
    if compute is cut.compute:
        return cut
    cost = symbolic_flops(compute, cut.template)
    return replace(cut, compute=compute, cost=cost, flops=flops_of(cost, cut.template.shape))


def rewritten(graph: fx.Graph, template: Template, hardware: Hardware) -> fx.Graph:
    """Rewrite every chain of a graph for which the conditions of `GramIterations` hold.

    Returns:
        A new graph; the graph itself if no chain was rewritten.
    """
    for start in [chain.start.name for chain in chains(graph)]:
        attempt = copy.deepcopy(graph)
        chain = next((c for c in chains(attempt) if c.start.name == start), None)
        if chain is None or not rewrite(attempt, chain):
            continue
        if product_seconds(attempt, template, hardware) <= product_seconds(graph, template, hardware):
            any_strides(attempt)
            attempt.lint()
            graph = attempt
    return graph


def rewrite(graph: fx.Graph, chain: ProductChain) -> bool:
    """Rewrite one chain in place.

    Returns:
        Whether the graph was changed. It was not if nothing bounds the norm at the start, or if no restarts keep the
        effects of rounding small.
    """
    value, bound = tensor_value(chain.start), norm_bound(chain.start)
    if value is None or bound is None:
        return False
    narrow = value.dtype.itemsize == 2
    dtype = torch.float16 if narrow else value.dtype
    limits = torch.finfo(dtype)
    polynomials = tuple(map(trimmed, chain.polynomials))
    restarts = plan_restarts(polynomials, limits.eps / 2, bound, limits.max)
    if restarts is None:
        return False
    with graph.inserting_before(chain.end):
        x = cast(graph, Wide(graph).of(chain.start), dtype) if narrow else chain.start
        writer = GramWriter(graph, chain.flipped)
        for first, last in pairwise((0, *restarts, len(polynomials))):
            x = writer.segment(x, polynomials[first:last])
        x = cast(graph, x, value.dtype)
    chain.end.replace_all_uses_with(x)
    drop_dead_code(graph)
    return True


def trimmed(polynomial: Polynomial) -> Polynomial:
    """The coefficients up to the highest one that is not zero."""
    degree = max(i for i, c in enumerate(polynomial) if c)
    return polynomial[: degree + 1]


def cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a cast if the node has another dtype."""
    if node.meta["val"].dtype == dtype:
        return node
    return insert_call(graph, aten._to_copy.default, (node,), {"dtype": dtype})


class GramWriter:
    """Writes iterations on Gram matrices into a graph.

    Args:
        graph: gets the new nodes, at its insert point.
        flipped: whether nodes are the transpose [..., n, m] of the wide matrix.
    """

    def __init__(self, graph: fx.Graph, flipped: bool) -> None:
        self.graph, self.flipped = graph, flipped

    def segment(self, x: fx.Node, polynomials: Sequence[Polynomial]) -> fx.Node:
        """Write two or more steps on one Gram matrix.

        Args:
            x: X [..., m, n], or its transpose [..., n, m] if `flipped`.
            polynomials: the coefficients of each step.

        Returns:
            Q X, in the shape of `x`.
        """
        r = self.gram(x)
        q: fx.Node | None = None
        for i, polynomial in enumerate(polynomials):
            a, last = polynomial[0], i + 1 == len(polynomials)
            scale, z = self.without_constant(r, polynomial)
            q = self.shifted(z, scale, a) if q is None else self.sum(q, z, q, a, scale)
            if not last:
                rz = self.sum(r, r, z, a, scale)
                r = self.sum(rz, z, rz, a, scale)
        assert q is not None
        return self.product(*self.applied(q, x))

    def without_constant(self, r: fx.Node, polynomial: Polynomial) -> tuple[float, fx.Node]:
        """Write p(R) - p(0) by Horner's rule, and return it as a number and a matrix, which are to be multiplied."""
        *lower, highest = polynomial[1:]
        if not lower:
            return highest, r
        z = self.sum(r, r, r, lower.pop(), highest)
        for coefficient in reversed(lower):
            z = self.sum(r, r, z, coefficient, 1.0)
        return 1.0, z

    def gram(self, x: fx.Node) -> fx.Node:
        """Write X X^T [..., m, m]."""
        turned = flipped(self.graph, x)
        return self.product(turned, x) if self.flipped else self.product(x, turned)

    def applied(self, q: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The factors of Q X, or of X^T Q if `flipped`, in order. Q is symmetric."""
        return (x, q) if self.flipped else (q, x)

    def product(self, left: fx.Node, right: fx.Node) -> fx.Node:
        """Write left @ right."""
        target = aten.mm.default if left.meta["val"].ndim == 2 else aten.bmm.default
        return insert_call(self.graph, target, (left, right))

    def sum(self, added: fx.Node, left: fx.Node, right: fx.Node, beta: float, alpha: float) -> fx.Node:
        """Write beta * added + alpha * left @ right."""
        target = aten.addmm.default if added.meta["val"].ndim == 2 else aten.baddbmm.default
        numbers = {name: n for name, n in (("beta", beta), ("alpha", alpha)) if n != 1.0}
        return insert_call(self.graph, target, (added, left, right), numbers)

    def shifted(self, z: fx.Node, scale: float, shift: float) -> fx.Node:
        """Write scale * Z + shift * I."""
        if scale != 1.0:
            z = insert_call(self.graph, aten.mul.Tensor, (z, scale))
        main = (0, -2, -1)
        diagonal = insert_call(self.graph, aten.diagonal.default, (z, *main))
        moved = insert_call(self.graph, aten.add.Tensor, (diagonal, shift))
        return insert_call(self.graph, aten.diagonal_scatter.default, (z, moved, *main))
