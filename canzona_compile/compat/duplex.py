"""All-to-alls over gloo that send and receive at the same time.

Gloo has one connection for two ranks. Over it, a rank says that it is ready to receive, and sends. If it comes later
than the other, it sends at once, its word waits behind the data, and the other sends nothing meanwhile: both directions
take their time one after the other. So a process group may have a second one beside it: in the first, ranks send to
those above them, in the second to those below, and no word waits behind data. `slow_links.py --what exchange` times it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

SECOND: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()  # of the same ranks


@dataclass(frozen=True, eq=False, slots=True)
class Both:
    """Two collectives that are one, with what is asked of `dist.Work`."""

    works: tuple[Any, Any]

    def wait(self, *timeout: timedelta) -> bool:
        first, second = (bool(work.wait(*timeout)) for work in self.works)
        return first and second

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def all_to_all(received: Tensor, sent: Tensor, come: list[int], go: list[int], group: dist.ProcessGroup) -> Any:
    """Start an all-to-all, as `dist.all_to_all_single` does: so many elements come from and go to each rank."""
    second = SECOND.get(group)
    if second is None:
        return dist.all_to_all_single(received, sent, come, go, group=group, async_op=True)
    rank, none = group.rank(), [0] * len(go)
    upto, since = sum(come[: rank + 1]), sum(go[:rank])  # this rank's part for itself goes with the first
    above = come[: rank + 1] + none[rank + 1 :], none[:rank] + go[rank:]
    first = dist.all_to_all_single(received[:upto], sent[since:], *above, group=group, async_op=True)
    below = none[: rank + 1] + come[rank + 1 :], go[:rank] + none[rank:]
    return Both((first, dist.all_to_all_single(received[upto:], sent[:since], *below, group=second, async_op=True)))
