"""Replace inverse roots from eigenvalues, and QR of products, by operators that consist of matrix products."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import fx

from canzona_compile.analysis.roofline import graph_time
from canzona_compile.analysis.spectral import EIGH, VT, NumberOrNode, Spectrum, V, meanings
from canzona_compile.ir.fx_utils import drop_dead_code, insert_call, record_again, tensor_value
from canzona_compile.ir.step import Form, Step, Template
from canzona_compile.kernels.inverse_root import LARGEST_P
from canzona_compile.kernels.root_ops import CHOLESKY_QR, INVERSE_ROOT
from canzona_compile.machine.hardware import Hardware, hardware_of

aten = torch.ops.aten
QR = aten.linalg_qr.default


@dataclass(frozen=True, slots=True)
class Roots:
    """Rewrite decompositions that matrix products do in less time; for numerics="fast".

    1. V diag(c max(l + ridge, floor)^(-1/p)) V^T becomes c `canzona::inverse_root`(A, p, ridge, floor). Here l and V
       are the eigenvalues and eigenvectors of A, and p is a power of two. `canzona_compile.analysis.spectral`
       recognises it in any spelling. If anything else reads l or V, the graph needs the eigendecomposition anyway and
       stays as it is.
    2. QR of a product, whose rows or columns may be reordered, becomes `canzona::cholesky_qr`. The signs of Q's columns
       may change; no QR decomposition prescribes them.

    The pass tries each rewrite by itself, and only if the machine has a measured rate for it (`inverse_root`,
    `cholesky_qr`). It keeps the rewrite if the predicted time of the graph decreases. The prediction uses the rates
    `eigh` and `qr`; if the tasks outnumber the ranks, so that some share an owner, it may use `eigh_batched` and
    `qr_batched`. No known kind of machine comes with these rates: measure them first. On CPU the pass changes nothing:
    see `benchmarks/factorizations.py`.
    """

    name: ClassVar[str] = "roots"
    requires: ClassVar[Form] = Form.CAPTURED
    ensures: ClassVar[Form] = Form.CAPTURED

    def __call__(self, step: Step) -> Step:
        if step.machine.device == "cpu":
            return step
        hardware = hardware_of(step.machine)
        family = {t.name: t.kin for t in step.templates}  # a task names one variant and may take any
        templates = []
        for template in step.templates:
            layouts = [task.layout for task in step.tasks if family[task.template] == family[template.name]]
            shared = bool(layouts) and len(layouts) > layouts[0].grid.size
            templates.append(rewritten(template, in_batches(hardware) if shared else hardware))
        return replace(step, templates=tuple(templates))


def in_batches(hardware: Hardware) -> Hardware:
    """The same machine, with the rates of stacks in place of those of single matrices where they are better."""
    curves = dict(hardware.factorizations)
    best = {
        name: max(curve, curves.get(f"{name}_batched", curve), key=lambda c: c.best) for name, curve in curves.items()
    }
    return replace(hardware, factorizations=tuple(best.items()))


def rewritten(template: Template, hardware: Hardware) -> Template:
    """Rewrite the graph of a template.

    Returns:
        The template with every rewrite that saves time; the template itself if none does.
    """
    graph = template.graph
    for name in [n.name for n in graph.nodes if n.target in (EIGH, QR)]:
        changed = copy.deepcopy(graph)
        node = next(n for n in changed.nodes if n.name == name)
        rate, rewrite = ("inverse_root", roots_of) if node.target is EIGH else ("cholesky_qr", products_of)
        if rate not in dict(hardware.factorizations) or not rewrite(node):
            continue
        drop_dead_code(changed)
        if graph_time(changed, hardware).total(hardware) < graph_time(graph, hardware).total(hardware):
            graph = changed
    if graph is template.graph:
        return template
    graph.lint()
    return replace(template, graph=graph)


# -- inverse roots -----------------------------------------------------------------------------


def roots_of(eigh: fx.Node) -> bool:
    """Replace everything that the graph computes from an eigendecomposition by inverse roots, in place.

    Args:
        eigh: a call of `_linalg_eigh` on [..., n, n].

    Returns:
        Whether the graph was changed. It was not if the matrix is not float32, if the call reads the upper triangle,
        or if the rest of the graph reads something that is no inverse root.
    """
    matrix = eigh.args[0]
    value = tensor_value(matrix) if isinstance(matrix, fx.Node) else None
    lower = eigh.args[1:2] in ((), ("L",)) and not eigh.kwargs
    if value is None or value.dtype != torch.float32 or not lower:
        return False
    known = meanings(eigh)
    inside = {eigh, *known}
    seen = [n for n in eigh.graph.nodes if n in inside and any(user not in inside for user in n.users)]
    found = {node: root for node in seen if (root := root_in(known.get(node))) is not None}
    if len(found) < len(seen) or not found:
        return False
    for node, (p, spectrum) in found.items():
        with eigh.graph.inserting_before(node):
            made = inverse_root(eigh.graph, matrix, p, spectrum)
        for user in [user for user in node.users if user not in inside]:
            user.replace_input_with(node, made)
    return True


def root_in(word: Any) -> tuple[int, Spectrum] | None:
    """Read V diag(...)^(-1/p) V^T.

    Returns:
        p and the spectrum; None for all other words, and if the operator does not support p or the floor.
    """
    if not isinstance(word, tuple) or len(word) != 3 or (word[0], word[2]) != (V, VT):
        return None
    spectrum = word[1]
    if not isinstance(spectrum, Spectrum) or spectrum.power >= 0.0:
        return None
    p = round(-1.0 / spectrum.power)
    exact = abs(p * spectrum.power + 1.0) < 1e-12 and 2 <= p <= LARGEST_P and not p & (p - 1)
    numbers = all(isinstance(term, float) for term in spectrum.floor or (None,))
    positive = not numbers or sum(spectrum.floor or ()) > 0.0  # type: ignore[arg-type]
    return (p, spectrum) if exact and positive else None


def inverse_root(graph: fx.Graph, matrix: Any, p: int, spectrum: Spectrum) -> fx.Node:
    """Insert the p-th inverse root of a matrix.

    Args:
        graph: gets the new nodes, at its insert point.
        matrix: the node of the matrix [..., n, n].
        p: a power of two, at most `LARGEST_P`.
        spectrum: gives the ridge, the floor and the factor.

    Returns:
        The node of the root [..., n, n].
    """
    ridge = folded(graph, operator.add, spectrum.ridge, 0.0)
    floor = None if spectrum.floor is None else folded(graph, operator.add, spectrum.floor, 0.0)
    made = insert_call(graph, INVERSE_ROOT, (matrix, p, ridge, floor), name="inverse_root_default")
    if not spectrum.scale:
        return made
    scale = folded(graph, operator.mul, spectrum.scale, 1.0)
    return insert_call(graph, aten.mul.Tensor, (made, scale), name="mul_tensor")


def folded(
    graph: fx.Graph, combine: Callable[[Any, Any], Any], terms: Sequence[NumberOrNode], start: float
) -> NumberOrNode:
    """Add or multiply numbers and nodes that hold numbers.

    Args:
        graph: gets the new nodes, at its insert point.
        combine: `operator.add` or `operator.mul`.
        terms: the numbers and nodes.
        start: the neutral element of `combine`.

    Returns:
        A number if all terms are numbers, else a node.
    """
    made: NumberOrNode = reduce(combine, (t for t in terms if not isinstance(t, fx.Node)), start)
    nodes = [t for t in terms if isinstance(t, fx.Node)]
    if nodes and made == start:
        made = nodes.pop(0)
    for node in nodes:
        made = insert_call(graph, combine, (made, node))
    return made


# -- QR ----------------------------------------------------------------------------------------

REORDERING = frozenset({aten.index.Tensor, aten.index_select.default, aten.flip.default, aten.clone.default})
PRODUCTS = frozenset({aten.mm.default, aten.bmm.default})


def products_of(qr: fx.Node) -> bool:
    """Replace a QR decomposition of a product, in place.

    Args:
        qr: a call of `linalg_qr` on [..., m, n].

    Returns:
        Whether the graph was changed. It was not if the operand is no product, is not float32 or has m < n, or if the
        call is no reduced QR.
    """
    value = tensor_value(qr.all_input_nodes[0])
    reduced = qr.args[1:2] in ((), ("reduced",)) and not qr.kwargs
    tall = value is not None and value.dtype == torch.float32 and value.shape[-2] >= value.shape[-1]
    if not (tall and reduced and is_product(qr.args[0])):
        return False
    with qr.graph.inserting_before(qr):
        made = insert_call(qr.graph, CHOLESKY_QR, (qr.args[0],), name="cholesky_qr_default")
    qr.replace_all_uses_with(made)
    for factor in made.users:  # the strides of the factors differ from those of the library
        record_again(factor)
    return True


def is_product(node: Any) -> bool:
    """Whether an operand is a matrix product, up to the order of its rows and columns."""
    while isinstance(node, fx.Node) and node.target in REORDERING:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target in PRODUCTS
