"""Find out whether the first dimension of a stack is a batch dimension: entry e of a result depends only on entries e.

If it is, experts on different ranks are independent matrices, and nothing needs to be communicated. The class of the
optimizer may say so by `matrix_dims`, which is tried on a small stack. Otherwise a proof follows the dimension through
the graph with a few rules. It fails at an operator that has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.compat.interrupts import uninterrupted
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.fx_utils import outputs, placeholders, pointwise, tensor_value
from canzona_compile.ir.step import Template
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.randomness import undisturbed
from canzona_compile.replica.twin import as_written, make_twin, step_plainly

aten = torch.ops.aten

REDUCTIONS = frozenset(
    {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default}
)
# These keep the elements in their order. `@` on stacks is captured as expand, view, bmm and _unsafe_view.
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
# Of these every entry is equal, so ranks with other numbers of entries make the same.
UNIFORM = frozenset({aten.full.default, aten.zeros.default, aten.ones.default})

TRIED = 24  # rows and columns, at most, of the matrices on which `matrix_dims` is tried


def num_batch_dims(optimizer: Optimizer, group: Mapping[str, Any], ndim: int) -> int:
    """How many dims of a parameter count matrices that the optimizer steps one by one, as its class or group says.

    Nothing is said for a subclass that adds code to the class that says it.
    """
    kinds = plain_class(optimizer).__mro__
    says = next((i for i, kind in enumerate(kinds) if "matrix_dims" in vars(kind)), 0)
    if any(callable(own) for kind in kinds[:says] for name, own in vars(kind).items() if name != "__init__"):
        return 0
    own = vars(optimizer).get("matrix_dims", vars(kinds[says]).get("matrix_dims"))
    dims = group.get("matrix_dims", own)
    return max(0, ndim - dims) if own is not None and isinstance(dims, int) and dims > 0 else 0


@uninterrupted
def check_matrix_dims(optimizer: Optimizer, group: Mapping[str, Any], spec: ParameterSpec) -> frozenset[str]:
    """Raise unless a small stack steps like its matrices alone, twice.

    Args:
        spec: of one matrix of the stack.

    Returns:
        The leaves of the state that have a value per matrix.
    """
    small = replace(spec, shape=tuple(min(TRIED, n) for n in spec.shape))
    whole = replace(small, shape=(2, *small.shape))
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(whole.shape, generator=random, device="cpu").to(spec.device) for _ in range(3)]

    def after(own: ParameterSpec, at: slice | int) -> dict[str, Any]:
        param = own.parameter(lambda dtype: values[0][at].to(dtype, copy=True))
        twin = make_twin(optimizer, group, [param])
        for grad in values[1:]:
            param.grad = grad[at].to(own.grad_dtype, copy=True)
            step_plainly(twin)
        return {**dict(state_leaves(twin.state[param])), "param": param.detach()}

    with undisturbed(optimizer), as_written():
        together, alone = after(whole, slice(None)), [after(small, at) for at in range(2)]
    name, of_each = plain_class(optimizer).__name__, set[str]()
    for leaf, value in together.items():
        own = [found.get(leaf) for found in alone]
        if isinstance(value, Tensor) and isinstance(own[0], Tensor) and value.shape == (len(own), *own[0].shape):
            of_each.add(leaf)
            same = all(map(equal, own, value))
        else:
            same = all(equal(one, value) for one in own)
        if not same:
            raise UnsupportedOptimizer(
                f"{name}.matrix_dims says that each matrix of a stack steps as if it were alone, but {leaf} differs",
                hint=f"let {name}.step treat each matrix by itself, with state [..., M, N], or remove matrix_dims",
            )
    return frozenset(of_each)


def equal(one: Any, other: Any) -> bool:
    """Whether two leaves of states have equal values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def first_dim_is_batch(template: Template) -> bool:
    """Tell whether entry e of every leaf that a template writes depends only on entries e of its inputs."""
    if template.interpreted:
        return False
    batch: dict[fx.Node, int | None] = {}  # the batch dim of every value, None if it has none
    for node, leaf in zip(placeholders(template.graph), template.inputs, strict=True):
        batch[node] = 0 if leaf.shape and leaf.shape[0] == template.shape[0] else None
        if leaf.shape and batch[node] is None:
            return False
    for node in template.graph.nodes:
        if node.op != "call_function":
            continue
        carriers = [n for n in node.all_input_nodes if batch.get(n) is not None]
        if not carriers:
            batch[node] = None
            continue
        place = follow(node, batch)
        if place is None:
            return False
        batch[node] = place
    return all(isinstance(n, fx.Node) and batch[n] == 0 for n in outputs(template.graph))


def follow(node: fx.Node, batch: dict[fx.Node, int | None]) -> int | None:
    """Find the batch dimension of a node's result.

    Args:
        batch: the batch dimension of every earlier value; None for a value that has none.

    Returns:
        The index of the dimension; None if the node mixes entries or has no rule.
    """
    value = tensor_value(node)
    if value is None:
        return None
    target = node.target
    operands = [n for n in node.all_input_nodes if tensor_value(n) is not None]
    dims = [(batch[n], tensor_value(n).ndim) for n in operands]  # type: ignore[union-attr]
    if pointwise(node):
        from_right = {place - ndim for place, ndim in dims if place is not None}
        if len(from_right) != 1:
            return None
        at = from_right.pop()
        same = all(place is not None or equal_along(n, at) for n, (place, _) in zip(operands, dims, strict=True))
        return value.ndim + at if same else None
    place, ndim = dims[0]
    if target in (aten.bmm.default, aten.baddbmm.default):
        return 0 if all(p == 0 for p, _ in dims) else None
    if place is None:
        return None
    if target is aten.permute.default:
        return [d % ndim for d in node.args[1]].index(place)  # type: ignore[union-attr,operator]
    if target is aten.transpose.int:
        a, b = (int(d) % ndim for d in node.args[1:3])  # type: ignore[arg-type]
        return {a: b, b: a}.get(place, place)
    if target is aten.unsqueeze.default:
        at = int(node.args[1]) % (ndim + 1)  # type: ignore[arg-type]
        return place + (at <= place)
    before = tensor_value(operands[0])
    assert before is not None
    if target is aten.expand.default:
        there = place + value.ndim - ndim
        return there if value.shape[there] == before.shape[place] else None
    if target in VIEWS:
        return viewed(tuple(before.shape), place, tuple(value.shape))
    if target in REDUCTIONS:
        return reduced(node, place, ndim)
    return None


def equal_along(node: fx.Node, dim: int) -> bool:
    """Tell whether all entries of a value without batch dimension are equal along a dim, counted from the right."""
    value = tensor_value(node)
    assert value is not None
    return value.ndim < -dim or value.shape[dim] == 1 or node.target in UNIFORM


def viewed(before: Sequence[int], place: int, after: Sequence[int]) -> int | None:
    """Find the batch dimension of a view.

    Args:
        before: the shape of its operand.
        after: the shape of the view.

    Returns:
        The index of the dimension with as many entries, and as many elements between one and the next; None if the
        view has no such dimension, as it splits the batch dimension or merges it with another.
    """
    if 0 in before:
        return None
    for i, size in enumerate(after):
        if size == before[place] and math.prod(after[:i]) == math.prod(before[:place]):
            return i
    return None


def reduced(node: fx.Node, place: int, ndim: int) -> int | None:
    """Find the batch dimension of the result of a reduction.

    Returns:
        The index of the dimension in the result; None if the reduction covers it.
    """
    arguments: dict[str, Any] = dict(node.kwargs)
    assert isinstance(node.target, OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    arguments.update(zip(names, node.args, strict=False))
    given = arguments.get("dim")
    if not given:
        return None
    over = {int(d) % ndim for d in (given if isinstance(given, list | tuple) else [given])}
    if place in over:
        return None
    return place if arguments.get("keepdim") else place - sum(d < place for d in over)
