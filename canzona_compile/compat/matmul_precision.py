"""In which precision torch multiplies matrices of float32: read and set through whichever of torch's switches.

Torch has an old switch for all backends (`torch.set_float32_matmul_precision`), and a new one per backend, which takes
the value of its backend, or of all backends, where it is not set (`torch.backends.*.fp32_precision`). Both say the same
to the operators. The old switch cannot be read once a new one says something else. So this asks the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from canzona_compile.compat.torch_private import fp32_precision, set_fp32_precision

BACKENDS = ("cuda", "mkldnn")
# What the names of the old switch mean to the backends.
NAMED = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}


class Kept(NamedTuple):
    """What the switches said before they were set.

    Attributes:
        old: the old switch; empty if it could not be read.
        new: by backend the new one, where "none" means that it takes that of its parent.
    """

    old: str
    new: tuple[str, ...]


_open: list[Kept] = []  # what was set and not put back yet, the outermost first


def precision_now() -> str:
    """Return the precision of products of float32 matrices.

    Returns:
        "highest", "high" or "medium" where backends have what the old switch gives them by that name, and a name for
        what each has elsewhere.
    """
    own = tuple(precision_of(backend) for backend in BACKENDS)
    named = next((name for name, values in NAMED.items() if values == own), "")
    return named or "_".join(f"{backend}_{value}" for backend, value in zip(BACKENDS, own, strict=True))


def precision_of(backend: str) -> str:
    """Return the precision of products on a backend."""
    found = fp32_precision(backend, "matmul")
    return "ieee" if found == "none" else found


def set_precision(name: str) -> Kept | None:
    """Set the precision of products of float32 matrices.

    Returns:
        What `put_back` needs; None if this is the precision already, so that nothing was set.
    """
    if name == precision_now():
        return None
    kept = switches()
    _open.append(kept)
    if kept.old and name in NAMED:
        torch.set_float32_matmul_precision(name)
    words = name.split("_")
    for backend, value in zip(BACKENDS, NAMED.get(name) or (words[1], words[3]), strict=True):
        set_fp32_precision(backend, "matmul", value)
    return kept


def put_back(kept: Kept | None) -> None:
    """Undo a call of `set_precision`, given what it returned."""
    if kept is None:
        return
    if kept.old:
        torch.set_float32_matmul_precision(kept.old)
    for backend, value in zip(BACKENDS, kept.new, strict=True):
        set_fp32_precision(backend, "matmul", value)
    with suppress(ValueError):
        _open.remove(kept)


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Inside this context, products of float32 matrices have this precision; empty changes nothing."""
    kept = set_precision(name) if name else None
    try:
        yield
    finally:
        put_back(kept)


@contextmanager
def put_back_on_error() -> Iterator[None]:
    """If an error ends this context, put back what was set inside and was about to be put back."""
    depth = len(_open)
    try:
        yield
    except BaseException:
        while len(_open) > depth:
            put_back(_open[-1])
        raise


def switches() -> Kept:
    """Return what the switches say, for `put_back`."""
    return Kept(old_switch(), tuple(own_value(backend, "matmul") for backend in BACKENDS))


def old_switch() -> str:
    """Return what the old switch says; empty if torch refuses to read it because a new one says something else."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


def own_value(backend: str, operation: str) -> str:
    """Return what a new switch itself was set to: "none" where it takes the value of its parent.

    Torch tells only what holds in the end. So this changes the parent for a moment and looks whether that is followed.
    """
    now = fp32_precision(backend, operation)
    if backend == "generic" or now == "none":
        return now
    parent = ("generic", "all") if operation == "all" else (backend, "all")
    kept = own_value(*parent)
    set_fp32_precision(*parent, "ieee" if now == "tf32" else "tf32")
    try:
        follows = fp32_precision(backend, operation) != now
    finally:
        set_fp32_precision(*parent, kept)
    return "none" if follows else now
