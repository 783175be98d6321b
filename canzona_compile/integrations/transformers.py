"""For the `Trainer` of transformers and its subclasses, such as those of TRL: a factory of optimizers, and a callback.

from canzona_compile.integrations.transformers import GatherStateCallback, MuonAdamW
trainer = Trainer(..., optimizer_cls_and_kwargs=(MuonAdamW, {"lr": 3e-4}), callbacks=[GatherStateCallback()])
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import TrainerCallback

from canzona_compile.api.chain import Chain
from canzona_compile.api.whole_model import muon_adamw
from canzona_compile.api.wrapped_class import is_wrapped
from canzona_compile.errors import CanzonaError


class MuonAdamW:
    """Makes the Trainer's optimizer: `muon_adamw` of its model.

    The Trainer calls `MuonAdamW()(model, **kwargs)` with the second part of `optimizer_cls_and_kwargs`. Under DDP,
    ranks share the work: `replicate=` is the default process group, unless you give one.
    """

    def __call__(self, model: nn.Module, **options: Any) -> Chain:
        """Make the optimizer."""
        if under_ddp() and options.get("zero1") is not None:
            raise CanzonaError(
                "the Trainer wraps the model in DDP, which already reduces gradients",
                at="MuonAdamW",
                hint="omit zero1=; ranks share the optimizer's work under DDP as well",
            )
        sharded = any(isinstance(param, DTensor) for param in model.parameters())
        if under_ddp() and not sharded:
            options = {"replicate": dist.group.WORLD, **options}
        return muon_adamw(model, **options)


class GatherStateCallback(TrainerCallback):
    """Gathers the optimizer's state on rank 0 before the Trainer saves a checkpoint.

    Under DDP the Trainer calls `state_dict()` on rank 0 alone, and each rank holds the state of the matrices that it
    owns. Where all ranks save together (FSDP), or one process trains, this callback does nothing. Callbacks that set
    `control.should_save` come before this one.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Gather if this step is saved; the Trainer's own callback, which comes first, has decided that."""
        if control.should_save:
            gather(others.get("optimizer"), args)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Gather if the end of this epoch is saved."""
        self.on_step_end(args, state, control, **others)

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Gather with `save_strategy="best"`: the Trainer decides after this, and saves at once."""
        if args.save_strategy == "best":
            gather(others.get("optimizer"), args)


def under_ddp() -> bool:
    """Tell whether each rank trains a whole copy of the model."""
    return dist.is_initialized() and str(AcceleratorState().distributed_type.value).startswith("MULTI_")


def gather(given: Any, args: Any) -> None:
    """Gather the state of an optimizer to rank 0, if rank 0 will save it alone. A collective.

    Args:
        given: the optimizer, or Accelerate's proxy of it; None where a Trainer evaluates and does not train.
    """
    optimizer: Optimizer | None = getattr(given, "optimizer", given)
    every = optimizer.optimizers if isinstance(optimizer, Chain) else [optimizer]
    wrapped: list[Any] = [own for own in every if own is not None and is_wrapped(own)]
    if not wrapped or not under_ddp():
        return
    if args.save_on_each_node:
        raise CanzonaError(
            "with save_on_each_node=True several ranks save, but only one rank has the state",
            at="GatherStateCallback",
            hint="pass save_on_each_node=False, and an output_dir= that all nodes can read",
        )
    for own in wrapped:
        own.canzona.consolidate(to=0)
