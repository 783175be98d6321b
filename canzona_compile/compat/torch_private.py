"""Every private name of torch that this project uses, and what for.

Torch may rename or remove these in any release. They stand here and nowhere else, which `tests/test_structure.py`
checks; so a release that breaks one of them fails at this import, or in the function that guards it, and is mended
here. Names that only Dynamo has are looked up when they are needed, because Dynamo imports Triton, which takes seconds.

Not here: `torch._foreach_*`, which torch documents, modules called `experimental`, and members of objects, such as an
operator's `_schema` and a storage's `_cdata`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch

# torch.distributed has these, without types.
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, Store, TCPStore

# Makes of a function one that Dynamo leaves alone, with all that it calls. `torch.compiler.disable` does so too, and
# imports Dynamo at once.
from torch._compile import _disable_dynamo as outside_dynamo

# The type of `torch.ops.aten.mm.default`; `torch.ops` has no public name for it.
from torch._ops import OpOverload

# Whether a tensor fills its memory without gaps, in any order of dims.
from torch._prims_common import is_non_overlapping_and_dense_or_false

# Tensors with shapes and without values. Documented, under this path only.
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorModeOfTorch

# Whether FSDP1 has put a parameter into a flat one, or it is one.
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened as is_flattened

# How FSDP2 shards a dim that tensor parallelism has cut before.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# Hooks that run before the step of every optimizer.
from torch.optim.optimizer import _global_optimizer_pre_hooks as HOOKS_OF_ALL

# Nested lists and dicts of tensors.
from torch.utils import _pytree as pytree

# The mode of `torch.set_default_device` and of `with torch.device(...)`.
from torch.utils._device import DeviceContext

# Leaves all dispatch modes for a moment.
from torch.utils._mode_utils import no_dispatch

# Sees every operator. Torch's notes on extending it have it, under this path only.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "HOOKS_OF_ALL",
    "AllreduceOptions",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "PrefixStore",
    "Store",
    "StridedShard",
    "TCPStore",
    "TorchDispatchMode",
    "is_flattened",
    "is_non_overlapping_and_dense_or_false",
    "no_dispatch",
    "outside_dynamo",
    "pytree",
]

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl  # `__torch_function__` of a subclass that wants none
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass  # makes a tensor of a shape that has no memory
# Has the kernel send a signal to this process when its parent dies; without effect elsewhere than on Linux.
signal_when_parent_dies: Any = torch.multiprocessing._prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
DYNAMO_LOGGER = logging.getLogger("torch._logging._internal")  # where Dynamo's messages for users go
FAKE_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")  # errors of operators, which recordings expect


class FakeTensorMode(FakeTensorModeOfTorch):
    """The mode of fake tensors, which deep copies of its tensors share.

    A fake tensor leads to its mode, and torch copies that too. The mode holds weak references of storages, each with a
    handle that its finalizer frees. A copy of one would free it once more, and with it memory that is in use. Code of
    users copies tensors: constructors and steps do, when they are tried on fake ones.
    """

    def __deepcopy__(self, _memo: dict[int, Any]) -> FakeTensorMode:
        return self


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes that are entered, the outermost first."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


def count_function_modes() -> int:
    """How many torch-function modes are entered. `torch.overrides` shows only the innermost one."""
    return torch._C._len_torch_function_stack()


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Inside this context, no torch-function modes of users are entered. That of the default device stays.

    Torch gives its own `torch.overrides` functions for the stack of modes no public names.
    """
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    kept = [mode for mode in modes if isinstance(mode, DeviceContext)]
    for mode in reversed(kept):
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in kept:
            torch._C._pop_torch_function_stack()
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def fp32_precision(backend: str, operation: str) -> str:
    """In which precision a backend ("cuda", "mkldnn", "generic") computes an operation ("matmul", "all") of float32.

    `torch.backends` has most of these, but `torch.backends.mkldnn.fp32_precision` writes the switch of all backends.
    """
    return torch._C._get_fp32_precision_getter(backend, operation)


def set_fp32_precision(backend: str, operation: str, value: str) -> None:
    """Set what `fp32_precision` returns."""
    torch._C._set_fp32_precision_setter(backend, operation, value)


def without_view_records() -> contextlib.AbstractContextManager[Any]:
    """Make a context in which torch keeps no record of which tensors are views of others."""
    guard: Any = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))
    return guard  # type: ignore[no-any-return]


def host_group(store: Any, ranks: Sequence[int], rank: int, timeout: timedelta) -> Any:
    """Make a process group of gloo that torch's lists do not hold. This is a collective of its ranks.

    `dist.new_group(use_local_synchronization=True)` names a group by how many its process has, so ranks that have
    unequally many never meet.

    Args:
        store: holds keys of this group alone.
        ranks: the global ranks.
        rank: this rank, global.
        timeout: how long a collective waits for other ranks.
    """
    from torch._C._distributed_c10d import ProcessGroupGloo  # not in builds without gloo

    made = ProcessGroupGloo(store, list(ranks).index(rank), len(ranks), timeout=timeout)
    made._set_sequence_number_for_group()
    return made


def in_backward() -> bool:
    """Tell whether autograd runs a node in this thread."""
    return torch._C._current_autograd_node() is not None


# -- Dynamo ----------------------------------------------------------------------------------------


def calls_outside_dynamo(kind: type[Any]) -> type[Any]:
    """Make Dynamo leave the public methods of a class alone. This is a decorator of classes."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and not name.startswith("_"):
            setattr(kind, name, outside_dynamo(member))
    return kind


def mark_static(tensor: torch.Tensor) -> None:
    """Let Dynamo take the sizes of a tensor for constants."""
    torch._dynamo.mark_static(tensor)


def set_in_dynamo(name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """Make a context with another setting of Dynamo; of a setting that this torch does not have, nothing."""
    if not hasattr(torch._dynamo.config, name):
        return contextlib.nullcontext()
    context: Any = torch._dynamo.config.patch({name: value})
    return context  # type: ignore[no-any-return]


@contextlib.contextmanager
def at_start_of_traces(function: Callable[[Any], None]) -> Iterator[None]:
    """Inside this context, Dynamo calls a function whenever it begins to trace."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(function)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(function)


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    """Inside this context, Dynamo does not ask which gradients of a step a CUDA graph would copy.

    The answer goes into a hint that nobody sees, and the question imports Inductor, which takes seconds.
    """
    from torch._dynamo.variables import optimizer

    asks = getattr(optimizer, "_is_static_for_cudagraphs", None)
    if asks is None or "torch._inductor.cudagraph_trees" in sys.modules or asks is is_static:
        yield
        return
    setattr(optimizer, "_is_static_for_cudagraphs", is_static)  # noqa: B010  (mypy knows no such name)
    try:
        yield
    finally:
        setattr(optimizer, "_is_static_for_cudagraphs", asks)  # noqa: B010


def is_static(_tensor: torch.Tensor) -> bool:
    """Answer that a CUDA graph would not copy a tensor."""
    return True


def guarded_values(guards: Sequence[Any]) -> list[Any]:
    """For each guard that `guard_filter_fn` is asked about, the value that it is on; None if it has none."""
    return [guard.value if guard.has_value else None for guard in guards]


def is_optimized(module: torch.nn.Module) -> bool:
    """Tell whether a module is what `torch.compile(module)` returned. This does not import Dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


# -- CUDA graphs -----------------------------------------------------------------------------------


def end_allocation_to_pool(device: int, pool: Any) -> bool:
    """End a recording's hold on the allocator, and its use of the pool.

    Args:
        device: the index of the device.
        pool: the handle of the pool.

    Returns:
        Whether there was one.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return False
    torch._C._cuda_releasePool(device, pool)
    return True


def process_groups() -> list[Any]:
    """All process groups that this process is part of."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)
