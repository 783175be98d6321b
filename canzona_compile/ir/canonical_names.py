"""Names of parameters without what wrappers of modules put into them, as torch.distributed.checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

WRAPPERS = ("_checkpoint_wrapped_module", "_forward_module", "_fsdp_wrapped_module", "_orig_mod")
DDP = "module."


def canonical_name(name: str) -> str:
    """Leave out of a name, or of a pattern of names, what wrappers add: compile, checkpointing, FSDP and Fabric."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def canonical_names(names: Iterable[str]) -> list[str]:
    """Do the same with all names of a model, and leave out the prefix that DDP gives to all of them.

    Args:
        names: of all parameters, because only a prefix that all of them have can be that of DDP.
    """
    found = [canonical_name(name) for name in names]
    prefix = common_prefix(found)
    return [name.removeprefix(prefix) for name in found]


def canonical_groups(groups: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return `canonical_names` of the names in several parameter groups of one model."""
    groups = list(groups)
    plain = iter(canonical_names(name for names in groups for name in names))
    return [[next(plain) for _ in names] for names in groups]


def common_prefix(names: Iterable[str]) -> str:
    """Return the prefix of DDP if all names of a model have it, else an empty text."""
    return DDP if all(name.startswith(DDP) for name in names) else ""


def canonical_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by their canonical names, in the order of the model."""
    named = list(model.named_parameters())
    names = canonical_names(name for name, _ in named)
    return {name: param for name, (_, param) in zip(names, named, strict=True)}
