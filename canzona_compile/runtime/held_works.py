"""Keeps collectives of the host alive until their thread has let go of them.

A thread of gloo drops a collective after it has told the waiting thread that it is done. If that is the last reference,
the thread has to take Python's lock, to free the tensors' objects. Python ends a thread that asks for its lock while
the interpreter ends, and inside of a destructor this aborts the process: a job that has computed everything fails. So
the last reference is always Python's. A thread that waits for nothing but its own scheduling has dropped a collective
long before several further ones are done. Those that nobody waited for, because an error or the end of the program came
first, are kept until the interpreter ends.
"""

from __future__ import annotations

from collections import deque

import torch.distributed as dist

LATEST = 4  # as each of them keeps its memory; a process group of gloo has two threads
_done: deque[dist.Work] = deque(maxlen=LATEST)
_started: list[dist.Work] = []


def hold(work: dist.Work) -> None:
    """Keep a collective that was started, whoever forgets it."""
    _started.append(work)


def waited(work: dist.Work) -> None:
    """Keep a collective that is done for a while longer."""
    _done.append(work)
    _started[:] = [own for own in _started if own is not work]
