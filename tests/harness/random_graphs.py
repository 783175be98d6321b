"""Random small optimizer steps, as templates, for hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from canzona_compile.ir.fx_utils import placeholders
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.step import Leaf, Role, Template
from tests.harness.samples import Builder

aten = torch.ops.aten

POINTWISE = ("add", "scaled", "sub", "mul", "times", "shifted", "lerp", "neg", "abs", "maximum", "power", "rounded")
HOLISTIC = ("product", "normalised")
NUMBERS = {"lr": 0.125, "beta": 0.75}


class Writer:
    """Writes a graph over matrices of one shape, operation by operation."""

    def __init__(self, b: Builder, values: list[fx.Node]) -> None:
        self.b, self.values = b, values

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.b.call(f"n{len(self.b.graph.nodes)}", target, *args, **kwargs)

    def write(self, op: str, x: fx.Node, y: fx.Node) -> fx.Node:
        lr, beta = self.b["lr"], self.b["beta"]
        match op:
            case "add":
                return self.call(aten.add.Tensor, x, y)
            case "scaled":
                return self.call(aten.add.Tensor, x, y, alpha=lr)
            case "sub":
                return self.call(aten.sub.Tensor, x, y)
            case "mul":
                return self.call(aten.mul.Tensor, x, y)
            case "times":
                return self.call(aten.mul.Tensor, x, beta)
            case "shifted":
                return self.call(aten.add.Tensor, x, 0.5)
            case "lerp":
                return self.call(aten.lerp.Scalar, x, y, beta)
            case "neg":
                return self.call(aten.neg.default, x)
            case "abs":
                return self.call(aten.abs.default, x)
            case "maximum":
                return self.call(aten.maximum.default, x, y)
            case "power":  # its bits depend on the position
                return self.call(aten.pow.Tensor_Scalar, x, 1.7)
            case "rounded":
                low = self.call(aten._to_copy.default, x, dtype=torch.bfloat16)
                return self.call(aten._to_copy.default, low, dtype=torch.float32)
            case "product":
                flipped = self.call(aten.permute.default, y, [1, 0])
                return self.call(aten.mm.default, self.call(aten.mm.default, x, flipped), x)
            case "normalised":
                total = self.call(aten.sum.default, self.call(aten.mul.Tensor, y, y))
                return self.call(aten.mul.Tensor, x, total)
        raise AssertionError(op)


@st.composite
def templates(draw: st.DrawFn, ops: tuple[str, ...] = POINTWISE + HOLISTIC) -> Template:
    """A step with one state leaf; the new parameter and the new state depend on what was drawn."""
    shape: Shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    leaves = (
        *(Leaf(role, role.value, shape, torch.float32) for role in (Role.PARAM, Role.GRAD)),
        Leaf(Role.STATE, "buffer", shape, torch.float32),
        *(Leaf(Role.SCALAR, name) for name in NUMBERS),
    )
    matrix = torch.empty(shape, device="meta")
    b = Builder(param=matrix, grad=matrix, buffer=matrix, **NUMBERS)
    writer = Writer(b, [b["param"], b["grad"], b["buffer"]])
    for _ in range(draw(st.integers(1, 7))):
        x, y = (draw(st.sampled_from(writer.values)) for _ in range(2))
        writer.values.append(writer.write(draw(st.sampled_from(ops)), x, y))
    written = [n for n in writer.values if n.op != "placeholder"]
    state = draw(st.sampled_from(written))
    param = writer.write("scaled", b["param"], written[-1])
    graph = b.returns(param, state)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return Template("random", shape, torch.float32, leaves, ("param", "buffer"), graph)


def values_for(template: Template, seed: int) -> dict[str, Any]:
    """Values for the leaves of a template."""
    random = torch.Generator().manual_seed(seed)
    matrices = [leaf for leaf in template.inputs if leaf.dtype is not None]
    return NUMBERS | {leaf.name: torch.randn(leaf.shape, generator=random) for leaf in matrices}


def evaluate(graph: fx.Graph, values: dict[str, Any]) -> tuple[Any, ...]:
    """Run a graph on values by placeholder name."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    found = module(*(values[str(n.target)] for n in placeholders(graph)))
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaNs in the same places."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and matches(a, b)


def matches(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
