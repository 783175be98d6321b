"""Interpreted tasks: the optimizer's own eager step on gathered tensors, as a graph of one opaque node.

Eager steps have three uses. A task that Dynamo cannot trace runs eagerly on every step. So does a resident, by an
optimizer object of its own. And every task that has state runs its first step eagerly, because then the optimizer's own
code creates the state.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from canzona_compile.ir.program_ops import EagerTask
from canzona_compile.ir.step import Leaf, Role, Template
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.replica.parameter_spec import ParameterSpec


class EagerStep:
    """Target of a graph node: (task, param, grad) -> (new param, *tensor leaves of the new state).

    It runs on the owner rank. Leaves that are not tensors stay in the state of the task on that rank.

    Args:
        leaves: the names of the tensor leaves of the state that the graph returns.
        name: of the node.
        has_effect: whether the graph has it also where nothing reads what it returns.
    """

    def __init__(self, leaves: tuple[str, ...] = (), name: str = "eager_step", has_effect: bool = False) -> None:
        self.leaves, self.has_effect = leaves, has_effect
        self.__name__ = self.__qualname__ = name

    def __call__(self, task: EagerTask, param: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """Take the step of one task.

        Args:
            task: its name, and what steps it.
            param: the whole parameter; it is not written.
            grad: the whole gradient, of the shape of `param`; it is not written.

        Returns:
            The new parameter, then the leaves of the new state.
        """
        new, state = task.context.step(task.name, param, grad)
        found = dict(state_leaves(state)) if self.leaves else {}
        return (new, *(found[name] for name in self.leaves))


class BringStep:
    """Target of a graph node: (task, param, grad or nothing) -> nothing. The owner keeps them until all step."""

    __name__ = __qualname__ = "bring"
    has_effect = True

    def __call__(self, task: EagerTask, param: Tensor, grad: Tensor | None = None) -> None:
        """Keep copies of the parameter and its gradient, if it has one; the arguments are those of `EagerStep`."""
        task.context.bring(task.name, param, grad)


class TakeStep:
    """Target of a graph node: task -> new param, once the owner has stepped all parameters."""

    __name__ = __qualname__ = "take"
    has_effect = True  # so that it runs once, on the owner, also for a scalar

    def __call__(self, task: EagerTask) -> Tensor:
        """Return the new value of the task's parameter."""
        return task.context.take(task.name)


class Part(enum.Enum):
    """The templates of a parameter that steps with all others. BRING or STILL runs first, and TAKE after it."""

    WHOLE = "whole"  # stands for both in plans and reports
    BRING = "bring"
    STILL = "still"  # in the place of BRING for a parameter that has no gradient
    TAKE = "take"


def coupled_templates(name: str, spec: ParameterSpec, reason: str) -> Mapping[Any, Template]:
    """Make the templates of a parameter whose owner steps all parameters at once.

    Args:
        name: of the templates.
        spec: shape and dtypes of the parameter and its gradient.
        reason: why the step is not compiled, for reports.

    Returns:
        WHOLE as `interpreted_template` makes it; BRING with the leaves `task`, `param` and `grad`, which writes
        nothing; STILL, which is BRING without `grad`; TAKE with the leaves `task` and `param`, which writes `param`.
    """
    task = Leaf(Role.TASK, "task")
    param = Leaf(Role.PARAM, "param", spec.shape, spec.dtype)
    grad = Leaf(Role.GRAD, "grad", spec.shape, spec.grad_dtype)
    leaves = {Part.BRING: (task, param, grad), Part.STILL: (task, param), Part.TAKE: (task, param)}
    # It never runs: plans of whole-model steps have it, also for a scalar, in place of the two parts.
    whole = interpreted_template(name, spec, reason, target=EagerStep(has_effect=True))
    found = {Part.WHOLE: replace(whole, family=name, coupled=True)}
    for part, inputs in leaves.items():
        graph = fx.Graph()
        nodes = [placeholder(graph, leaf) for leaf in inputs]
        if part is not Part.TAKE:
            graph.call_function(BringStep(), tuple(nodes))
            graph.output(())
        else:
            new = graph.call_function(TakeStep(), (nodes[0],))
            new.meta["val"] = torch.empty(param.shape, dtype=param.dtype, device="meta")
            graph.output((new,))
        writes = ("param",) if part is Part.TAKE else ()
        own = Template(f"{name}_{part.value}", spec.shape, spec.dtype, inputs, writes, graph, reason)
        found[part] = replace(own, family=name, coupled=True)
    return found


def placeholder(graph: fx.Graph, leaf: Leaf) -> fx.Node:
    """Add the placeholder of a leaf to a graph."""
    node = graph.placeholder(leaf.name)
    if leaf.dtype is not None:
        node.meta["val"] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return node


def _getitem(graph: fx.Graph, node: fx.Node, index: int, example: Tensor) -> fx.Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = example  # set by hand, because the eager step cannot run on fake tensors
    return item


def interpreted_template(
    name: str, spec: ParameterSpec, reason: str, state: tuple[Leaf, ...] = (), target: Any = None
) -> Template:
    """Make a template whose whole step is one opaque node.

    Args:
        name: of the template.
        spec: shape and dtypes of the parameter and its gradient.
        reason: why the step is not compiled, for reports.
        state: tensor leaves that the step creates and the graph returns; the others stay in the
            owner's state.
        target: what takes the step; None for an `EagerStep`.

    Returns:
        A template with the leaves `task`, `param` and `grad`, which writes `param` and `state`.
    """
    graph = fx.Graph()
    leaves = (
        Leaf(Role.TASK, "task"),
        Leaf(Role.PARAM, "param", spec.shape, spec.dtype),
        Leaf(Role.GRAD, "grad", spec.shape, spec.grad_dtype),
    )
    nodes = [placeholder(graph, leaf) for leaf in leaves]
    step = graph.call_function(target or EagerStep(tuple(leaf.name for leaf in state)), tuple(nodes))
    written = (leaves[1], *state)
    results = [
        _getitem(graph, step, i, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
        for i, leaf in enumerate(written)
    ]
    graph.output(tuple(results))
    writes = tuple(leaf.name for leaf in written)
    return Template(name, spec.shape, spec.dtype, leaves, writes, graph, reason, state=state)
