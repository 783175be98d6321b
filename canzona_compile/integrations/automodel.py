"""For NeMo AutoModel: configs of its recipes, which make the optimizer of a whole model.

optimizer:
  _target_: canzona_compile.integrations.automodel.MuonAdamWConfig
  lr: 3.0e-4

Written for nemo-automodel 0.7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from nemo_automodel.components.optim.optimizer import OptimizerConfig
from torch import nn

from canzona_compile.api.chain import Chain
from canzona_compile.api.whole_model import kl_soap_adamw, muon_adamw, soap_adamw
from canzona_compile.errors import CanzonaError


class MuonAdamWConfig(OptimizerConfig):  # type: ignore[misc]  # it has no types
    """A config that makes `muon_adamw` of each model part: a pipeline stage has one or several.

    Args:
        options: the arguments of `muon_adamw` beside the model.

    Raises:
        CanzonaError: `param_group_overrides` is among them.
    """

    supports_megatron_fsdp_sharding: ClassVar[bool] = False
    make: ClassVar[Callable[..., Chain]] = staticmethod(muon_adamw)

    def __init__(self, **options: Any) -> None:
        if options.pop("param_group_overrides", None):
            raise CanzonaError(
                "param_group_overrides= is for AutoModel's own optimizers",
                at=type(self).__name__,
                hint="omit it; matrices= and others= choose what trains which parameter",
            )
        self.param_group_overrides: list[Any] = []
        self.options = options

    def build(self, model: nn.Module, *, device_mesh: Any = None, is_peft: bool = False) -> list[Chain]:
        """Make the optimizers. The meshes are those of the model's DTensors."""
        return [self.make(part, **self.options) for part in getattr(model, "parts", [model])]

    def build_from_param_groups(self, param_groups: Any, *, device_mesh: Any = None) -> Any:
        """Raise CanzonaError: groups have no names, by which matrices are told from embeddings."""
        raise CanzonaError(
            "parameter groups do not say what is a hidden matrix",
            at=f"{type(self).__name__}.build_from_param_groups",
            hint="build(model)",
        )


class SOAPAdamWConfig(MuonAdamWConfig):
    """The same with `soap_adamw`."""

    make = staticmethod(soap_adamw)


class KLSOAPAdamWConfig(MuonAdamWConfig):
    """The same with `kl_soap_adamw`."""

    make = staticmethod(kl_soap_adamw)
