"""What the plain run did, step by step: files that it writes and the ranks read, deleted once all have."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from canzona_compile.tools.verification.user_model import Leaves

AHEAD = 2  # pages that wait to be read: more would only fill the disk
PAUSE = 0.005  # seconds between two looks


@dataclass(frozen=True, slots=True)
class Page:
    """One step: the gradients that it was given, by parameter, and what there was after it."""

    grads: tuple[Tensor | None, ...]
    leaves: Leaves


class Journal:
    """Pages 0, 1, ... in a folder. Page 0 is what `build` made.

    Nobody here looks after a writer or reader that died: who started them ends the others.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def write(self, step: int, page: Page) -> None:
        while self._page(step - AHEAD).exists():
            time.sleep(PAUSE)
        unfinished = self.folder / "unfinished"
        torch.save((page.grads, page.leaves), unfinished)
        os.replace(unfinished, self._page(step))

    def read(self, step: int) -> Page:
        """A page, once it is there. Tensors stay on disk until they are looked at."""
        path = self._page(step)
        while not path.exists():
            time.sleep(PAUSE)
        return Page(*torch.load(path, mmap=True, weights_only=False))  # it is our own file

    def drop(self, step: int) -> None:
        """Delete a page that everybody has opened."""
        self._page(step).unlink()

    def _page(self, step: int) -> Path:
        return self.folder / f"step{step}"
