"""Interpreted tasks: the optimizer's own eager step on gathered tensors, as a graph of one opaque node.

Eager steps have three uses. A task that Dynamo cannot trace runs eagerly on every step, and so does one with an
optimizer object of its own. Every task that has state runs its first step eagerly, because then the optimizer's own
code creates the state.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from canzona_compile.ir.program_ops import EagerTask
from canzona_compile.ir.step import Leaf, Role, Template
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.replica.parameter_spec import ParameterSpec


class EagerStep:
    """Target of a graph node: (task, param, grad) -> (new param, *tensor leaves of the new state).

    It runs on the owner rank. Leaves that are not tensors stay in the state of the task on that rank.
    """

    def __init__(self, leaves: tuple[str, ...] = ()) -> None:
        self.leaves = leaves
        self.__name__ = self.__qualname__ = "eager_step"

    def __call__(self, task: EagerTask, param: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """Take the step of one task.

        Args:
            grad: the whole gradient, of the shape of `param`; it is not written.
        """
        new, state = task.context.step(task.name, param, grad)
        found = dict(state_leaves(state)) if self.leaves else {}
        return (new, *(found[name] for name in self.leaves))


def _getitem(graph: fx.Graph, node: fx.Node, index: int, example: Tensor) -> fx.Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = example  # set by hand, because the eager step cannot run on fake tensors
    return item


def interpreted_template(
    name: str, spec: ParameterSpec, reason: str, state: tuple[Leaf, ...] = (), on_owner: bool = False
) -> Template:
    """Make a template whose whole step is one opaque node.

    Args:
        spec: shape and dtypes of the parameter and its gradient.
        state: tensor leaves that the step creates and the graph returns; the others stay in the
            owner's state.
        on_owner: whether a 0-d parameter has an owner, too; otherwise every rank steps it.

    Returns:
        A template with the leaves `task`, `param` and `grad`, which writes `param` and `state`.
    """
    graph = fx.Graph()
    leaves = (
        Leaf(Role.TASK, "task"),
        Leaf(Role.PARAM, "param", spec.shape, spec.dtype),
        Leaf(Role.GRAD, "grad", spec.shape, spec.grad_dtype),
    )
    nodes = [graph.placeholder(leaf.name) for leaf in leaves]
    for node, leaf in zip(nodes[1:], leaves[1:], strict=True):
        node.meta["val"] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    step = graph.call_function(EagerStep(tuple(leaf.name for leaf in state)), tuple(nodes))
    step.meta["on_owner"] = on_owner
    written = (leaves[1], *state)
    results = [
        _getitem(graph, step, i, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
        for i, leaf in enumerate(written)
    ]
    graph.output(tuple(results))
    writes = tuple(leaf.name for leaf in written)
    return Template(name, spec.shape, spec.dtype, leaves, writes, graph, reason, state=state)
