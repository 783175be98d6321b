"""For the training loop of Megatron-LM, `megatron.training`: two lines before `pretrain` in a pretrain script.

from canzona_compile.integrations.megatron_lm import enable
enable()

Written for the `megatron.training` of megatron-core 0.19.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training
from torch import nn

from canzona_compile.integrations.megatron import OUR_MUON, check_field, get_megatron_optimizer
from canzona_compile.integrations.megatron_layout import Balance

OUR_NAMES = {"muon": "canzona_muon"}  # by what --optimizer may be
LAYER_WISE = training.LayerWiseDistributedOptimizer
WRAP_CHUNKS = training.wrap_model_chunks_with_ddp


def enable(**options: Any) -> None:
    """Let `pretrain` make our optimizers, and choose owners by their costs in Megatron's ZeRO-1 for matrices.

    The command line of Megatron-LM has few names: `--optimizer muon` then means "canzona_muon", and `--optimizer soap`
    the class of emerging-optimizers, wrapped. `pretrain` raises CanzonaError as `get_megatron_optimizer` does, and if
    flags of Muon ask for what "canzona_muon" does not do. Owners are chosen where there are several buckets, as with
    `--overlap-grad-reduce`.

    Args:
        options: of `canzona_compile.wrap`.
    """

    def make(config: Any, model_chunks: Sequence[nn.Module], *args: Any, **given: Any) -> Any:
        return get_megatron_optimizer(with_our_name(config), model_chunks, *args, **given, **options)

    training.get_megatron_optimizer = make
    training.wrap_model_chunks_with_ddp = with_balance


def with_our_name(config: Any) -> Any:
    """The config with the name of our optimizer, whose flags have to say what ours does; some defaults differ."""
    own = copy(config)
    own.optimizer = OUR_NAMES.get(config.optimizer, config.optimizer)
    for name, done in OUR_MUON.items() if own.optimizer != config.optimizer else ():
        check_field(name, getattr(config, name), done)
    return own


def with_balance(model_chunks: Sequence[nn.Module], *args: Any, pg_collection: Any = None, **given: Any) -> Any:
    """Wrap model chunks as Megatron-LM does, which asks for the layout of one chunk after the other."""
    waiting, balance = iter(model_chunks), None

    def layout(*sizes: Any, **more: Any) -> Any:
        nonlocal balance
        if balance is None:
            config, _ = training.get_megatron_optimizer_config(training.get_args())
            balance = Balance(with_our_name(config), pg_collection or ProcessGroupCollection.use_mpu_process_groups())
        return balance(next(waiting), LAYER_WISE.compute_full_param_layout(*sizes, **more))

    training.LayerWiseDistributedOptimizer = SimpleNamespace(compute_full_param_layout=layout)
    try:
        return WRAP_CHUNKS(model_chunks, *args, pg_collection=pg_collection, **given)
    finally:
        training.LayerWiseDistributedOptimizer = LAYER_WISE
