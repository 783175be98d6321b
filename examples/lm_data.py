"""Training data that every Python brings along: the source of its own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library() -> Tensor:
    """Read the library's top-level modules, in the order of their names, as one run of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    source = b"\0".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not source:
        raise SystemExit(f"no Python sources in {folder}: this interpreter has only compiled ones")
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)


class Batches:
    """Random crops of the text: another one on each data-parallel rank, the same in each run."""

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int, part: int) -> None:
        self.text = text
        self.batch = batch
        self.context = context
        self.generator = torch.Generator().manual_seed(1000 * seed + part)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return bytes and, one place further on, the bytes to predict."""
        last = len(self.text) - self.context - 1
        starts = torch.randint(last, (self.batch, 1), generator=self.generator)
        crops = self.text[starts + torch.arange(self.context + 1)].long()
        return crops[:, :-1], crops[:, 1:]
