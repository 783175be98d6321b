"""Matrix optimizers as they are written for one device; installed, this is `canzona_compile.optimizers`."""

from .normuon import NorMuon
from .shampoo import Shampoo
from .soap import SOAP

__all__ = ["SOAP", "NorMuon", "Shampoo"]
