"""Matrix optimizers as they are written for one device; installed, this is `canzona_compile.optimizers`."""

from canzona_compile.optimizers.kl import KLSOAP, KLShampoo
from canzona_compile.optimizers.muon import Muon
from canzona_compile.optimizers.normuon import NorMuon
from canzona_compile.optimizers.shampoo import Shampoo
from canzona_compile.optimizers.soap import SOAP

__all__ = ["KLSOAP", "SOAP", "KLShampoo", "Muon", "NorMuon", "Shampoo"]
