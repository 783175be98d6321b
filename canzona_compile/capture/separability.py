"""Check that an optimizer updates its parameters independently of one another. The whole package relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.capture.dynamo_oracle import Oracle, ParameterSpec, Untraceable, Variant
from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.external_counters import Counts, step_alone
from canzona_compile.capture.randomness import undisturbed
from canzona_compile.capture.twin import make_twin, plain_class
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.ir.fx_utils import outputs, placeholders


def check_separable(optimizer: Optimizer, group: Mapping[str, Any], spec: ParameterSpec, name: str) -> Counts:
    """Capture the step of two equal parameters and check that no value of one reaches the other.

    A step that cannot be traced is run on small matrices instead: two parameters together must give the bits that
    each of them gives alone.

    Args:
        optimizer: the optimizer.
        group: the parameter group.
        spec: the shape, the dtypes and the device of the parameters.
        name: the name of the parameter, for the error.

    Returns:
        What a step with two parameters counts outside of their state. A step with one must count the same.

    Raises:
        UnsupportedOptimizer: the parameters depend on one another.
    """
    try:
        oracle = Oracle(optimizer, group, spec, count=2)
    except Untraceable:
        counts = alone_as_together(optimizer, group, spec)
        if counts is None:
            raise coupled(optimizer, name) from None
        return counts
    if any(mixes(variant) for variant in oracle.variants):
        raise coupled(optimizer, name)
    return oracle.counts


def coupled(optimizer: Optimizer, name: str) -> UnsupportedOptimizer:
    """Make the error for an optimizer that couples parameters."""
    return UnsupportedOptimizer(
        f"{plain_class(optimizer).__name__} couples parameters: the update of one depends on others",
        at=name,
        hint="move the coupling (global norms, shared statistics) out of step(), for example to clip_grad_norm_",
    )


def mixes(variant: Variant) -> bool:
    """Tell whether an output of a variant's graph depends on tensors of two parameters."""
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


def alone_as_together(optimizer: Optimizer, group: Mapping[str, Any], spec: ParameterSpec) -> Counts | None:
    """Run two steps of two small parameters, together and each alone, and compare the bits.

    Returns:
        What the first step counted outside of their state; None if something differs.
    """
    shape = tuple(min(n, 6 + 2 * i) for i, n in enumerate(spec.shape))

    def params() -> list[torch.nn.Parameter]:
        generator = torch.Generator(device="cpu").manual_seed(0)
        made = []
        for scale in (1.0, 100.0):
            param = torch.nn.Parameter((torch.randn(shape, generator=generator) * scale).to(spec.device, spec.dtype))
            param.grad = (torch.randn(shape, generator=generator) * scale).to(param)
            made.append(param)
        return made

    def run(*subsets: list[int]) -> tuple[list[Tensor], list[list[Counts]]]:
        own, counts = params(), []
        for subset in subsets:
            twin = make_twin(optimizer, group, [own[i] for i in subset])
            counts.append([step_alone(twin) for _ in range(2)])
        return [p.detach() for p in own], counts

    with undisturbed(spec.device) as dice:
        try:
            together, (both,) = run([0, 1])
            alone, (one, other) = run([0], [1])
        except CanzonaError:
            raise
        except Exception as error:
            raise UnsupportedOptimizer(
                f"{plain_class(optimizer).__name__}.step fails on parameters that are none of the model's: "
                f"{first_line(error)}{blamed(error)}",
                hint="make the state in step(), not in the constructor",
            ) from error
    if dice.rolled:
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__} draws random numbers in what cannot be traced, so that nothing shows "
            "whether its parameters depend on one another",
            hint="use a variant of it that draws none",
        )
    same = both == one == other and all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    return both[0] if same else None
