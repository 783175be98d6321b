"""Newton-Schulz and its kin as graphs, in several spellings, with published coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from canzona_compile.ir.step import Template
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.passes.gram import PUBLISHED, rewritten
from tests.harness.samples import Builder, empty

aten = torch.ops.aten

JORDAN, YOU = PUBLISHED["Jordan"], PUBLISHED["You"]

# -- writing iterations ----------------------------------------------------------------------------

SPELLINGS = ("fused", "sums", "horner", "scaled twice")


class Iteration:
    """Writes x <- p(x x^T) x, of matrices [m, n] or, `tall`, of their transposes [n, m] by products from the right."""

    def __init__(self, m: int, n: int, dtype: torch.dtype = torch.float64, tall: bool = False, stack: int = 0) -> None:
        self.tall, self.stack = tall, stack
        shape = (n, m) if tall else (m, n)
        self.b = Builder(x=empty((stack, *shape) if stack else shape, dtype), c=0.5)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.b.call(f"n{len(self.b.graph.nodes)}", target, *args, **kwargs)

    def mm(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.bmm.default if self.stack else aten.mm.default, a, b)

    def fused(self, c: fx.Node, a: fx.Node, b: fx.Node, **numbers: Any) -> fx.Node:
        return self.call(aten.baddbmm.default if self.stack else aten.addmm.default, c, a, b, **numbers)

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, a, b)

    def times(self, a: fx.Node, number: Any) -> fx.Node:
        return self.call(aten.mul.Tensor, a, number)

    def turned(self, x: fx.Node) -> fx.Node:
        return self.call(aten.transpose.int, x, -2, -1)

    def normalised(self, x: fx.Node) -> fx.Node:
        dims = {"dim": [-2, -1], "keepdim": True} if self.stack else {}
        norm = self.call(aten.linalg_vector_norm.default, x, 2, *dims.values())
        return self.call(aten.div.Tensor, x, self.call(aten.clamp.default, norm, 1e-7))

    def gram(self, x: fx.Node) -> fx.Node:
        return self.mm(self.turned(x), x) if self.tall else self.mm(x, self.turned(x))

    def applied(self, p: fx.Node, x: fx.Node) -> fx.Node:
        return self.mm(x, p) if self.tall else self.mm(p, x)

    def step(self, x: fx.Node, p: Sequence[Any], spelling: str) -> fx.Node:
        gram = self.gram(x)
        a, b, c = p
        match spelling:
            case "fused":
                z = self.fused(gram, gram, gram, beta=b, alpha=c)
                left, right = (x, z) if self.tall else (z, x)
                return self.fused(x, left, right, beta=a)
            case "sums":
                z = self.add(self.times(gram, b), self.mm(self.times(gram, c), gram))
                return self.add(self.times(x, a), self.applied(z, x))
            case "horner":  # a x + G (b x + c G x)
                inner = self.add(self.times(x, b), self.times(self.applied(gram, x), c))
                return self.add(self.applied(gram, inner), self.times(x, a))
            case "scaled twice":
                z = self.call(aten.sub.Tensor, self.times(self.mm(gram, gram), 2 * c), self.times(gram, -2 * b))
                return self.call(aten.add.Tensor, self.times(x, a), self.applied(z, x), alpha=0.5)
        raise AssertionError(spelling)

    def iterated(self, polynomials: Sequence[Sequence[Any]], spelling: str = "fused") -> fx.Graph:
        x = self.normalised(self.b["x"])
        for p in polynomials:
            x = self.step(x, p, spelling)
        return self.b.returns(x)


def template_of(graph: fx.Graph) -> Template:
    x = next(n for n in graph.nodes if n.target == "x").meta["val"]
    return Template("t", tuple(x.shape), x.dtype, (), (), graph)


def rewrite(graph: fx.Graph) -> fx.Graph:
    return rewritten(graph, template_of(graph), named_hardware("h100"))


def changed(graph: fx.Graph) -> bool:
    return rewrite(graph) is not graph


def products(graph: fx.Graph) -> list[tuple[int, ...]]:
    names = ("mm", "addmm", "bmm", "baddbmm", "sym_gemm")
    calls = (n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload))
    return [tuple(n.meta["val"].shape) for n in calls if n.target.overloadpacket.__name__ in names]
