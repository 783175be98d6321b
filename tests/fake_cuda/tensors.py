"""Tensors of the stand-in, and what operators do with them.

A `DeviceTensor` is a tensor on the CPU that says it lies on a GPU. Its memory is there from the beginning, so that
addresses, strides and views are those of any tensor; what it holds comes later, when the scheduler runs the operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda.device import FakeDevice, current_device
from tests.fake_cuda.memory import Block
from tests.fake_cuda.scheduler import DeviceError

READS = ("_local_scalar_dense", "equal", "is_nonzero")  # give the host a value
WAITS = ("linalg_eigh", "_linalg_eigh", "linalg_qr", "linalg_cholesky", "cholesky", "geqrf", "_linalg_svd", "nonzero")
BARE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # launch nothing
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "sym_gemm", "gemm_axpby")


class DeviceTensor(Tensor):
    """A tensor whose values come later.

    Attributes:
        inner: the same memory, as a plain tensor.
        block: the memory that it lies in.
    """

    inner: Tensor
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        device = current_device()
        device.finish(device.current)
        with plainly():
            return self.inner.tolist()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", current_device().index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(current_device(), func, args, kwargs or {})


def on_device(inner: Tensor, block: Block) -> DeviceTensor:
    """A tensor of the device in this memory."""
    made = torch.Tensor._make_subclass(DeviceTensor, inner)
    made.inner, made.block = inner, block
    return made


def adopted(tensor: Tensor) -> DeviceTensor:
    """A tensor of the device in the memory of a tensor on the CPU, which outlives the device's work."""
    with plainly():
        return on_device(tensor.detach(), Block(tensor.detach(), None))


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Inside this context, operators are those of the CPU."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


DUMMIES: dict[Any, Any] = {}


def outcome(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator on other values of the same shapes: what matters is what it looks like."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    described = [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), repr(x)) for x in leaves]
    key = (func, str(tree), repr(described))
    if key not in DUMMIES:

        def dummy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
            if made.ndim >= 2 and made.shape[-1] == made.shape[-2]:
                made.diagonal(dim1=-2, dim2=-1).fill_(1)
            return made

        own_args, own_kwargs = pytree.tree_unflatten([dummy(x) for x in leaves], tree)
        DUMMIES[key] = func(*own_args, **own_kwargs)
    return DUMMIES[key]


def operate(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Do what an operator does on a device: at once what concerns shapes only, all else on the current stream."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    given = pytree.tree_leaves((args, kwargs))
    ours = [x for x in given if isinstance(x, DeviceTensor)]
    hosts = [x for x in given if isinstance(x, Tensor) and not isinstance(x, DeviceTensor)]
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if isinstance(kwargs.get("device"), torch.device):
        kwargs["device"] = torch.device("cpu")
    if hosts and not ours:
        with plainly():
            return func(*args, **kwargs)
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    if not any(writes) and any(r.alias_info is not None for r in schema.returns):
        return viewed(func, args, kwargs, ours[0].block)
    if device.capture is not None and any(h.ndim and not is_pinned(h) for h in hosts):
        raise RuntimeError("operation not permitted when stream is capturing: a copy from memory that is not pinned")
    targets = [x for a, w in zip(args, writes, strict=False) if w for x in pytree.tree_leaves(a)]
    quiet = (kwargs.get("non_blocking") or any(a is True for a in args[2:3])) and all(map(is_pinned, hosts))
    leaves = any(not isinstance(t, DeviceTensor) for t in targets)
    if name in READS or name in WAITS or (leaves and not quiet):
        device.finish(device.current)
    if name == "copy_" and hosts and ours and not leaves:
        device.copied.append(sum(h.nbytes for h in hosts))
    if hosts and (name == "copy_" or any(h.ndim for h in hosts)) and not quiet:
        device.finish(device.current)  # torch copies it, an index too, and waits unless it is pinned and told not to
    with plainly():
        inner_args, inner_kwargs = pytree.tree_map_only(Tensor, seen_later, (args, kwargs))
        if name in READS:
            return func(*inner_args, **inner_kwargs)
        if targets:
            kept: list[tuple[Tensor, int]] = []
            result: Any = args[0] if len(schema.returns) == 1 else None
        else:
            result = pytree.tree_map_only(Tensor, lambda t: placed(device, t), outcome(func, inner_args, inner_kwargs))
            kept = [(t.inner, i) for i, t in enumerate(pytree.tree_leaves(result)) if isinstance(t, DeviceTensor)]
    if name in BARE:
        return result
    workspace = device.workspace() if name in PRODUCTS else None

    def work() -> None:
        if workspace is not None and workspace.freed:
            raise DeviceError(f"{name} computes in a workspace that was freed")
        with plainly():
            found = pytree.tree_leaves(func(*inner_args, **inner_kwargs))
            for target, i in kept:
                target.copy_(found[i])

    device.put(name, work)
    return result


def is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor on the CPU was made by `pin_memory`."""
    return bool(getattr(tensor, "pinned", False))


def seen_later(tensor: Tensor) -> Tensor:
    """What the device finds in an operand when its turn comes: pinned memory as it will be then, other memory of the
    host as it is now."""
    if isinstance(tensor, DeviceTensor):
        return tensor.inner
    return tensor if is_pinned(tensor) else tensor.clone()


def placed(device: FakeDevice, like: Tensor) -> DeviceTensor:
    """A new tensor of the device that looks like another one."""
    with plainly():
        return on_device(*device.allocate(tuple(like.shape), like.stride(), like.dtype))


def viewed(func: Any, args: Any, kwargs: Any, block: Block) -> Any:
    """The result of an operator that makes views."""
    with plainly():
        args, kwargs = pytree.tree_map_only(DeviceTensor, lambda t: t.inner, (args, kwargs))
        return pytree.tree_map_only(Tensor, lambda t: on_device(t, block), func(*args, **kwargs))


class OperatorsOfDevice(TorchDispatchMode):
    """Inside this mode, new tensors are made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(current_device(), func, args, kwargs or {})


class CallsForDevice(TorchFunctionMode):
    """Inside this mode, calls may name a device that this torch was not built for, and make tensors there."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            with plainly():
                made = args[0].clone()
            made.pinned = True
            return made
        if name == "to" and any(isinstance(a, torch.device) and a.type == "cuda" for a in args[1:]):
            return arrived(args[0], kwargs.get("non_blocking", False))
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        wanted, kwargs["device"] = torch.device(kwargs["device"]), torch.device("cpu")
        if wanted.type != "cuda":
            pinned = kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            if pinned:
                made.pinned = True
            return made
        own = current_device().index
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index != own:
            raise DeviceError(f"rank {own} makes a tensor on the device of rank {index}")
        if name == "tensor":  # its values come from the host
            return arrived(func(*args, **kwargs), False)
        with OperatorsOfDevice():
            return func(*args, **kwargs)


def arrived(source: Tensor, non_blocking: bool) -> DeviceTensor:
    """A copy on the device of a tensor that may be the host's."""
    made = placed(current_device(), source)
    made.copy_(source, non_blocking=non_blocking)
    return made


@contextlib.contextmanager
def programs_run_here() -> Iterator[None]:
    """Inside this context, this thread's operators run on its device."""
    with CallsForDevice(), OperatorsOfDevice():
        yield
