"""What a run leaves for comparisons: each loss, and a digest of the parameters that it is of, in a text file."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from canzona_compile.machine.hardware import this_processor
from lm_parallel import whole

COLUMNS = "# step  loss  digest  ms"


class LossLog:
    """A line per step: its number, the loss, 16 digits of the parameters' SHA-256, wall milliseconds of the update.

    A loss is written with all its digits, so equal texts are equal bits. The first lines name the command, the
    versions and the machine.

    Args:
        path: of the file, which the first rank writes; None for no log.
        device: where the model trains.
        digests: whether to sum up the parameters, all of which this copies to the CPU; otherwise "-" stands there.
    """

    def __init__(self, path: str | None, device: torch.device, digests: bool) -> None:
        self.digests = path is not None and digests
        self.path = Path(path) if path is not None and dist.get_rank() == 0 else None
        if self.path is not None:
            command = " ".join(["python", "examples/train_lm.py", *sys.argv[1:]])
            machine = torch.cuda.get_device_name(device) if device.type == "cuda" else this_processor()
            versions = f"torch {torch.__version__}, Python {platform.python_version()}, {machine}"
            self.path.write_text(f"# {command}\n# {versions}\n{COLUMNS}\n", encoding="utf-8")

    def digest(self, model: nn.Module) -> str:
        """Sum up all parameters; a collective if they are sharded. Call it where they are whole: after forward."""
        if not self.digests:
            return "-"
        digest = hashlib.sha256()
        for _, param in model.named_parameters():
            digest.update(as_bytes(whole(param.detach())))
        return digest.hexdigest()[:16]

    def add(self, step: int, loss: float, digest: str, seconds: float) -> None:
        """Write the line of a step."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{step} {loss!r} {digest} {1000 * seconds:.1f}\n")


def as_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor, in the order of its elements."""
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
