"""Checks a wrapped optimizer against the plain one, on the user's own model."""

from canzona_compile.tools.verification.check import Verification, verify
from canzona_compile.tools.verification.findings import LeafDifference

__all__ = ["LeafDifference", "Verification", "verify"]
