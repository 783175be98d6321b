"""Find out whether ranks may update their entries of a stack by themselves, and what the optimizer does to those.

Ranks may hold different numbers of entries, and some ranks none. All of them must make the same decision, or one would
wait for fragments that another never sends. So every rank looks at the numbers of entries of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Shard

from canzona_compile.capture.batch_dim import first_dim_is_batch
from canzona_compile.capture.eager_parity import needs_whole_matrix
from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.compat.torch_private import pytree
from canzona_compile.ir.fx_utils import pointwise
from canzona_compile.ir.step import Template
from canzona_compile.tensors import local_part


def cut_along_experts(param: Tensor) -> bool:
    """Tell whether a parameter is a stack of matrices whose first dimension is sharded."""
    return (
        isinstance(param, DTensor)
        and param.ndim > 2
        and any(isinstance(p, Shard) and p.dim == 0 for p in param.placements)
    )


def independent(kind: ParamKind) -> bool:
    """Tell whether every variant of a kind updates each entry of a stack by itself."""
    return all(map(first_dim_is_batch, kind.templates.values()))


def elementwise(kind: ParamKind) -> bool:
    """Tell whether the graphs of a kind do elementwise work only."""
    return not any(template.interpreted or needs_whole_matrix(template) for template in kind.templates.values())


def state_of_entries(state: Mapping[str, Any] | None, entries: int, part: int) -> dict[str, Any] | None:
    """Make an example of the state of some entries of a stack.

    Args:
        state: the portable state of the whole stack; None or empty if it has none.

    Returns:
        The state with tensors of unknown values in the place of those that have one value or more per entry.
    """

    def resized(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:1] == (entries,):
            stride = math.prod(leaf.shape[1:]), *leaf.stride()[1:]
            return local_part(leaf).new_empty_strided((part, *leaf.shape[1:]), stride)
        return leaf

    return pytree.tree_map(resized, dict(state)) if state else None


def same_but_sizes(whole: ParamKind, part: ParamKind) -> bool:
    """Tell whether the optimizer treats a part of a parameter as it treats the whole, apart from sizes."""
    found = [without_sizes(template) for template in part.templates.values()]
    return all(without_sizes(template) in found for template in whole.templates.values())


def without_sizes(template: Template) -> list[Any]:
    """Return the calls of a graph with their numbers; where operators take sizes, integers may be sizes."""

    def numbers(node: fx.Node) -> tuple[type, ...]:
        return (float, int) if pointwise(node) else (float,)

    return [
        (
            str(n.target),
            [a for a in n.args if isinstance(a, numbers(n))],
            [(key, value if isinstance(value, numbers(n)) else None) for key, value in sorted(n.kwargs.items())],
        )
        for n in template.graph.nodes
        if n.op == "call_function"
    ]
