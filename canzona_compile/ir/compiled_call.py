"""Calls of functions that users compiled, such as `@torch.compile` makes, as nodes of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from canzona_compile.compat.matmul_precision import matmul_precision
from canzona_compile.compat.torch_private import FakeTensor, pytree


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """Target of a graph node: a function that `torch.compile` returned, called as the optimizer's step calls it.

    What compiled code computes rounds in a way of its own, which no graph of operators has. So this stays one node:
    no pass looks inside, cuts it, or makes one call of several.

    The node takes the leaves of all arguments, one by one, and writes to none of them. It returns the new values of the
    tensors that the function writes, and then the tensors that the function returns.

    Args:
        tensors: by leaf, which of the distinct tensors among the arguments it is; None for other leaves.
        body: the operators that the function calls as written, with a placeholder for each distinct tensor. It tells
            analyses what there is to do, and is never run.
        precision: the float32 matmul precision that the step sets for the call; empty if it sets none.
    """

    function: Callable[..., Any]
    name: str
    form: pytree.TreeSpec
    tensors: tuple[int | None, ...]
    written: tuple[int, ...]
    parameters: frozenset[int]
    integers: frozenset[int]
    results: tuple[int, ...]
    body: fx.Graph
    precision: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", self.name)  # FX writes and prints it
        object.__setattr__(self, "__qualname__", self.name)

    def __repr__(self) -> str:  # the same on all ranks
        return self.name

    def __call__(self, *leaves: Any) -> tuple[Tensor, ...]:
        """Call the function; on tensors without values, as it is written."""
        own: dict[int, Tensor] = {}
        values = []
        for i, (which, leaf) in enumerate(zip(self.tensors, leaves, strict=True)):
            if which is not None and which not in own:
                own[which] = self._given(which, leaf)
            values.append(int(leaf) if i in self.integers else leaf if which is None else own[which])
        args, kwargs = pytree.tree_unflatten(values, self.form)
        with torch.no_grad(), matmul_precision(self.precision), without_values(own.values()):
            returned = self.function(*args, **kwargs)
        found = [value for value in pytree.tree_leaves(returned) if isinstance(value, Tensor)]
        return (*(own[i].detach() for i in self.written), *(kept(found[i]) for i in self.results))

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the distinct tensors among the arguments of a node that calls this, in order."""
        found = {which: leaf for which, leaf in zip(self.tensors, node.args, strict=True) if which is not None}
        return [leaf for _, leaf in sorted(found.items()) if isinstance(leaf, fx.Node)]

    def _given(self, which: int, value: Tensor) -> Tensor:
        """Return what the function gets for one of its tensors."""
        value = value.clone() if which in self.written else value
        return torch.nn.Parameter(value) if which in self.parameters else value


def kept(value: Tensor) -> Tensor:
    """Return a result that stays as it is. Code that replays a CUDA graph uses the memory of its results again."""
    return value.clone() if value.is_cuda and not isinstance(value, FakeTensor) else value


@contextlib.contextmanager
def without_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside this context, if some tensors have no values, compiled functions run as written: machine code cannot."""
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def opened(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes of a graph, and behind each call of a compiled function the operators that this calls."""
    for node in graph.nodes:
        yield node
        if isinstance(node.target, CompiledCall):
            yield from (inner for inner in node.target.body.nodes if inner.op == "call_function")


def num_compiled_calls(graph: fx.Graph) -> int:
    """Count the calls of compiled functions in a graph."""
    return sum(isinstance(node.target, CompiledCall) for node in graph.nodes)
