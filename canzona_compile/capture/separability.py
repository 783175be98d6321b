"""Check that an optimizer updates its parameters independently of one another. The whole package relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.optim import Optimizer

from canzona_compile.capture.twin import plain_class
from canzona_compile.capture.variant import ParameterSpec, Untraceable, Variant
from canzona_compile.capture.ways import open_oracle
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.fx_utils import outputs, placeholders


def check_separable(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    spec: ParameterSpec,
    name: str,
    state: Mapping[str, Any] | None = None,
) -> bool:
    """Capture the step of two equal parameters and check that no value of one reaches the other.

    Args:
        optimizer: the optimizer.
        group: the parameter group.
        spec: the shape, the dtypes and the device of the parameters.
        name: the name of the parameter, for the error.
        state: an example of their state, if it was made before the first step.

    Returns:
        Whether the step could be captured. If not, only a rehearsal shows whether parameters are independent.

    Raises:
        UnsupportedOptimizer: the parameters depend on one another.
    """
    try:
        oracle = open_oracle(lambda way: way(optimizer, group, spec, count=2, state=state))
    except Untraceable:
        return False
    if any(mixes(variant) for variant in oracle.variants):
        raise coupled(optimizer, name)
    return True


def coupled(optimizer: Optimizer, name: str) -> UnsupportedOptimizer:
    """Make the error for an optimizer that couples parameters."""
    return UnsupportedOptimizer(
        f"{plain_class(optimizer).__name__} couples parameters: the update of one depends on others",
        at=name,
        hint="move the coupling (global norms, shared statistics) out of step(), for example to clip_grad_norm_",
    )


def mixes(variant: Variant) -> bool:
    """Tell whether an output of a variant's graph depends on tensors of two parameters."""
    import networkx as nx  # it has hundreds of modules

    net: nx.DiGraph[Any] = nx.DiGraph()
    for node in variant.graph.nodes:
        net.add_node(node)
        for before in dependencies(node):
            net.add_edge(before, node)
    origin: dict[fx.Node, set[int]] = {}
    sources = zip(placeholders(variant.graph), variant.sources, strict=True)
    for node, source in sources:
        origin[node] = {source[1]} if source[0] in ("param", "grad", "state") else set()
    for node in nx.topological_sort(net):
        for predecessor in net.predecessors(node):
            origin.setdefault(node, set()).update(origin[predecessor])
        origin.setdefault(node, set())
    returned = [n for n in outputs(variant.graph) if isinstance(n, fx.Node)]
    return any(len(origin[n]) > 1 for n in returned)


def dependencies(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a value depends on. Entry i of a `_foreach_` result depends only on entries i."""
    if node.op == "output":
        return []
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and "_foreach_" in str(source.target) and len(node.args) == 2:
        index = node.args[1]
        assert isinstance(index, int)
        found: list[fx.Node] = []
        for argument in [*source.args, *source.kwargs.values()]:
            entries = argument if isinstance(argument, list | tuple) else [argument]
            own = [entries[index]] if len(entries) > 1 else entries
            found += [e for e in own if isinstance(e, fx.Node)]
        return found
    return [] if "_foreach_" in str(node.target) else list(node.all_input_nodes)
