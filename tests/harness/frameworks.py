"""What frameworks put around optimizers and ranks, as small as a test needs it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Proxy:
    """Like Lightning's: an optimizer by its class, but all that it has is in the one inside."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer
        self.__class__ = type("Proxy", (Proxy, type(optimizer)), {})

    def step(self) -> Any:
        return self.inner.step()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # asked for by `copy`, before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)


def running_ranks(environment: type) -> Any:
    """Lightning's word for processes that run already, with a process group that is there already.

    Args:
        environment: its `LightningEnvironment`; the packages lightning and lightning_fabric have one each.
    """

    class Environment(environment):  # type: ignore[misc, valid-type]
        creates_processes_externally = True

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        def local_rank(self) -> int:
            return dist.get_rank()

    return Environment()
