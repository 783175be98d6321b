"""Interpreted tasks: the optimizer's own eager step on gathered tensors, as a graph of one opaque node.

Two uses. What Dynamo cannot trace runs so on every step. And the first step of every task does,
because it gives each optimizer's lazy state initialisation for free.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.capture.dynamo_oracle import ParameterSpec
from canzona_compile.capture.leaves import state_leaves
from canzona_compile.capture.randomness import watched
from canzona_compile.capture.twin import make_twin, step_plainly
from canzona_compile.ir.step import Leaf, Role, Template


class EagerTasks(Protocol):
    """Where an eager step finds the optimizer, the group and the state of a task."""

    def eager_optimizer(self) -> Optimizer: ...
    def group_of(self, task: str) -> dict[str, Any]: ...
    def state_of(self, task: str) -> dict[str, Any]: ...
    def drew_random_numbers(self, task: str) -> None: ...


class EagerStep:
    """Graph node of a task: (name, param, grad) -> (new param, *tensor leaves of the new state).

    Runs on the owner. Non-tensor leaves stay in the state of the task, which is the optimizer's own
    on this rank.
    """

    __name__ = __qualname__ = "eager_step"

    def __init__(self, leaves: tuple[str, ...] = ()) -> None:
        self.leaves = leaves
        self.tasks: EagerTasks | None = None

    def __call__(self, task: str, param: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        assert self.tasks is not None
        own = torch.nn.Parameter(param.clone())
        if grad.dtype != param.dtype:
            own.grad_dtype = grad.dtype
        own.grad = grad.clone()
        state = self.tasks.state_of(task)
        twin = make_twin(self.tasks.eager_optimizer(), self.tasks.group_of(task), [own], {own: state})
        with watched(param.device) as dice:
            step_plainly(twin)
        if dice.rolled:
            self.tasks.drew_random_numbers(task)
        state.update(twin.state[own])
        found = dict(state_leaves(twin.state[own]))
        return (own.detach(), *(found[name] for name in self.leaves))


def _getitem(graph: fx.Graph, node: fx.Node, index: int, example: Tensor) -> fx.Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = example  # by hand: the eager step cannot run on fake tensors
    return item


def interpreted_template(name: str, spec: ParameterSpec, reason: str, state: tuple[Leaf, ...] = ()) -> Template:
    """A template whose whole step is one opaque node.

    Args:
        state: tensor leaves that the step creates and the graph returns; the others stay in the
            owner's state.
    """
    graph = fx.Graph()
    leaves = (
        Leaf(Role.TASK, "task"),
        Leaf(Role.PARAM, "param", spec.shape, spec.dtype),
        Leaf(Role.GRAD, "grad", spec.shape, spec.grad_dtype),
    )
    nodes = [graph.placeholder(leaf.name) for leaf in leaves]
    for node, leaf in zip(nodes, leaves, strict=True):
        if leaf.dtype is not None:
            node.meta["val"] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    step = graph.call_function(EagerStep(tuple(leaf.name for leaf in state)), tuple(nodes))
    written = (leaves[1], *state)
    results = [
        _getitem(graph, step, i, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
        for i, leaf in enumerate(written)
    ]
    graph.output(tuple(results))
    writes = tuple(leaf.name for leaf in written)
    return Template(name, spec.shape, spec.dtype, leaves, writes, graph, reason, state=state)


def eager_steps(template: Template) -> list[EagerStep]:
    return [n.target for n in template.graph.nodes if isinstance(n.target, EagerStep)]


__all__ = ["EagerStep", "EagerTasks", "eager_steps", "interpreted_template"]
