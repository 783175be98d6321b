"""Wait for collectives on the host, and listen meanwhile for what the other ranks tell through the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from canzona_compile.errors import CanzonaError
from canzona_compile.runtime.error_board import ErrorBoard
from canzona_compile.runtime.held_works import waited
from canzona_compile.runtime.process_groups import over_gloo

PATIENCE = timedelta(seconds=1)
LEFT_THE_STEP = (
    "look at the output of the other ranks: one died or did not call step(). This step updated only some parameters, "
    "so restart from a checkpoint"
)


class Waiter:
    """Waits for the collectives of a step and listens meanwhile. Implements `program_ops.Watch`.

    Args:
        boards: where the ranks of these collectives tell of errors.
        device: the device of the tensors that the collectives move.
    """

    def __init__(self, boards: Collection[ErrorBoard], device: torch.device, hint: str = LEFT_THE_STEP) -> None:
        self.boards, self.device, self.hint = boards, device, hint

    @cached_property
    def on_host(self) -> bool:
        """Whether the host waits for collectives, and not a stream. It is asked once, since every step waits."""
        return self.device.type == "cpu" or over_gloo(self.device)

    def wait(self, work: dist.Work, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait for a collective. Over gloo, and on the CPU, the host waits; elsewhere the current stream waits.

        Args:
            meanwhile: called each time that patience ends.
        """
        if not self.on_host:  # the watchdog of NCCL ends a collective that hangs; none is ever recorded
            work.wait()
            return
        while True:
            begin = time.monotonic()
            try:
                work.wait(PATIENCE)
                waited(work)
                return
            except RuntimeError:  # `wait` raises the same type for a timeout and for a failure
                # Work of gloo's reduce-scatter is never complete once it failed; but then no time passes in `wait`.
                if work.is_completed() or time.monotonic() - begin < PATIENCE.total_seconds() / 2:
                    break
            self._listen()
            if meanwhile is not None:
                meanwhile()
        try:
            work.wait()  # returns at once: the work succeeded as the timeout ran out, or this raises the reason
        except RuntimeError as error:
            self._listen()  # a rank that failed for a reason of its own has told it, and closed its connections
            absent = sorted({rank for board in self.boards for rank in board.absent()})
            who = f"; no answer from rank {', '.join(map(str, absent))}" if absent else ""
            failure = CanzonaError(
                f"a collective of this step failed{who}: {str(error).splitlines()[0]}",
                hint=self.hint,
            )
            for board in self.boards:
                board.fail(failure)
            raise failure from error

    def _listen(self) -> None:
        try:
            for board in self.boards:
                board.listen()
        except CanzonaError as error:
            for board in self.boards:
                board.fail(error)
            raise
