"""What another package has for the same: dion's kernels in Triton, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec

from torch import Tensor

from canzona_compile.tools.calibration.clock import Work


def others_of(kind: str, a: Tensor, b: Tensor, out: Tensor) -> Mapping[str, Work]:
    """A A^T, or 2 B + 0.5 A B, as others compute it, by package.

    Args:
        kind: sym_gemm or gemm_axpby.
        a, b: [n, n].
        out: where the result goes, [n, n].
    """
    found: dict[str, Work] = {}
    if find_spec("dion"):
        dion = importlib.import_module("dion.newton_schulz_triton")
        if kind == "sym_gemm":
            found["dion"] = lambda: dion.ns_line_1(a, out=out)
        elif hasattr(dion, "ns_line_3"):  # it has no factor for the product, so the matrix has it
            half = 0.5 * a
            found["dion"] = lambda: dion.ns_line_3(half, b, 2.0, out=out)
    return found


def newton_schulz_of_others(source: Tensor) -> Mapping[str, Work]:
    """Five steps of Newton-Schulz by other packages. Dion's has other coefficients and the same products."""
    if not find_spec("dion"):
        return {}
    dion = importlib.import_module("dion.newton_schulz_triton")
    return {"dion": lambda: dion.newton_schulz_triton(source)}
