"""Matrix optimizers on sharded models: one line makes any of them distributed.

import canzona_compile
optimizer = canzona_compile.muon_adamw(model, lr=3e-4)  # the whole model
muon = canzona_compile.wrap(torch.optim.Muon(matrices, lr=2e-2))  # or any optimizer
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from canzona_compile.compat.telling import set_up

if TYPE_CHECKING:  # `__getattr__` below imports these
    from canzona_compile.api.chain import Chain, chain
    from canzona_compile.api.choice import Choice, hidden_matrices
    from canzona_compile.api.round_state import round_state
    from canzona_compile.api.whole_model import kl_soap_adamw, muon_adamw, optimizer_for, soap_adamw
    from canzona_compile.api.wrap import explain, unwrap, wrap, wrap_cls
    from canzona_compile.api.wrapped_class import is_wrapped
    from canzona_compile.api.zero1 import zero1
    from canzona_compile.errors import (
        CanzonaError,
        InvalidGradient,
        RankMismatch,
        UnsupportedLayout,
        UnsupportedOptimizer,
    )
    from canzona_compile.ir.options import Options
    from canzona_compile.ir.plan_file import PlanFile
    from canzona_compile.ir.split import Split
    from canzona_compile.report.build import Report
    from canzona_compile.report.explain import Explanation
    from canzona_compile.tools.planning.plan import plan
    from canzona_compile.tools.planning.result import OfflinePlan
    from canzona_compile.tools.verification import Verification, verify

__version__ = "0.1.0"

set_up()

__all__ = [
    "CanzonaError",
    "Chain",
    "Choice",
    "Explanation",
    "InvalidGradient",
    "OfflinePlan",
    "Options",
    "PlanFile",
    "RankMismatch",
    "Report",
    "Split",
    "UnsupportedLayout",
    "UnsupportedOptimizer",
    "Verification",
    "chain",
    "explain",
    "hidden_matrices",
    "is_wrapped",
    "kl_soap_adamw",
    "muon_adamw",
    "optimizer_for",
    "plan",
    "round_state",
    "soap_adamw",
    "unwrap",
    "verify",
    "wrap",
    "wrap_cls",
    "zero1",
]

# Where each public name is. A name is imported when it is first used: DTensors alone take half as long as torch itself,
# and only some programs need the tools.
_MODULES = {
    "api.round_state": ("round_state",),
    "api.whole_model": ("kl_soap_adamw", "muon_adamw", "optimizer_for", "soap_adamw"),
    "api.wrap": ("explain", "unwrap", "wrap", "wrap_cls"),
    "api.wrapped_class": ("is_wrapped",),
    "api.zero1": ("zero1",),
    "api.chain": ("Chain", "chain"),
    "api.choice": ("Choice", "hidden_matrices"),
    "errors": ("CanzonaError", "InvalidGradient", "RankMismatch", "UnsupportedLayout", "UnsupportedOptimizer"),
    "ir.plan_file": ("PlanFile",),
    "ir.options": ("Options",),
    "report.build": ("Report",),
    "report.explain": ("Explanation",),
    "ir.split": ("Split",),
    "tools.planning.plan": ("plan",),
    "tools.planning.result": ("OfflinePlan",),
    "tools.verification": ("Verification", "verify"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # or type checkers would take any name

    def __getattr__(name: str) -> Any:
        """Import a public name on its first use (PEP 562)."""
        if name in ("integrations", "kernels", "optimizers", "passes"):  # sub-packages for users
            return import_module(f"{__name__}.{name}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
