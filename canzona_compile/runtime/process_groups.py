"""Find the process group of some ranks: one that the user made if there is one, else a new one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from canzona_compile.compat.duplex import SECOND
from canzona_compile.compat.torch_private import default_store, group_named
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.program_ops import Watch
from canzona_compile.runtime.launch_order import backend_on, keep_launch_order

LARGE = 2**20  # bytes of a step for which a second process group pays


class Groups:
    """Finds or makes the process group of some ranks, and warms up its communicator.

    Ranks are global and ascending. Only its own members make a new process group, so ranks of other pipeline stages
    need not take part.
    """

    def __init__(self) -> None:
        self._known: dict[Ranks, dist.ProcessGroup] = {}
        self._warm: set[Ranks] = set()

    def learn(self, candidates: Iterable[DeviceMesh | dist.ProcessGroup]) -> None:
        """Remember process groups that the user made. Those whose ranks are not ascending are left out."""
        for candidate in candidates:
            if isinstance(candidate, DeviceMesh):
                groups = [candidate.get_group(i) for i in range(candidate.ndim)]
            else:
                groups = [candidate]
            for group in groups:
                ranks = tuple(dist.get_process_group_ranks(group))
                if ranks == tuple(sorted(ranks)):
                    self._known.setdefault(ranks, group)

    @property
    def known(self) -> list[dist.ProcessGroup]:
        """All that it has learnt of or made."""
        return list(self._known.values())

    def of(self, ranks: Ranks) -> dist.ProcessGroup:
        """Return the process group of these ranks. If it is new, all of them must call this.

        A new one has the longest timeout of those that the user made.
        """
        if ranks not in self._known:
            if dist.group.WORLD is not None and ranks == tuple(range(dist.get_world_size())):
                self._known[ranks] = dist.group.WORLD
            else:
                theirs: list[Any] = self.known or [dist.group.WORLD]
                known = [timeout_of(own, device) for own in theirs for device in own._device_types]
                longest = max(known, default=dist.default_pg_timeout.total_seconds())
                self._known[ranks] = new_group_of(ranks, timeout=timedelta(seconds=longest))
        return self._known[ranks]

    def warm_up(self, ranks: Ranks, device: torch.device, watch: Watch) -> None:
        """Run one tiny all-to-all among these ranks, the first time that they are asked for. This is a collective.

        NCCL connects peers lazily. Without this, the first uneven exchange of many ranks may deadlock. A rank that
        fails while it makes the program never comes; `watch` hears of that.
        """
        if ranks in self._warm:
            return
        self._warm.add(ranks)
        keep_launch_order([self.of(own) for own in sorted(self._warm)], device)
        token = torch.zeros(len(ranks), dtype=torch.uint8, device=device)
        watch.wait(dist.all_to_all_single(torch.empty_like(token), token, group=self.of(ranks), async_op=True))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def widen(group: dist.ProcessGroup, device: torch.device, size: int) -> None:
    """Let a process group over gloo send and receive at the same time, if it moves much. This is a collective.

    Args:
        size: bytes that its ranks exchange in a step, the same on all of them.
    """
    ranks = dist.get_process_group_ranks(group)
    much = size >= LARGE and len(ranks) > 1 and ranks == sorted(ranks)
    if much and group not in SECOND and over_gloo(device, group):
        patience = timedelta(seconds=timeout_of(group, device))
        SECOND[group] = new_group_of(ranks, timeout=patience, backend="gloo")  # that of `group` alone need not be gloo


def new_group_of(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """Make a process group. Only its own ranks call this, so ranks of other pipeline stages need not take part.

    If the default process group is bound to a device, torch makes the communicators of others by splitting its own
    (`ncclCommSplit`), and for that all ranks of the default one would have to call. So it is not bound meanwhile.
    The name is of the ranks alone: other groups, of which each of them may have other ones, do not count.
    """
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        with group_named(own_name(ranks, "groups"), ranks):
            made = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="canzona_compile", **options)
    finally:
        default.bound_device_id = bound
    assert isinstance(made, dist.ProcessGroup)
    return made


def own_name(ranks: Sequence[int], what: str) -> str:
    """A name for something that some ranks make together, the same on each of them, and new each time.

    Each of them counts in the store of the default process group, which may have served an earlier one.
    """
    digest = hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()  # a thousand ranks are long
    name = f"canzona_compile/{digest}/{what}"
    count: int = default_store().add(f"{name}/{dist.get_rank()}", 1)
    return f"{name}/{count - 1}"


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a CUDA device is the current one. For other devices it does nothing.

    Collectives of Python objects go through the current device. It is the first one for every rank that did not choose
    another, and NCCL does not run two ranks on one device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def over_gloo(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether collectives of tensors on a device go over gloo, whose works the host waits for.

    The device does not tell: ranks that share a GPU use gloo, which takes tensors on CUDA and copies them by itself.
    Without a group it is the default one, whose backend ours have too.
    """
    group = group or dist.group.WORLD
    return group is not None and backend_on(group, device) == "gloo"


def distributed() -> bool:
    """Tell whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the timeout of a process group on a device, in seconds: torch's default if it does not tell."""
    try:
        options = getattr(group._get_backend(device), "options", None)
    except RuntimeError:  # it has no backend for this device
        options = None
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout.total_seconds()
