"""The memory of gradients that an optimizer got, to see whether one was written over another that it still holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import InvalidGradient, some
from canzona_compile.replica.memory import memory_of


class GradientAliases:
    """Notes the memory of gradients by parameter, as far as it is not freed since. It outlives plans."""

    def __init__(self) -> None:
        self._memory = WeakTensorKeyDictionary()

    def note(self, param: Tensor, tensors: Any) -> None:
        """Note the memory of a gradient, or of all tensors in a state, which may be one."""
        known = {memory for memory in self._memory.get(param, ()) if not memory.expired()}
        self._memory[param] = known | memory_of(*pytree.tree_leaves(tensors))

    def check(self, params: Mapping[str, Tensor], places: Iterable[str]) -> None:
        """Raise if a gradient lies in memory that was noted, which the optimizer holds.

        Args:
            params: the parameters of this step, by name.
            places: where the optimizer holds gradients.

        Raises:
            InvalidGradient: the plain optimizer would find this gradient there. A plan keeps a copy of the earlier one.
        """
        for name, param in params.items() if len(self._memory) else ():
            if memory_of(param.grad) & self._memory.get(param, set()):
                raise InvalidGradient(
                    f"it was written over an earlier gradient, which the optimizer holds in {some(places)}",
                    at=name,
                    hint="call zero_grad(set_to_none=True) after every step, or let the optimizer keep a clone",
                )
