"""Newton-Schulz and its kin as graphs, in several spellings, with published coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from canzona_compile.ir.step import Template
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.passes.gram import rewritten
from tests.harness.samples import Builder, empty

aten = torch.ops.aten

JORDAN = [(3.4445, -4.7750, 2.0315)] * 5
YOU = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
POLAR_EXPRESS = [  # arXiv 2505.16932, safety 1.02, cushion 2
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
CANS = [  # arXiv 2506.10935
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]
CUBIC = [(3.3656576, -3.3420992), (2.5744352, -1.4957376), (2.5368962, -1.4312570), (2.4418906, -1.2764040)]
TEN = [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2
QUINTICS = {"Jordan": JORDAN, "You": YOU, "Polar Express": POLAR_EXPRESS, "CANS": CANS}

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
        if len(p) == 2:
            return self.add(self.times(x, p[0]), self.times(self.applied(gram, x), p[1]))
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
