"""The log of the plain run, step by step: the plain run writes files, which the ranks read and then delete."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from canzona_compile.tools.verification.user_model import Leaves

AHEAD = 2  # pages that may wait to be read: more would only fill the disk
PAUSE = 0.005  # seconds between two looks


@dataclass(frozen=True, slots=True)
class StepPage:
    """One step.

    Attributes:
        grads: the gradient that each parameter was given.
        leaves: parameters and state after the step.
    """

    grads: tuple[Tensor | None, ...]
    leaves: Leaves


class Journal:
    """Pages 0, 1, ... in a folder. StepPage 0 holds what `build` made.

    Writer and readers wait for one another without a limit: `tools.processes` ends them all if one dies.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def write(self, step: int, page: StepPage) -> None:
        """Add a page, once the ranks have read all but the last few."""
        while self._page(step - AHEAD).exists():
            time.sleep(PAUSE)
        unfinished = self.folder / "unfinished"
        torch.save((page.grads, page.leaves), unfinished)
        os.replace(unfinished, self._page(step))

    def read(self, step: int) -> StepPage:
        """Wait for a page and open it. Tensors stay on disk until somebody looks at them."""
        path = self._page(step)
        while not path.exists():
            time.sleep(PAUSE)
        return StepPage(*torch.load(path, mmap=True, weights_only=False))  # it is our own file

    def drop(self, step: int) -> None:
        """Delete a page that every rank has opened."""
        self._page(step).unlink()

    def _page(self, step: int) -> Path:
        return self.folder / f"step{step}"
