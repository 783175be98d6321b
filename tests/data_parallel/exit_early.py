"""Two ranks that end while a gather is under way and nothing refers to it any more. Run as a program.

The last thing that rank 0 does before its interpreter ends is to wait in C with Python's lock held. Meanwhile the
gather completes, and a thread of gloo lets go of it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import tempfile
import time

microseconds = ctypes.c_uint(0)
# First, because it has to run last: after the lock is released once more, the thread may take it.
atexit.register(ctypes.PyDLL(None).usleep, microseconds)


class Slow:
    """Releases the lock while the interpreter ends, as a file does that is flushed then."""

    def __del__(self, sleep=time.sleep) -> None:  # type: ignore[no-untyped-def]
        sleep(0.3)


slow = Slow()


def main() -> list[int]:
    """Fork the ranks; their exit codes. On a rank it returns nothing."""
    store = f"{tempfile.mkdtemp()}/store"
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            train(rank, store)
            return []
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def train(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Linear(16, 16)
    optimizer = canzona_compile.zero1(model, SGD(model.parameters(), lr=0.1), mesh=dist.group.WORLD, gather="forward")
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    if rank == 0:
        microseconds.value = 4_000_000
    else:
        time.sleep(2.0)
    optimizer.canzona.zero1.gathering.start()
    optimizer.canzona.zero1.gathering._pending.clear()  # as after an error
    del model, optimizer
    gc.collect()
    if "destroy" in sys.argv:
        dist.destroy_process_group()


if __name__ == "__main__":
    import torch
    import torch._dynamo  # before the fork: the first capture on each rank would import it
    import torch.distributed as dist
    from torch import nn
    from torch.optim import SGD

    import canzona_compile

    for code in main():
        assert code == 0, code
