"""Notice that a step asks how gradients, or where parameters, lie in memory. Their owner gets copies of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

QUESTIONS = ("is_contiguous", "stride")
ADDRESS = "data_ptr"  # of parameters; DTensors have none
TORCH = os.path.dirname(torch.__file__) + os.sep


class LayoutQuestions(TorchFunctionMode):
    """Inside this mode, code that is none of torch's is watched while it asks how gradients lie in memory.

    Args:
        asked: gets the names of the methods that are called, among `QUESTIONS` and `ADDRESS`.
    """

    def __init__(self, grads: Iterable[Tensor], params: Iterable[Tensor], asked: set[str]) -> None:
        super().__init__()
        self._memory = {storage_of(grad) for grad in grads} - {0}
        self._params = {storage_of(param) for param in params} - {0}
        self._asked = asked

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        known = name in QUESTIONS or name == ADDRESS
        if known and args and isinstance(args[0], Tensor) and args[0].layout is torch.strided:
            code = sys._getframe(1).f_code
            memory = self._params if name == ADDRESS else self._memory
            ours = not code.co_filename.startswith(TORCH) and storage_of(args[0]) in memory
            # Code that names DTensors has something else for them than their address.
            if ours and not (name == ADDRESS and DTensor.__name__ in code.co_names):
                self._asked.add(name)
        return func(*args, **(kwargs or {}))


def storage_of(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none that can be reached, as inside of `torch.vmap`."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def lies_otherwise(grad: Tensor, asked: Iterable[str]) -> bool:
    """Tell whether code that asks these questions hears something else of a contiguous copy of a gradient."""
    if not grad.is_contiguous():
        return True
    return "stride" in asked and grad.stride() != torch.empty(grad.shape, device="meta").stride()
