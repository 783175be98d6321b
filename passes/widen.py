"""Multiply bfloat16 matrices in float32, on CPUs that have no instructions for them; for numerics="fast"."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from canzona_compile.analysis.flops import LIBRARY_PRODUCTS
from canzona_compile.ir.fx_utils import cast, drop_dead_code, insert_call, tensor_value
from canzona_compile.ir.step import Form, Placed, Step


@dataclass(frozen=True, slots=True)
class Widening:
    """Where the processor has AVX2 and no AVX-512, products of bfloat16 matrices are products in float32, then rounded.

    torch computes them there element by element: Newton-Schulz on the matrices of `examples/train_lm.py` takes many
    times as long. Sums have float32 in both, in another order, and results keep their dtype, so the algorithm stays.
    Each rank looks at its own processor: only the owner's graph matters, and where every rank computes a matrix, they
    should be alike.
    """

    name: ClassVar[str] = "widen"
    requires: ClassVar[Form] = Form.ROUTED
    ensures: ClassVar[Form] = Form.ROUTED

    def __call__(self, step: Step) -> Step:
        if step.machine.device != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX2":
            return step
        return replace(step, placed=tuple(map(widened_cut, step.placed)))


def widened_cut(cut: Placed) -> Placed:
    """Widen the products of a cut. The optimizer's own eager step does not change."""
    return cut if cut.template.interpreted else replace(cut, compute=widened(cut.compute))


def widened(graph: fx.Graph) -> fx.Graph:
    """Return the graph with its bfloat16 products in float32; the same graph if there are none."""
    if not any(narrow(node) for node in graph.nodes):
        return graph
    graph = copy.deepcopy(graph)
    made: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if narrow(node)]:
        with graph.inserting_before(node):
            for operand in node.all_input_nodes:
                if operand not in made:
                    made[operand] = cast(graph, operand, torch.float32)
            assert callable(node.target)
            args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
            product = insert_call(graph, node.target, args, kwargs, name=node.name)
            node.replace_all_uses_with(cast(graph, product, torch.bfloat16))
    drop_dead_code(graph)
    graph.lint()
    return graph


def narrow(node: fx.Node) -> bool:
    """Is this a product of bfloat16 matrices?"""
    value = tensor_value(node) if node.target in LIBRARY_PRODUCTS else None
    return value is not None and value.dtype == torch.bfloat16
