"""Which operators may run on a stack of matrices, of one task or of several, and which cuts gain from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from canzona_compile.analysis.flops import addend, factors, flips, turned
from canzona_compile.ir.bit_exactness import batches_equal, position_free, reductions_equal
from canzona_compile.ir.fx_utils import pointwise, tensor_value
from canzona_compile.ir.step import Placed
from canzona_compile.kernels.ops import DIV_CAST, GEMM_AXPBY, PAD_CAST, SYM_GEMM
from canzona_compile.lowering.batch_graph import REDUCTIONS, factorization, product, starts_stack
from canzona_compile.machine.hardware import Machine, hardware_of

aten = torch.ops.aten

# Operators that take dims, and where the dims are among their arguments.
DIMS: dict[Any, slice] = {
    aten.diagonal.default: slice(2, 4),
    aten.diagonal_scatter.default: slice(3, 5),
    aten.slice.Tensor: slice(1, 2),
}


def stacks(placed: Placed, machine: Machine, exact: bool) -> bool:
    """Whether something in a cut starts a stack of matrices."""
    on_stack = runs_on_stack(placed, machine, exact)
    return any(starts_stack(n) and on_stack(n) for n in placed.compute.nodes)


def runs_on_stack(placed: Placed, machine: Machine, exact: bool) -> Callable[[fx.Node], bool]:
    """What tells which operators of a cut may run on a stack of the operands of its matrices.

    On CUDA the optimizer's own step of a stack is a batched product, whose rounding is as good as another's.
    """
    library = bool(placed.kind.lead) and machine.device == "cuda"
    return partial(stackable, machine=machine, exact=exact, library=library)


def stackable(node: fx.Node, machine: Machine, exact: bool, library: bool = False) -> bool:
    """Whether an operator may run on a stack of the operands of matrices.

    Args:
        library: whether all products of the library may under exact numerics as well.
    """
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
        equal = not exact or library or node.target in (SYM_GEMM, GEMM_AXPBY)
        equal = equal or batches_equal(node.target, (*left, right[-1]), value.dtype, machine)
        return product(node) and plain and equal
    if node.target in DIMS:
        return negative_dims(node)
    if node.target in (aten.permute.default, PAD_CAST, DIV_CAST):
        return True
    if node.target in REDUCTIONS:
        operand = tensor_value(node.all_input_nodes[0])
        return (not exact or reductions_equal(machine)) and operand is not None and operand.ndim > 0
    # A 0-d operand never widens the dtype of the result, but a stack [n, 1, 1] of such operands may.
    operands = [v for n in node.all_input_nodes if (v := tensor_value(n)) is not None]
    same = all(v.dtype == value.dtype for v in operands)
    equal = not exact or position_free(node, machine)
    return pointwise(node) and equal and (same or node.target is aten._to_copy.default)


def gains_by_stacking(name: str, node: fx.Node, machine: Machine) -> bool:
    """Whether a decomposition is faster in one call for all tasks."""
    operand = tensor_value(node.all_input_nodes[0])
    if machine.device == "cpu" or operand is None:
        return False
    rates = dict(hardware_of(machine).factorizations)
    if name in rates and f"{name}_batched" in rates:
        size = operand.shape[-1]
        return rates[f"{name}_batched"].at(size) > rates[name].at(size)
    return gains(name, operand.shape[-2], torch.__version__)


def negative_dims(node: fx.Node) -> bool:
    """Whether the dims of a call count from the end, so that they mean the same for a stack."""
    dims = node.args[DIMS[node.target]]
    return bool(dims) and set(dims) <= {-2, -1}


# -- decompositions that gain by a batched call on CUDA, by version of torch --------------------------

ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class StackedCase:
    """A case in which one call for a stack is faster than a call per matrix.

    Attributes:
        torch: the first and the last minor version of torch 2 for which the case holds.
        largest: the number of rows up to which the case holds.
    """

    operator: str
    torch: tuple[int, int]
    largest: int
    why: str


# Above `largest` torch loops over a stack; a stacked call would only add the copies into the stack and out of it.
TABLE = (
    StackedCase("eigh", (0, 11), 32, "syevjBatched up to 32 rows, then a loop of syevd: pytorch#62003, pytorch#175585"),
    StackedCase(
        "eigh", (12, ANY), ANY, "a batched call for every size: pytorch#175403; 500 x 100^2: 914 -> 8.4 ms, #174674"
    ),
    StackedCase(
        "qr", (0, ANY), 256, "geqrfBatched up to 256 rows (pytorch#56253); orgqr loops in C++ (pytorch#143281)"
    ),
    StackedCase("cholesky_ex", (0, ANY), ANY, "potrfBatched: pytorch#57788; 7x at 16 x 512^2, ml-explore/mlx#4208"),
    StackedCase("solve_triangular", (0, ANY), ANY, "torch takes trsmBatched where it is the faster one: pytorch#53147"),
)


def gains(operator: str, rows: int, version: str) -> bool:
    """Tell whether a batched call is expected to be faster on CUDA."""
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise ValueError(f"{version!r} is not a version of torch, such as 2.11.0+cu128")
    minor = int(parts[1]) if parts[0] == "2" else ANY
    return any(
        line.operator == operator and line.torch[0] <= minor <= line.torch[1] and rows <= line.largest for line in TABLE
    )
