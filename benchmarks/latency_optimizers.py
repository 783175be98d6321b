"""The optimizers that may be timed: torch's Muon, and the examples' SOAP and Shampoo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Muon, Optimizer

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from optimizers.shampoo import Shampoo
from optimizers.soap import SOAP

EVERY = 4  # steps between refreshes: of 8 rounds two have them

OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": Muon,
    "soap": lambda params: SOAP(params, every=EVERY),
    "shampoo": lambda params: Shampoo(params, every=EVERY),
}
