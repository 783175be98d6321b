"""Check that no two parameters lie in the same memory, where an update of one would write the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

from canzona_compile.compat.torch_private import is_non_overlapping_and_dense_or_false
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.layout import local_part


def check_disjoint(named: Iterable[tuple[str, int, Tensor]]) -> None:
    """Raise if parameters overlap in memory.

    Args:
        named: the name, the parameter group and the tensor of each parameter.

    Raises:
        UnsupportedOptimizer: two parameters overlap. The plain optimizer updates one after the other, a plan both at
            once.
    """
    found: list[tuple[int, int, str]] = []
    for name, _, param in named:
        own = local_part(param)
        size = own.numel() * own.itemsize
        held = size and own.device.type != "meta" and own.untyped_storage().size()
        if held and is_non_overlapping_and_dense_or_false(own):
            found.append((own.data_ptr(), own.data_ptr() + size, name))
    found.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(found):
        if start < end:
            raise UnsupportedOptimizer(
                f"it shares memory with {first}",
                at=second,
                hint="pass one of the two, or one parameter that holds both",
            )
