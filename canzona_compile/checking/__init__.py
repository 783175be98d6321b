"""Checks a wrapped optimizer against the plain one, on the user's own model."""

from canzona_compile.checking.check import Verification, verify
from canzona_compile.checking.findings import Leaf

__all__ = ["Leaf", "Verification", "verify"]
