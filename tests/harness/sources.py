"""Copies of the sources: what builds from them leaves folders beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_sources(to: Path) -> Path:
    """Copy the repository without what was built, installed or cached in it; links stay links. Returns the copy."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site", "canzona-acceptance*")
    return shutil.copytree(ROOT, to, symlinks=True, ignore=ignored)
