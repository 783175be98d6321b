"""Optimizers of repositories that the package index does not have; survey_checkouts.py says which."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from survey_catalog import Catalog, Params, Shapes

UNEVEN: Shapes = ((10, 6), (7, 12), (33, 17), (40, 40))

EMERGING_NEEDS: Mapping[str, Mapping[str, Any]] = {
    "adaptive_muon": {"momentum": 0.95, "weight_decay": 0.01},
    "muon_hyperball": {"hyperball_radius": 2.0},
}


def emerging_names() -> list[str]:
    """All that registers itself; a module that cannot be imported here, such as Triton kernels, is left out."""
    package = importlib.import_module("emerging_optimizers")
    for module in pkgutil.walk_packages(package.__path__, "emerging_optimizers."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(f"left out {module.name}: {error}")
    registry: Any = importlib.import_module("emerging_optimizers.registry")
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


def of_module(module: str, kinds: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Catalog:
    """Optimizers of one module: by name the class, and its arguments."""

    def build(name: str, params: Params) -> Optimizer:
        kind, hypers = kinds[name]
        made: Optimizer = getattr(importlib.import_module(module), kind)(list(params), **{"lr": 1e-2, **hypers})
        return made

    return Catalog("", lambda: list(kinds), build, UNEVEN, needs=(module.partition(".")[0],))


SPLUS_HYPERS = {"lr": 0.2, "b1": 0.9, "b2": 0.95, "weight_decay": 0.001}
POLARGRAD_HYPERS = {"lr": 1e-3, "momentum": 0.9}

EMERGING = Catalog("", emerging_names, emerging, UNEVEN, True, ("absl", "emerging_optimizers"))
SHAMPOO = Catalog("", lambda: list(shampoo_hypers()), shampoo, UNEVEN, needs=("distributed_shampoo",), alone=True)
KL = of_module(
    "optim",
    {
        "kl-shampoo": ("KLOpt", {}),
        "kl-soap": ("KLOpt", {"using_klsoap": True}),
        "soap": ("SOAP", {}),
        "adamw": ("AdamWBF16", {}),
    },
)
SPLUS = of_module(
    "splus", {"splus": ("SPlus", SPLUS_HYPERS), "splus-every-4": ("SPlus", {**SPLUS_HYPERS, "inverse_every": 4})}
)
POLARGRAD = of_module(
    "polar_grad",
    {
        "polar-first": ("PolarGrad", {**POLARGRAD_HYPERS, "polar_first": True}),
        **{
            method: ("PolarGrad", {**POLARGRAD_HYPERS, "method": method})
            for method in ("qdwh", "zolo-pd", "ns", "precond_ns", "polar_express")
        },
    },
)
