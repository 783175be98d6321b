"""Put the tasks of one owner that are alike into batches, and let batches run on stacks of matrices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from canzona_compile.analysis.flops import BY_PRODUCTS, addend, factors, flips, turned
from canzona_compile.ir.bit_exactness import batches_equal, position_free
from canzona_compile.ir.fx_utils import pointwise, tensor_value
from canzona_compile.ir.step import Batch, Form, MicroGroup, Placed, Role, Step
from canzona_compile.kernels.batched import gains
from canzona_compile.kernels.ops import GEMM_AXPBY, PAD_CAST, SYM_GEMM
from canzona_compile.lowering.batch_graph import factorization, lift_stacked, product, starts_stack
from canzona_compile.machine.hardware import Machine, hardware_of

aten = torch.ops.aten

# Operators that take dims, and where the dims are among their arguments.
DIMS: dict[Any, slice] = {
    aten.diagonal.default: slice(2, 4),
    aten.diagonal_scatter.default: slice(3, 5),
    aten.slice.Tensor: slice(1, 2),
}


@dataclass(frozen=True, slots=True)
class Batching:
    """Form batches of tasks with equal owner, graph and hyperparameters, and stack the operators of a batch.

    Under exact numerics only matrix products, and the elementwise work and the transposes around them, run on stacks
    [n, ...]. A product of the library qualifies if its batched form is known to give the same bits
    (`canzona_compile.ir.bit_exactness`). Products of our own kernels always qualify. Everything else, such as norms and
    decompositions, loops over the tasks. Nothing is stacked if there is no product to batch.

    Under fast numerics all products qualify, and on CUDA decompositions do too if a stack of them is faster. Measured
    rates decide that (`eigh` and `eigh_batched`). Without such rates the version of torch decides
    (`canzona_compile.kernels.batched`).

    Attributes:
        exact: whether the step uses exact numerics.
    """

    exact: bool = True

    name: ClassVar[str] = "batch"
    requires: ClassVar[Form] = Form.ROUTED
    ensures: ClassVar[Form] = Form.BATCHED

    def __call__(self, step: Step) -> Step:
        placed = tuple(self._stacked(p, step.machine) for p in step.placed)
        by_name = {p.name: p for p in placed}
        micro_groups = tuple(replace(g, batches=batches(step, g, by_name)) for g in step.micro_groups)
        return replace(step, form=Form.BATCHED, placed=placed, micro_groups=micro_groups)

    def _stacked(self, placed: Placed, machine: Machine) -> Placed:
        """A cut with a compute graph for stacks; the cut itself if nothing starts a stack."""

        def own(node: fx.Node) -> bool:
            return stackable(node, machine, self.exact)

        if not stacks(placed, machine, self.exact):
            return placed
        wires = [w.name for w in placed.gather] if placed.kind.sharded else []
        lifted = lift_stacked(placed.compute, wires, numbers(placed), own, foreach=machine.device == "cpu")
        return replace(placed, stacked=lifted)


def stacks(placed: Placed, machine: Machine, exact: bool) -> bool:
    """Whether something in a cut starts a stack of the tasks' matrices."""
    return any(starts_stack(n) and stackable(n, machine, exact) for n in placed.compute.nodes)


def stackable(node: fx.Node, machine: Machine, exact: bool) -> bool:
    """Whether an operator may run on a stack of the tasks' operands."""
    if name := factorization(node):
        return not exact and gains_by_stacking(name, node, machine)
    value = tensor_value(node)
    if value is None:
        return False
    if pair := factors(node):
        left, right = (turned(tuple(f.meta["val"].shape), flip) for f, flip in zip(pair, flips(node), strict=True))
        more = addend(node)
        plain = value.ndim == 2 and (more is None or tuple(more.meta["val"].shape) == tuple(value.shape))
        # Our own products do not promise the library's bits, stacked or not.
        equal = not exact or node.target in (SYM_GEMM, GEMM_AXPBY)
        equal = equal or batches_equal(node.target, (*left, right[-1]), value.dtype, machine)
        return product(node) and plain and equal
    if node.target in DIMS:
        return negative_dims(node)
    if node.target in (aten.permute.default, PAD_CAST):
        return True
    # A 0-d operand never widens the dtype of the result, but a stack [n, 1, 1] of such operands may.
    operands = [v for n in node.all_input_nodes if (v := tensor_value(n)) is not None]
    same = all(v.dtype == value.dtype for v in operands)
    equal = not exact or position_free(node, machine)
    return pointwise(node) and equal and (same or node.target is aten._to_copy.default)


def gains_by_stacking(name: str, node: fx.Node, machine: Machine) -> bool:
    """Whether a decomposition is faster in one call for all tasks.

    Args:
        name: the name of the decomposition in the machine's rates.
        node: the call for one task.
        machine: where it runs. On CPU one call is a loop as well, so nothing is gained.
    """
    operand = tensor_value(node.all_input_nodes[0])
    if machine.device == "cpu" or operand is None:
        return False
    if name in BY_PRODUCTS:
        return True
    rates = dict(hardware_of(machine).factorizations)
    if name in rates and f"{name}_batched" in rates:
        size = operand.shape[-1]
        return rates[f"{name}_batched"].at(size) > rates[name].at(size)
    return gains(name, operand.shape[-2], torch.__version__)


def negative_dims(node: fx.Node) -> bool:
    """Whether the dims of a call count from the end, so that they mean the same for a stack."""
    dims = node.args[DIMS[node.target]]
    return bool(dims) and set(dims) <= {-2, -1}


def numbers(placed: Placed) -> list[str]:
    """The names of the hyperparameters, which are the same for all tasks of a batch."""
    return [leaf.name for leaf in placed.template.inputs if leaf.role is Role.SCALAR]


def batches(step: Step, micro_group: MicroGroup, placed: dict[str, Placed]) -> tuple[Batch, ...]:
    """Divide a micro-group into batches: tasks of one owner rank, one cut and one param group.

    Args:
        step: the step.
        micro_group: one of its micro-groups.
        placed: the cuts by name, with their stacked graphs.
    """
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for task in sorted(map(step.task, micro_group.tasks), key=lambda t: t.index):
        alike[task.owner is not None, task.owner or (), task.placed, task.param_group].append(task.name)
    found = []
    for key in sorted(alike, key=repr):
        first = step.task(alike[key][0])
        stacked = placed[first.placed].stacked is not None and len(alike[key]) > 1
        found.append(Batch(first.placed, first.param_group, first.owner, tuple(alike[key]), stacked))
    return tuple(found)
