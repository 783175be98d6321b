"""Compute products that are proved symmetric by `canzona::sym_gemm`, which computes one triangle only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.analysis.symmetry_proof import symmetric_leaves
from canzona_compile.ir.step import Form, Step
from canzona_compile.lowering.symmetric_products import rewritten


@dataclass(frozen=True, slots=True)
class Symmetry:
    """On CUDA, rewrite the products that `canzona_compile.analysis.symmetry_proof` proves symmetric.

    One call of `canzona::sym_gemm` computes a product, multiplies it by numbers, and adds a symmetric matrix and a
    multiple of the identity. Transposes of symmetric values disappear. X + F X becomes `canzona::gemm_axpby`. Results
    differ from those of the library by rounding, as the results of two libraries differ.

    On CPU the pass changes nothing: the references are no faster there, and exact numerics keeps bits. Costs stay those
    of the original graph, so owners stay as well.

    Attributes:
        checked: the leaves of the owners' state whose present values are symmetric, as (family of templates, leaf). The
            ranks that hold the values have checked that. The pass assumes nothing about other leaves.
    """

    checked: frozenset[tuple[str, str]] = frozenset()

    name: ClassVar[str] = "symmetry"
    requires: ClassVar[Form] = Form.ROUTED
    ensures: ClassVar[Form] = Form.ROUTED

    def __call__(self, step: Step) -> Step:
        if step.machine.device != "cuda":
            return step
        variants = step.variants()
        leaves = {
            cuts: symmetric_leaves(cuts, {leaf for name, leaf in self.checked if name == cuts[0].template.kin})
            for cuts in set(variants.values())
        }
        placed = tuple(
            cut if cut.template.interpreted else replace(cut, compute=rewritten(cut.compute, leaves[variants[cut]]))
            for cut in step.placed
        )
        return replace(step, placed=placed)
