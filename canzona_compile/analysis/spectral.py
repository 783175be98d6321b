"""Read graphs as spectral algebra: which nodes are functions of eigenvalues, and which are products with V and V^T.

V is the matrix of eigenvectors [..., n, n] and l the vector of eigenvalues [..., n] of one call of `_linalg_eigh`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from canzona_compile.analysis.linear_algebra import shape_of, swaps
from canzona_compile.ir.fx_utils import tensor_value

aten = torch.ops.aten
EIGH = aten._linalg_eigh.default
NumberOrNode = float | fx.Node  # a number, or a node that stands for one


@dataclass(frozen=True, slots=True)
class Spectrum:
    """A function of every eigenvalue l: c * max(l + ridge, floor)^power.

    Attributes:
        ridge: its terms, which are added.
        floor: its terms, which are added; None if there is no lower limit.
        power: the exponent.
        scale: the factors of c, which are multiplied.
    """

    ridge: tuple[NumberOrNode, ...] = ()
    floor: tuple[NumberOrNode, ...] | None = None
    power: float = 1.0
    scale: tuple[NumberOrNode, ...] = ()

    def plus(self, term: NumberOrNode) -> Spectrum | None:
        """Add a number: max(l + r, f) + t is max(l + r + t, f + t). None after a power or a factor."""
        if self.power != 1.0 or self.scale:
            return None
        return replace(self, ridge=(*self.ridge, term), floor=None if self.floor is None else (*self.floor, term))

    def at_least(self, term: NumberOrNode) -> Spectrum | None:
        """Apply a lower limit. None after a power, a factor or another limit."""
        if self.power != 1.0 or self.scale or self.floor is not None:
            return None
        return replace(self, floor=(term,))

    def to_the(self, power: float) -> Spectrum | None:
        """Raise to a power.

        None after a factor. None also for a fractional power after an even one: (l^2)^(1/2) is |l|, and l may be
        negative.
        """
        even = self.power % 2.0 == 0.0 and power % 1.0 != 0.0
        return None if self.scale or even else replace(self, power=self.power * power)

    def times(self, other: Spectrum) -> Spectrum | None:
        """Multiply by another function of the same l + ridge and floor. None if these differ."""
        if (self.ridge, self.floor) != (other.ridge, other.floor):
            return None
        return replace(self, power=self.power + other.power, scale=(*self.scale, *other.scale))

    def scaled(self, term: NumberOrNode) -> Spectrum:
        """Multiply by a number."""
        return replace(self, scale=(*self.scale, term))


@dataclass(frozen=True, slots=True)
class Vector:
    """A tensor with one element per eigenvalue.

    Attributes:
        spectrum: the function of the eigenvalues.
        lies: "flat" for [..., n], "row" for [..., 1, n], "column" for [..., n, 1].
    """

    spectrum: Spectrum
    lies: str = "flat"


V, VT = "V", "V^T"
Word = tuple[Any, ...]  # a matrix product of V, V^T and spectra; a spectrum stands for a diagonal matrix
Meaning = Vector | Word


def reduced(word: Word) -> Word | None:
    """Simplify a product: drop V V^T and V^T V, and multiply neighbouring diagonals.

    Returns:
        The shorter product; None if the product of two diagonals is no `Spectrum`.
    """
    done: list[Any] = []
    for factor in word:
        last = done[-1] if done else None
        if isinstance(last, Spectrum) and isinstance(factor, Spectrum):
            product = last.times(factor)
            if product is None:
                return None
            done[-1] = product
        elif {last, factor} == {V, VT}:
            done.pop()
        else:
            done.append(factor)
    return tuple(done)


def transposed(meaning: Meaning) -> Meaning:
    """The transpose of a row, a column or a word; a flat vector has none."""
    if isinstance(meaning, Vector):
        return replace(meaning, lies={"row": "column", "column": "row"}[meaning.lies])
    return tuple({V: VT, VT: V}.get(f, f) if isinstance(f, str) else f for f in reversed(meaning))


def meanings(eigh: fx.Node) -> dict[fx.Node, Meaning]:
    """Find the nodes that the graph computes from an eigendecomposition and numbers alone.

    Args:
        eigh: a call of `_linalg_eigh` on [..., n, n].

    Returns:
        What each of these nodes means, if it is a function of the eigenvalues or a product of eigenvectors and such
        functions.
    """
    known: dict[fx.Node, Meaning] = {}
    for node in eigh.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and node.args[0] is eigh:
            known[node] = Vector(Spectrum()) if node.args[1] == 0 else (V,)
        elif any(n in known for n in node.all_input_nodes) and node.target in RULES:
            found = RULES[node.target](node, known)
            if found is not None:
                known[node] = found
    return known


# -- rules -------------------------------------------------------------------------------------

Meanings = Mapping[fx.Node, Meaning]
SpectralRule = Callable[[fx.Node, Meanings], Meaning | None]


def number(value: Any) -> NumberOrNode | None:
    """Read an operand as a number, or as a node that holds one. None for everything else."""
    if isinstance(value, fx.Node):
        return value if tensor_value(value) is None else None
    return float(value) if isinstance(value, int | float) else None


def vector(node: fx.Node, known: Meanings) -> Vector | None:
    """The first operand of a node as a vector; None if it is none."""
    first = known.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    return first if isinstance(first, Vector) else None


def on_spectrum(act: Callable[[Spectrum, Any], Spectrum | None], given: Callable[[fx.Node], Any]) -> SpectralRule:
    """Make a rule for operators on a vector and a number.

    Args:
        act: applies the operator to a spectrum; None if the result is no spectrum.
        given: finds the number among the operands of a node; None if the rule does not apply.
    """

    def rule(node: fx.Node, known: Meanings) -> Meaning | None:
        own, term = vector(node, known), given(node)
        made = None if own is None or term is None else act(own.spectrum, term)
        return None if own is None or made is None else replace(own, spectrum=made)

    return rule


def to_the(power: float) -> SpectralRule:
    """The rule for an operator that raises to a fixed power."""
    return on_spectrum(Spectrum.to_the, lambda _: power)


def second(node: fx.Node) -> NumberOrNode | None:
    """The second operand of a sum; None if the sum has a factor alpha."""
    return number(node.args[1]) if len(node.args) == 2 and not node.kwargs else None


def negated(node: fx.Node) -> NumberOrNode | None:
    """The second operand of a difference with its sign changed; None if it is a node."""
    term = second(node)
    return None if term is None or isinstance(term, fx.Node) else -term


def least(node: fx.Node) -> NumberOrNode | None:
    """The lower limit of a clamp; None if the clamp has an upper limit."""
    given = {**dict(zip(("min", "max"), node.args[1:], strict=False)), **node.kwargs}
    return number(given.get("min")) if given.get("max") is None else None


def exponent(node: fx.Node) -> float | None:
    """The exponent of a power if it is a constant, else None."""
    power = node.args[1]
    return float(power) if isinstance(power, int | float) else None


def multiplied(node: fx.Node, known: Meanings, sign: float = 1.0) -> Meaning | None:
    """The rule for elementwise products and quotients.

    A vector may be combined with a number or a vector, and a word with a row or a column.

    Args:
        node: the call.
        known: the meanings of the nodes before it.
        sign: 1.0 for a product, -1.0 for a quotient.
    """
    left, right = node.args[0], node.args[1]
    if isinstance(right, fx.Node) and right in known:
        if isinstance(left, fx.Node) and left in known:
            return together(known[left], known[right], node, sign)
        other = number(left)
        return scaled(known[right], other) if sign > 0 else None
    if not isinstance(left, fx.Node) or left not in known:
        return None
    other = number(right)
    if sign < 0:
        other = 1.0 / other if isinstance(other, float) and other != 0.0 else None
    return scaled(known[left], other)


def scaled(own: Meaning, term: NumberOrNode | None) -> Meaning | None:
    """A vector times a number; None for a word."""
    return replace(own, spectrum=own.spectrum.scaled(term)) if isinstance(own, Vector) and term is not None else None


def together(left: Meaning, right: Meaning, node: fx.Node, sign: float) -> Meaning | None:
    """The elementwise product or quotient of two meanings; see `multiplied`.

    A word times a row scales the columns of the matrix, and a word times a column scales its rows.
    """
    if isinstance(right, tuple):
        left, right = right, left
        if sign < 0 or isinstance(right, tuple):
            return None
    spectrum = right.spectrum if sign > 0 else right.spectrum.to_the(sign)
    if spectrum is None:
        return None
    if isinstance(left, Vector):
        made = left.spectrum.times(spectrum) if left.lies == right.lies else None
        return None if made is None else replace(left, spectrum=made)
    value = tensor_value(node)
    lies = right.lies
    if lies == "flat" and value is not None and value.ndim == 2:
        lies = "row"  # a vector [n] broadcasts over [n, n] as a row does
    if lies == "row":
        return reduced((*left, spectrum))
    return reduced((spectrum, *left)) if lies == "column" else None


def turned(node: fx.Node, known: Meanings) -> Meaning | None:
    """The rule for permutations of dims: they change nothing, or they transpose a word, a row or a column."""
    own, ndim = known[node.all_input_nodes[0]], len(shape_of(node))
    if swaps(node):
        return None if isinstance(own, Vector) and own.lies == "flat" else transposed(own)
    args: Any = node.args
    moved = node.target is aten.permute.default and [d % ndim for d in args[1]] != list(range(ndim))
    moved = moved or (node.target is aten.transpose.int and (args[1] - args[2]) % ndim)
    return None if moved else own


def reshaped(node: fx.Node, known: Meanings) -> Meaning | None:
    """The rule for views: they change no shape, or they make a row or a column of a flat vector."""
    own, value = known[node.all_input_nodes[0]], tensor_value(node)
    before = tensor_value(node.all_input_nodes[0])
    assert value is not None and before is not None
    shape, old = tuple(value.shape), tuple(before.shape)
    if shape == old:
        return own
    if not isinstance(own, Vector) or own.lies != "flat" or old[-1] == 1:
        return None
    lies = {(*old[:-1], 1, old[-1]): "row", (*old, 1): "column"}.get(shape)
    return None if lies is None else Vector(own.spectrum, lies)


def diagonal(node: fx.Node, known: Meanings) -> Meaning | None:
    """The rule for `diag_embed`: a flat vector becomes a diagonal matrix."""
    own = vector(node, known)
    plain = len(node.args) == 1 and not node.kwargs
    return (own.spectrum,) if own is not None and own.lies == "flat" and plain else None


def product(node: fx.Node, known: Meanings) -> Meaning | None:
    """The rule for matrix products of words."""
    words = [known.get(n) if isinstance(n, fx.Node) else None for n in node.args]
    if any(not isinstance(word, tuple) for word in words):
        return None
    return reduced(tuple(factor for word in words for factor in word))  # type: ignore[union-attr]


def same(node: fx.Node, known: Meanings) -> Meaning | None:
    """The rule for copies."""
    return known[node.all_input_nodes[0]]


def rules(*named: tuple[Iterable[Any], SpectralRule]) -> dict[Any, SpectralRule]:
    """List the rule of each operator."""
    return {target: rule for targets, rule in named for target in targets}


RULES = rules(
    ((aten.add.Tensor, aten.add.Scalar), on_spectrum(Spectrum.plus, second)),
    ((aten.sub.Tensor, aten.sub.Scalar), on_spectrum(Spectrum.plus, negated)),
    ((aten.clamp.default, aten.clamp_min.default), on_spectrum(Spectrum.at_least, least)),
    ((aten.relu.default,), on_spectrum(Spectrum.at_least, lambda _: 0.0)),
    ((aten.pow.Tensor_Scalar,), on_spectrum(Spectrum.to_the, exponent)),
    ((aten.sqrt.default,), to_the(0.5)),
    ((aten.rsqrt.default,), to_the(-0.5)),
    ((aten.reciprocal.default,), to_the(-1.0)),
    ((aten.mul.Tensor, aten.mul.Scalar), multiplied),
    ((aten.div.Tensor, aten.div.Scalar), lambda node, known: multiplied(node, known, -1.0)),
    ((aten.permute.default, aten.transpose.int, aten.t.default), turned),
    ((aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default, aten.expand.default), reshaped),
    ((aten.diag_embed.default,), diagonal),
    ((aten.mm.default, aten.bmm.default), product),
    ((aten.clone.default,), same),
)
