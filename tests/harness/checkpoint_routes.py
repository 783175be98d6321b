"""Ways of a checkpoint: through torch.distributed.checkpoint, as shards or whole, and through torch.save."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.utils import _pytree as pytree

from tests.harness.checkpointing import Run, barrier
from tests.harness.layouts import full

Way = Callable[[Run, Path], None]


@contextmanager
def quietly() -> Iterator[None]:
    """Without what torch's checkpoints warn of on their own account."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def save_shards(run: Run, folder: Path, flat: bool = False) -> None:
    model, state = get_state_dict(run.model, run.optimizer, options=flattened(flat))
    with quietly():
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)


def load_shards(run: Run, folder: Path, flat: bool = False) -> None:
    model, state = get_state_dict(run.model, run.optimizer, options=flattened(flat))
    found = {"model": model, "optimizer": state}
    with quietly():
        dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=flattened(flat),
    )


def flattened(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def save_full(run: Run, folder: Path, flat: bool = False) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat)
    keep(run, folder, get_optimizer_state_dict(run.model, run.optimizer, options=options))


def load_full(run: Run, folder: Path) -> None:
    """Every rank reads the file. Torch sees that it is flat, and fails with any optimizer if one says so as well."""
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(run.model, run.optimizer, kept(run, folder), options=options)


def load_broadcast(run: Run, folder: Path) -> None:
    """Rank 0 reads it."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
    found = kept(run, folder)
    first = not dist.is_initialized() or dist.get_rank() == 0
    set_optimizer_state_dict(run.model, run.optimizer, found if first else {}, options=options)


def save_by_hand(run: Run, folder: Path) -> None:
    """What `state_dict` gives, made whole."""
    keep(run, folder, pytree.tree_map(lambda v: full(v) if isinstance(v, Tensor) else v, run.optimizer.state_dict()))


def load_by_hand(run: Run, folder: Path) -> None:
    """Whole tensors for every rank, sharded or not."""
    run.optimizer.load_state_dict(kept(run, folder))


def keep(run: Run, folder: Path, state: Any) -> None:
    params = [full(p) for p in run.laid.params]
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir()
        torch.save({"params": params, "optimizer": state}, folder / "whole.pt")
    barrier()


def kept(run: Run, folder: Path) -> Any:
    found = torch.load(folder / "whole.pt", weights_only=False)  # some states hold objects
    with torch.no_grad():
        for i, (param, whole) in enumerate(zip(run.laid.params, found["params"], strict=True)):
            param.copy_(run.laid.like_param(whole, i))
    return found["optimizer"]


SAVE: dict[str, Way] = {
    "shards": save_shards,
    "flat shards": lambda run, folder: save_shards(run, folder, flat=True),
    "full": save_full,
    "flat full": lambda run, folder: save_full(run, folder, flat=True),
    "by hand": save_by_hand,
}
LOAD: dict[str, tuple[str, Way]] = {
    "shards": ("shards", load_shards),
    "flat shards": ("flat shards", lambda run, folder: load_shards(run, folder, flat=True)),
    "full": ("full", load_full),
    "flat full": ("flat full", load_full),
    "broadcast": ("full", load_broadcast),
    "by hand": ("by hand", load_by_hand),
}
