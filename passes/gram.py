"""Rewrite iterations on wide matrices as iterations on their small Gram matrices."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import ClassVar

import torch
from torch import fx

from canzona_compile.analysis.flops import flops_of, symbolic_flops
from canzona_compile.analysis.linear_algebra import any_strides, flipped, root, source
from canzona_compile.analysis.newton_schulz import Polynomial, ProductChain, chains, normalised, normalised_as
from canzona_compile.analysis.roofline import product_seconds
from canzona_compile.ir.fx_utils import cast, casts, drop_dead_code, insert_call, outputs, tensor_value
from canzona_compile.ir.step import Form, Placed, Step, Template
from canzona_compile.machine.hardware import Hardware, hardware_of

aten = torch.ops.aten

RESTART = 2  # steps before the Gram matrix is formed anew, of five


def safe(s: float, *coefficients: tuple[float, float, float]) -> tuple[Polynomial, ...]:
    """The coefficients for singular values up to `s`."""
    return tuple((a / s, b / s**3, c / s**5) for a, b, c in coefficients)


# Five steps X <- (a I + b X X^T + c (X X^T)^2) X, as they are published.
PUBLISHED: dict[str, tuple[Polynomial, ...]] = {
    "Jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    "You": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "Polar Express, safety 1.02, cushion 2": (  # dion, modded-nanogpt
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "Polar Express, safety 1.05": safe(  # arXiv 2505.16932, as Gram Newton-Schulz takes it
        1.05,
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ),
    "CANS": (  # arXiv 2506.10935
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
}


@dataclass(frozen=True, slots=True)
class GramIterations:
    """Rewrite Newton-Schulz on wide matrices X [m, n] as products of m x m matrices; for numerics="fast".

    With R = X X^T a step becomes Q <- (a I + b R + c R^2) Q and R <- (a I + b R + c R^2)^2 R. At the end X <- Q X. That
    takes two products with X in all instead of two per step. Rounding makes eigenvalues of R near zero negative, and
    these grow, so after two steps the graph forms X <- Q X and a new R (Dao AI Lab, "Gram Newton-Schulz"). The products
    add a Q and a R in their epilogue. Only the first Q is formed as a I + b R + c R^2.

    The pass rewrites a chain only if all of this holds:

    * It has five steps with coefficients of `PUBLISHED`, and nothing else reads a value between its steps.
    * The graph divides the matrix by its norm at the start.
    * The products of the rewritten graph take no more time by the machine's rates. They are less work from n = 1.5 m
      on. If the dtype changes, its rate counts as well: float16 is slow on CPUs.

    The pass normalises 16-bit matrices in float32 and iterates them in float16, whose roundoff is an eighth of
    bfloat16's. Other matrices keep their dtype. Results keep theirs.

    The pass runs before owners are chosen. The cost of a cut becomes that of the rewritten graph, so owners,
    micro-groups and reports weigh what will run.

    `tests/passes/test_gram_errors.py` measures errors against float64 on 64 x 192 matrices with four spectra: from 1 to
    1e-10 in logarithmic steps, from 1 to 1e-3, 10 equal singular values beside zeros, and 2 beside a tail of 1e-3.
    Results are at most 0.1 off, relative to the exact result in the Frobenius norm. No singular value exceeds the exact
    largest one by more than 0.06. Newton-Schulz in bfloat16, which this replaces, is 0.06 to 0.58 off. Errors on CUDA
    are not measured yet.
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
    cut = with_late_casts(replace(cut, compute=compute))
    cost = cut.kind.matrices * symbolic_flops(cut.compute, cut.template)
    return replace(cut, cost=cost, flops=flops_of(cost, cut.template.shape))


def with_late_casts(cut: Placed) -> Placed:
    """Let apply do the last cast of a result, where it goes to another dtype of the same size."""
    compute, apply, scatter = copy.deepcopy(cut.compute), copy.deepcopy(cut.apply), list(cut.scatter)
    results = list(outputs(compute))
    placeholders = {str(node.target): node for node in apply.nodes if node.op == "placeholder"}
    for place, (wire, found) in enumerate(zip(cut.scatter, results, strict=False)):
        node, turned = root(found)
        inside, given = source(node), placeholders.get(wire.name)
        if not casts(node) or inside is None or given is None or results.count(found) > 1:
            continue
        value = inside.meta["val"]
        if value.dtype.itemsize != wire.itemsize or not value.dtype.is_floating_point:
            continue
        with compute.inserting_before(found.next):
            results[place] = flipped(compute, inside) if turned else inside
        given.meta["val"] = given.meta["val"].to(value.dtype)
        with apply.inserting_after(given):
            late = cast(apply, given, wire.dtype)
        given.replace_all_uses_with(late, delete_user_cb=lambda user, late=late: user is not late)
        scatter[place] = replace(wire, dtype=value.dtype)
    compute.output_node().args = (tuple(results),)
    return replace(cut, compute=drop_dead_code(compute), apply=apply, scatter=tuple(scatter))


def rewritten(graph: fx.Graph, template: Template, hardware: Hardware) -> fx.Graph:
    """Rewrite every chain of a graph for which the conditions of `GramIterations` hold."""
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
        Whether the graph was changed. It was not if the coefficients are no published ones, or if the graph does not
        divide by the norm.
    """
    value = tensor_value(chain.start)
    steps = next((own for own in PUBLISHED.values() if equal(chain.polynomials, own)), None)
    if value is None or steps is None or not normalised(chain.start):
        return False
    narrow = value.dtype.itemsize == 2
    lies_turned = value.stride()[-1] != 1 == value.stride()[-2]  # as it does where a step transposes what is tall
    with graph.inserting_before(chain.end):
        x = normalised_as(graph, chain.start, torch.float16) if narrow else chain.start
        x = flipped(graph, x) if lies_turned else x
        writer = GramWriter(graph, chain.flipped is not lies_turned)
        x = writer.segment(writer.segment(x, steps[:RESTART]), steps[RESTART:])
        x = cast(graph, flipped(graph, x) if lies_turned else x, value.dtype)
    chain.end.replace_all_uses_with(x)
    drop_dead_code(graph)
    return True


def equal(found: Sequence[Polynomial], steps: Sequence[Polynomial]) -> bool:
    """Whether polynomials are those of published steps, but for the rounding of the algebra that found them."""
    if len(found) != len(steps):
        return False
    pairs = [pair for p, own in zip(found, steps, strict=True) for pair in zip_longest(p, own, fillvalue=0.0)]
    return all(math.isclose(x, y, rel_tol=1e-9) for x, y in pairs)


class GramWriter:
    """Writes iterations on Gram matrices into a graph.

    Args:
        flipped: whether nodes are the transpose [..., n, m] of the wide matrix.
    """

    def __init__(self, graph: fx.Graph, flipped: bool) -> None:
        self.graph, self.flipped = graph, flipped

    def segment(self, x: fx.Node, polynomials: Sequence[Polynomial]) -> fx.Node:
        """Write two or more steps on one Gram matrix.

        Args:
            x: X [..., m, n], or its transpose [..., n, m] if `flipped`.

        Returns:
            Q X, in the shape of `x`.
        """
        r = self.gram(x)
        q: fx.Node | None = None
        for i, (a, b, c) in enumerate(polynomials):
            z = self.sum(r, r, r, b, c)
            q = self.shifted(z, a) if q is None else self.sum(q, z, q, a)
            if i + 1 < len(polynomials):
                rz = self.sum(r, r, z, a)
                r = self.sum(rz, z, rz, a)
        assert q is not None
        return self.product(x, q) if self.flipped else self.product(q, x)  # Q is symmetric

    def gram(self, x: fx.Node) -> fx.Node:
        """Write X X^T [..., m, m]."""
        turned = flipped(self.graph, x)
        return self.product(turned, x) if self.flipped else self.product(x, turned)

    def product(self, left: fx.Node, right: fx.Node) -> fx.Node:
        """Write left @ right."""
        target = aten.mm.default if left.meta["val"].ndim == 2 else aten.bmm.default
        return insert_call(self.graph, target, (left, right))

    def sum(self, added: fx.Node, left: fx.Node, right: fx.Node, beta: float, alpha: float = 1.0) -> fx.Node:
        """Write beta * added + alpha * left @ right."""
        target = aten.addmm.default if added.meta["val"].ndim == 2 else aten.baddbmm.default
        numbers = {name: n for name, n in (("beta", beta), ("alpha", alpha)) if n != 1.0}
        return insert_call(self.graph, target, (added, left, right), numbers)

    def shifted(self, z: fx.Node, shift: float) -> fx.Node:
        """Write Z + shift * I."""
        main = (0, -2, -1)
        diagonal = insert_call(self.graph, aten.diagonal.default, (z, *main))
        moved = insert_call(self.graph, aten.add.Tensor, (diagonal, shift))
        return insert_call(self.graph, aten.diagonal_scatter.default, (z, moved, *main))
