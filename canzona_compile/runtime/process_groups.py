"""Process groups by their ranks: the user's where there is one, else a new one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Ranks = tuple[int, ...]


class Groups:
    """Finds or makes the process group of some ranks, ascending, and warms its communicator up.

    A new group is made by its members alone, so ranks of other pipeline stages need not take part.
    """

    def __init__(self) -> None:
        self._known: dict[Ranks, dist.ProcessGroup] = {}
        self._warm: set[Ranks] = set()

    def learn(self, candidates: Iterable[DeviceMesh | dist.ProcessGroup]) -> None:
        """Remember the groups of meshes, and groups, that the user made."""
        for candidate in candidates:
            if isinstance(candidate, DeviceMesh):
                groups = [candidate.get_group(i) for i in range(candidate.ndim)]
            else:
                groups = [candidate]
            for group in groups:
                ranks = tuple(dist.get_process_group_ranks(group))
                if ranks == tuple(sorted(ranks)):
                    self._known.setdefault(ranks, group)

    def of(self, ranks: Ranks) -> dist.ProcessGroup:
        if ranks not in self._known:
            if dist.group.WORLD is not None and ranks == tuple(range(dist.get_world_size())):
                self._known[ranks] = dist.group.WORLD
            else:
                made = dist.new_group(list(ranks), use_local_synchronization=True)
                assert isinstance(made, dist.ProcessGroup)
                self._known[ranks] = made
        return self._known[ranks]

    def warm_up(self, ranks: Ranks, device: torch.device) -> None:
        """One tiny all-to-all: NCCL connects peers lazily, and the first uneven exchange of many ranks
        may otherwise deadlock."""
        if ranks in self._warm:
            return
        self._warm.add(ranks)
        token = torch.zeros(len(ranks), dtype=torch.uint8, device=device)
        dist.all_to_all_single(torch.empty_like(token), token, group=self.of(ranks))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
