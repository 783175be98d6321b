"""Checks a wrapped optimizer against the plain one, on the user's own model."""

from canzona_compile.tools.verification.check import verify
from canzona_compile.tools.verification.findings import LeafDifference, Verification

__all__ = ["LeafDifference", "Verification", "verify"]
