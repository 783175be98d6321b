"""Turn Dynamo's graph into a functional ATen graph whose scalars are still symbolic.

AOTAutograd would not do: its tensorify pass turns `add(x, u, alpha=-lr)` back into a graph with lr as a
constant, so that a schedule would recompile every step. `make_fx` of a functionalized run keeps `.item()`
and the scalar arithmetic after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from canzona_compile.compat.torch_private import FakeTensorMode
from canzona_compile.ir.fx_utils import ancestors


def functional(
    gm: fx.GraphModule,
    static: Mapping[str, Tensor],
    inputs: Sequence[Any],
    values: Mapping[int, float],
    bake: Iterable[int] = (),
) -> tuple[fx.Graph, dict[int, float]]:
    """Trace a functional form of Dynamo's `gm`.

    Args:
        gm: Dynamo's graph.
        static: tensors that the graph reads as attributes, by attribute name.
        inputs: one per placeholder: a tensor to imitate, or a number.
        values: the present values of the scalar placeholders (0-d float64 tensors), by position.
        bake: positions of scalars that had to be constants in a similar graph.

    Returns:
        A graph over placeholders [*static, *inputs], whose output is a flat tuple: Dynamo's outputs
        first, then the final value of every placeholder (itself if the graph does not write it). And the
        scalars that had to become constants because an operator's shape rule asks for their value
        (torch.addmm does for beta): the baked values by position.
    """
    baked = {i: values[i] for i in bake if i in values}
    while True:
        try:
            return _trace(gm, static, inputs, baked), baked
        except _NeedsValue as needs:
            fresh = {i: values[i] for i in needs.scalars if i in values and i not in baked}
            if not fresh:
                assert needs.__cause__ is not None
                raise needs.__cause__ from None
            baked |= fresh


class _NeedsValue(Exception):
    """Tracing stopped at an operator that asks for the value of these scalar placeholders."""

    def __init__(self, scalars: set[int]) -> None:
        super().__init__()
        self.scalars = scalars


def _trace(
    gm: fx.GraphModule, static: Mapping[str, Tensor], inputs: Sequence[Any], baked: Mapping[int, float]
) -> fx.Graph:
    names = list(static)
    position = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}

    def scalars_behind(node: fx.Node) -> set[int]:
        """The scalar placeholders, by position, that the non-tensor operands of `node` depend on."""
        numbers = [n for n in node.all_input_nodes if not isinstance(n.meta.get("example_value"), Tensor)]
        return {position[n] for n in ancestors(numbers) if n in position}

    def run(attributes: list[Tensor], arguments: list[Any]) -> tuple[Any, ...]:
        attributes = list(attributes)

        class Inline(fx.Interpreter):
            def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
                return attributes[names.index(target)]

            def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
                if target in ("sub", "sub_") and "alpha" in kwargs:  # whose shape rule asks for alpha's value
                    return super().call_method(f"add{target[3:]}", args, {**kwargs, "alpha": -kwargs["alpha"]})
                return super().call_method(target, args, kwargs)

            def run_node(self, n: fx.Node) -> Any:
                if n.op == "call_method" and n.target == "item":
                    source = n.args[0]
                    if isinstance(source, fx.Node) and position.get(source) in baked:
                        return baked[position[source]]
                try:
                    return super().run_node(n)
                except GuardOnDataDependentSymNode as error:
                    raise _NeedsValue(scalars_behind(n)) from error

        returned = Inline(gm).run(*arguments)
        return (*returned, *attributes, *arguments)

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        sizes, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.no_grad():
        traced = make_fx(functionalize(run, remove="mutations"), tracing_mode="real", _allow_non_fake_inputs=True)(
            [like(t) for t in static.values()], [like(v) for v in inputs]
        )
    return traced.graph
