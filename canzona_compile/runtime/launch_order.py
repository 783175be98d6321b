"""Keep the order of several communicators of NCCL on a device.

Two collectives of different communicators, each on a stream of its own, may start in another order on each device. Each
then waits for a peer that the other one keeps busy, for ever. With `NCCL_LAUNCH_ORDER_IMPLICIT=1` NCCL (from 2.26 on)
starts them in the order in which the host called them, which is the same on all ranks. NCCL reads the variable once,
when the first collective of the process starts, so later it changes nothing.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist

from canzona_compile.compat.torch_private import process_groups
from canzona_compile.errors import MayHang

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"

log = logging.getLogger(__name__)


def keep_launch_order(groups: Iterable[dist.ProcessGroup], device: torch.device, certain: bool = True) -> None:
    """Set what keeps the order of process groups that are in use at a time, or warn that it is too late for that.

    It does nothing if the variable is 1, or unless two of the groups have several ranks and use NCCL.

    Args:
        certain: whether they will be. Otherwise there is no warning, but the variable is set if that is possible.
    """
    if os.environ.get(VARIABLE) == "1":
        return
    several = {tuple(dist.get_process_group_ranks(own)) for own in groups if backend_on(own, device) == "nccl"}
    if sum(len(ranks) > 1 for ranks in several) < 2:
        return
    if VARIABLE not in os.environ and not any(has_communicator(own, device) for own in process_groups()):
        os.environ[VARIABLE] = "1"
        if dist.get_rank() == 0:
            log.warning(
                "%s=1 is set now, because two NCCL communicators will be in use at once. NCCL then starts the "
                "collectives of all communicators of this job in the order of the host's calls. Set it yourself to "
                "choose.",
                VARIABLE,
            )
    elif certain:
        warnings.warn(
            MayHang(
                "this model uses two NCCL communicators at once, and NCCL does not keep their order, so "
                f"ranks may hang. Set {VARIABLE}=1 before the job starts, or in Python "
                "before the first collective."
            ),
            stacklevel=2,
        )


def backend_on(group: dist.ProcessGroup, device: torch.device) -> str:
    """What a process group uses for tensors on a device, as "nccl"; empty if it takes none of them."""
    if device.type not in {known.type for known in group._device_types}:
        return ""
    return str(group._get_backend(device).name())


def has_communicator(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a process group may have run a collective of NCCL on this process's device."""
    if backend_on(group, device) != "nccl":
        return False
    made = getattr(group._get_backend(device), "_is_initialized", lambda: True)
    return bool(made())
