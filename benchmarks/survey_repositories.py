"""Optimizers of repositories that the package index does not have: Emerging-Optimizers and Distributed Shampoo."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from survey_catalog import Catalog, Params, Shapes

UNEVEN: Shapes = ((10, 6), (7, 12), (33, 17), (40, 40))

EMERGING_MODULES = (
    *("contrib.muown", "legacy_soap.moso", "legacy_soap.rekls", "legacy_soap.soap", "legacy_soap.stacked_soap"),
    *("legacy_soap.tp_rekls", "orthogonalized_optimizers.adaptive_muon", "orthogonalized_optimizers.mop"),
    *("orthogonalized_optimizers.muon", "orthogonalized_optimizers.muon_hyperball"),
    *("orthogonalized_optimizers.polargrad", "orthogonalized_optimizers.scion", "orthogonalized_optimizers.spel"),
    *("psgd.psgd", "riemannian_optimizers.isospectral", "riemannian_optimizers.normalized_optimizer"),
    *("scalar_optimizers", "shampoo.soap_v3"),
)
EMERGING_NEEDS: Mapping[str, Mapping[str, Any]] = {
    "adaptive_muon": {"momentum": 0.95, "weight_decay": 0.01},
    "muon_hyperball": {"hyperball_radius": 2.0},
}


def emerging_names() -> list[str]:
    """All that registers itself; a module that cannot be imported here, such as Triton kernels, is left out."""
    registry: Any = importlib.import_module("emerging_optimizers.registry")
    for module in EMERGING_MODULES:
        try:
            importlib.import_module(f"emerging_optimizers.{module}")
        except ImportError as error:
            print(f"left out {module}: {error}")
    return [*sorted(registry.get_optimizer_name_list()), *("Muown",)]


def emerging(name: str, params: Params) -> Optimizer:
    """One of them by its registered name, with its defaults."""
    emerging_names()
    if name == "Muown":
        kind: Any = importlib.import_module("emerging_optimizers.contrib.muown").Muown
    else:
        kind = importlib.import_module("emerging_optimizers.registry").get_optimizer_cls(name)
    needs = dict(EMERGING_NEEDS.get(name, {}))
    if name == "muon_hyperball":  # it takes matrices of one norm only
        for param in params:
            whole: Any = param.full_tensor() if isinstance(param, DTensor) else param
            param.data.mul_(needs["hyperball_radius"] / float(whole.detach().norm()))
    if name == "tp_rekls":
        needs["tp_group"] = importlib.import_module("torch.distributed").group.WORLD
    made: Optimizer = kind(list(params), lr=1e-2, **needs)
    return made


def shampoo_hypers() -> Mapping[str, Callable[[Any], dict[str, Any]]]:
    """Arguments of Distributed Shampoo by configuration; its module is handed in."""
    return {
        "root-inverse": lambda m: {"preconditioner_config": m.DefaultShampooConfig},
        "root-inverse-every-4": lambda m: {
            "preconditioner_config": m.DefaultShampooConfig,
            "precondition_frequency": 4,
            "start_preconditioning_step": 4,
            "grafting_config": m.AdamPreconditionerConfig(beta2=0.99, epsilon=1e-8),
        },
        "root-inverse-blocks": lambda m: {
            "preconditioner_config": m.DefaultShampooConfig,
            "max_preconditioner_dim": 16,
        },
        "eigendecomposed": lambda m: {"preconditioner_config": m.EigendecomposedShampooPreconditionerConfig()},
        "soap": lambda m: {"preconditioner_config": m.DefaultSOAPConfig},
        "eigenvalue-corrected": lambda m: {"preconditioner_config": m.DefaultEigenvalueCorrectedShampooConfig},
        "kl-shampoo": lambda m: {"preconditioner_config": m.RootInvKLShampooPreconditionerConfig()},
        "spectral-descent": lambda m: {
            "preconditioner_config": m.DefaultSpectralDescentPreconditionerConfig,
            "max_preconditioner_dim": float("inf"),
        },
    }


def shampoo(name: str, params: Params) -> Optimizer:
    """Distributed Shampoo for one device, in one configuration."""
    module: Any = importlib.import_module("distributed_shampoo")
    made: Optimizer = module.DistributedShampoo(list(params), lr=1e-2, **shampoo_hypers()[name](module))
    return made


EMERGING = Catalog("", emerging_names, emerging, UNEVEN, True, ("absl", "emerging_optimizers"))
SHAMPOO = Catalog("", lambda: list(shampoo_hypers()), shampoo, UNEVEN, needs=("distributed_shampoo",))
