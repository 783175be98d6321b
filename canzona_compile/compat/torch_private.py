"""Every private name of torch that this project uses, and what for.

Torch may rename or remove these in any release. They stand here and nowhere else, which `tests/test_structure.py`
checks; so a release that breaks one of them fails at this import, or in the function that guards it, and is mended
here. Names that only Dynamo has are looked up when they are needed, because Dynamo imports Triton, which takes seconds.

Not here: `torch._foreach_*`, which torch documents, modules called `experimental`, and members of objects, such as an
operator's `_schema` and a storage's `_cdata`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

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

# The key-value store of the default process group.
from torch.distributed.distributed_c10d import _get_default_store as default_store

# The name of a new process group, see `group_named`.
from torch.distributed.distributed_c10d import _process_group_name as name_of_group

# The process group of a name, which functional collectives are given.
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

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
    "default_store",
    "group_of_name",
    "is_flattened",
    "is_non_overlapping_and_dense_or_false",
    "no_dispatch",
    "outside_dynamo",
    "pytree",
]

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl  # `__torch_function__` of a subclass that wants none
group_of_name: Any = _resolve_process_group
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
    """Make a process group of gloo that torch's lists do not hold. This is a collective of its ranks."""
    from torch._C._distributed_c10d import ProcessGroupGloo  # not in builds without gloo

    made = ProcessGroupGloo(store, list(ranks).index(rank), len(ranks), timeout=timeout)
    made._set_sequence_number_for_group()
    return made


@contextlib.contextmanager
def group_named(name: str, members: Sequence[int]) -> Iterator[None]:
    """Inside this context, a process group that only its members make has this name.

    Torch names such a group by how many groups a process has (before 2.15) or has made, so ranks that have unequally
    many would never meet. Torch 2.15 would count this one, and the names of the user's later groups would differ.
    """
    owner: Any = dist.distributed_c10d

    def chosen(ranks: Sequence[int], use_hashed_name: bool) -> Any:
        own = use_hashed_name and list(ranks) == list(members)
        return name if own else name_of_group(ranks, use_hashed_name=use_hashed_name)

    owner._process_group_name = chosen
    try:
        yield
    finally:
        owner._process_group_name = name_of_group


def node_of_backward() -> Any:
    """The node that autograd runs in this thread; None if it runs none."""
    return torch._C._current_autograd_node()


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


def set_in_dynamo(**settings: Any) -> contextlib.AbstractContextManager[Any]:
    """Make a context with other settings of Dynamo, as far as this torch has them."""
    known = {name: value for name, value in settings.items() if hasattr(torch._dynamo.config, name)}
    context: Any = torch._dynamo.config.patch(known) if known else contextlib.nullcontext()
    return context  # type: ignore[no-any-return]


def lock_of_dynamo() -> contextlib.AbstractContextManager[bool]:
    """Get the lock that every trace of Dynamo holds, and `torch._dynamo.reset`. A thread may take it again."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


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
def without_extras() -> Iterator[None]:
    """Inside this context, Dynamo leaves out what recordings have no use for.

    Its messages, its logs and its machine code need that, and for them it imports Inductor, AOTAutograd and networkx,
    which takes longer than all recordings of a small model. Functions that a torch does not have are passed over.
    """
    found = [(owner, name, vars(owner)[name], instead) for owner, name, instead in extras()]
    changed = [one for one in found if one[2] is not one[3]]  # an outer context has replaced the others
    for owner, name, _, instead in changed:
        setattr(owner, name, instead)
    try:
        yield
    finally:
        for owner, name, before, _ in changed:
            setattr(owner, name, before)


@functools.cache
def extras() -> list[tuple[Any, str, Any]]:
    """The functions of torch that `without_extras` replaces: the owner of each, its name, and what comes instead."""
    import torch._dynamo as dynamo
    from torch._dynamo import eval_frame, graph_region_tracker, guards, output_graph
    from torch._dynamo.variables import higher_order_ops, optimizer
    from torch.fx.experimental import symbolic_shapes

    local_map = getattr(higher_order_ops, "LocalMapWrappedHigherOrderVariable", None)
    func_map, export = "torch.distributed.tensor.experimental._func_map", "torch.export._trace"
    found: list[tuple[Any, str, Callable[[Any], Any]]] = [
        # Whether a CUDA graph would copy a gradient: for a hint that nobody sees.
        (optimizer, "_is_static_for_cudagraphs", lambda _: lambda _tensor: True),
        # Wraps backends to write programs that reproduce their errors. It looks up those that are named by a text.
        (eval_frame, "get_compiler_fn", lambda real: lambda fn: fn if callable(fn) else real(fn)),
        # Whether the backend is "eager", in what it says where it is called inside of `torch.func`.
        (dynamo, "lookup_backend", lambda real: lambda name: None if name == "eager" else real(name)),
        # Hashes nodes, to find equal parts of a graph. It does so only if a setting says so.
        (graph_region_tracker, "InputPickler", lambda real: lambda: MadeLater(real)),
        # How long guards take, for a log. It empties the caches of the processor to find out.
        (guards, "profile_guard_manager", lambda _: lambda *_arguments: 0.0),
        # Files of torch that messages leave out. A function of this one would hold its own frame, and all around it.
        (symbolic_shapes, "uninteresting_files", lambda _: lambda: frozenset({symbolic_shapes.__file__})),
        (output_graph, "uninteresting_files", lambda _: frozenset),
        # What Dynamo does beside a graph, for exports.
        (
            output_graph.OutputGraph,
            "get_replayed_side_effect_source_refs",
            lambda real: lambda graph, **options: real(graph, **options) if export in sys.modules else [],
        ),
        # Whether a function is `local_map`. Nobody has it whose module is not loaded.
        (local_map, "should_wrap_in_hop", lambda real: staticmethod(lambda v: func_map in sys.modules and real(v))),
    ]
    there = [(owner, name, make) for owner, name, make in found if name in getattr(owner, "__dict__", ())]
    return [(owner, name, make(getattr(owner, name))) for owner, name, make in there]


class MadeLater:
    """Stands for an object that is made when it is first asked for an attribute."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, False

    def __getattr__(self, name: str) -> Any:
        if not self._made:
            self._object, self._made = self._make(), True
        return getattr(self._object, name)


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
