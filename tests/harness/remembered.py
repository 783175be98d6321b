"""Results that take long to make and change only with certain sources: kept between runs of the tests."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def remembered(config: pytest.Config, name: str, sources: Iterable[str], make: Callable[[], Any]) -> Any:
    """What `make` returned, which JSON has to be able to hold; made anew only if one of the sources is another.

    Args:
        config: pytest's own, in whose cache folder the results lie. Without that plugin each call makes its own.
        name: of the result.
        sources: patterns of files under the root of the repository.
    """
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if cache is None:
        return make()
    key, path = digest(sources), f"canzona_compile/{name}"
    kept = cache.get(path, None)
    if kept is None or kept["sources"] != key:
        kept = {"sources": key, "result": make()}
        cache.set(path, kept)
    return kept["result"]


def digest(sources: Iterable[str]) -> str:
    """One hash of the contents of these files, of Python and of what compiles."""
    found = hashlib.sha256(f"{sys.version} {version('torch')} {version('triton')}".encode())
    for path in sorted(path for pattern in sources for path in ROOT.glob(pattern)):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
