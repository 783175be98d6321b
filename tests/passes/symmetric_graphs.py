"""Random matrix algebra as graphs, and their values in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from canzona_compile.ir.options import Numerics, Options
from canzona_compile.ir.pipeline import PassHistory, run
from canzona_compile.machine.hardware import Machine
from canzona_compile.passes import lowering_passes, planning_passes
from tests.harness.samples import Builder, empty, grid_of, muon_step

aten = torch.ops.aten
GPU = Machine("cuda", "nccl", 1)
M, N = 4, 6
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def matrices(dtype: torch.dtype = torch.float64, **shapes: tuple[int, ...]) -> Builder:
    return Builder(**{name: empty(shape, dtype) for name, shape in shapes.items()}, t=0.25)


def values(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=random, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    return {**{k: v + v.mT if k.startswith("s") else v for k, v in made.items()}, "t": 0.25}


def evaluated(graph: fx.Graph, given: dict[str, Any]) -> dict[fx.Node, Any]:
    """Every node's value."""
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = given[str(node.target)]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = node.target(*args, **kwargs)
    return found


@cache
def muon_history(numerics: Numerics, *shapes: tuple[int, int], **options: Any) -> PassHistory:
    """Captured Muon on two shards of a GPU machine, through all passes."""
    given = Options(numerics=numerics, **options)
    step = replace(muon_step(grid_of(1, 2), *shapes), machine=GPU)
    return run(step, [*planning_passes(given), *lowering_passes(given)])[1]


def calls(graph: fx.Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


def in_float64(graph: fx.Graph) -> fx.Graph:
    """The same graph whose casts all go to float64: what it computes but for rounding."""
    wide = fx.Graph()
    wide.output(wide.graph_copy(graph, {}))
    for node in wide.nodes:
        if "dtype" in node.kwargs:
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
    return wide


def close(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float = 1e-10) -> bool:
    assert len(found) == len(expected) > 0
    return all(
        float((a - b).abs().max()) <= bound * max(1.0, float(b.abs().max()))
        for a, b in zip(found, expected, strict=True)
    )


# -- random graphs -----------------------------------------------------------------------------


def shapes_of(m: int, n: int) -> dict[str, tuple[int, ...]]:
    return {"x": (m, n), "y": (m, n), "s": (m, m), "p": (m, m), "v": (m,), "z": ()}


SHAPES = shapes_of(M, N)
OPS = ("gram", "gram", "tall", "mm", "mm", "mixed", "added", "added", "add", "add", "sub", "scale", "number")
OPS += (
    "divide",
    "lerp",
    "turn",
    "neg",
    "times",
    "shift",
    "eye",
    "row",
    "tril",
    "columns",
    "congruent",
    "abs",
    "single",
    "integers",
    "chosen",
    "twice",
    "pair",
)


class Algebra:
    """Draws operations on squares [m, m] and on wide matrices [m, n]; values stay of the size of 1."""

    def __init__(self, draw: st.DrawFn, m: int, n: int, dtype: torch.dtype) -> None:
        self.draw, self.m, self.dtype = draw, m, dtype
        self.b = matrices(dtype, **shapes_of(m, n))
        self.wide, self.square = [self.b["x"], self.b["y"]], [self.b["s"], self.b["p"]]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.b.call(f"n{len(self.b.graph.nodes)}", target, *args, **kwargs)

    def turn(self, node: fx.Node) -> fx.Node:
        return self.call(aten.permute.default, node, [1, 0])

    def pick(self, among: Sequence[fx.Node]) -> fx.Node:
        """Rather a late one."""
        return among[-1 - self.draw(st.integers(0, min(3, len(among) - 1)))]

    def small(self, node: fx.Node) -> fx.Node:
        return self.call(aten.mul.Tensor, node, 0.25)

    def write(self) -> None:
        op = self.draw(st.sampled_from(OPS))
        a, b, x = self.pick(self.square), self.pick(self.square), self.pick(self.wide)
        y = x if self.draw(st.booleans()) else self.pick(self.wide)
        number: Any = self.draw(st.sampled_from([0.5, -0.25, 1.0, self.b["t"]]))
        made = self.made(op, a, b, x, y, number)
        if made is not None:
            self.square.append(made)

    def made(self, op: str, a: fx.Node, b: fx.Node, x: fx.Node, y: fx.Node, number: Any) -> fx.Node | None:
        match op:
            case "neg" | "abs":
                return self.call(getattr(aten, op).default, a)
            case "sub" | "times":
                return self.call({"sub": aten.sub.Tensor, "times": aten.mul.Tensor}[op], a, b)
            case "gram":
                return self.small(self.call(aten.mm.default, x, self.turn(y)))
            case "tall":  # [n, n] is not followed, only its symmetry matters
                inner = self.call(aten.mm.default, self.turn(x), y)
                self.wide.append(self.small(self.call(aten.mm.default, x, inner)))
                return None
            case "mm":
                return self.small(self.call(aten.mm.default, a, b))
            case "mixed":
                self.wide.append(self.call(aten.addmm.default, x, a, x, beta=number, alpha=0.125))
                return None
            case "added":
                left, right = (x, self.turn(y)) if self.draw(st.booleans()) else (a, b)
                return self.call(aten.addmm.default, self.pick(self.square), left, right, beta=number, alpha=0.125)
            case "add":
                return self.call(aten.add.Tensor, a, b, alpha=number)
            case "scale":
                return self.call(aten.mul.Tensor, a, number)
            case "number":
                return self.call(aten.add.Tensor, a, 0.5)
            case "divide":
                return self.call(aten.div.Tensor, a, -2.0)
            case "lerp":
                return self.call(aten.lerp.Scalar, a, b, number)
            case "turn":
                return self.turn(a)
            case "single":
                return self.call(aten.mul.Tensor, a, self.b["z"])
            case "shift":
                diagonal = self.call(aten.diagonal.default, a, 0, -2, -1)
                moved = self.call(aten.add.Tensor, diagonal, number)
                return self.call(aten.diagonal_scatter.default, a, moved, 0, -2, -1)
            case "eye":
                eye = self.call(aten.eye.default, self.m, dtype=self.dtype, device=torch.device("meta"))
                return self.call(aten.add.Tensor, a, eye, alpha=number)
            case "integers":
                whole = self.call(aten._to_copy.default, self.call(aten.mul.Tensor, a, 4.0), dtype=torch.int32)
                return self.call(aten._to_copy.default, whole, dtype=self.dtype)
            case "chosen":
                return self.call(aten.where.self, self.call(aten.gt.Scalar, b, 0.0), a, self.b["s"])
            case "twice":
                return self.call(aten.add.Tensor, a, a, alpha=number)
            case "pair":
                return self.call(aten.add.Tensor, a, self.turn(a), alpha=number)
            case "row":
                return self.call(aten.mul.Tensor, a, self.b["v"])
            case "tril":
                return self.call(aten.tril.default, a)
            case "columns":
                scaled = self.call(aten.mul.Tensor, a, self.b["v"])
                return self.small(self.call(aten.mm.default, scaled, self.turn(a if number == 0.5 else b)))
            case "congruent":
                inner = self.call(aten.mm.default, a, b)
                return self.small(self.call(aten.mm.default, inner, self.turn(a)))
        raise AssertionError(op)


@st.composite
def algebra(draw: st.DrawFn, m: int = M, n: int = N, dtype: torch.dtype = torch.float64) -> fx.Graph:
    writer = Algebra(draw, m, n, dtype)
    for _ in range(draw(st.integers(2, 9))):
        writer.write()
    results = [n for n in (*writer.square[2:], *writer.wide[2:]) if draw(st.booleans()) or not n.users]
    return writer.b.returns(*(results or writer.square[-1:]))


def on_cpu(graph: fx.Graph) -> fx.Graph:
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    return graph
