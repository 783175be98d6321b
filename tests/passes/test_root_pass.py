"""Which eigendecompositions and QR decompositions become matrix products, which stay, and how near the results are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from canzona_compile.ir.fx_utils import placeholders
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.options import Options
from canzona_compile.ir.step import Leaf, Role, Template
from canzona_compile.kernels.root_ops import CHOLESKY_QR, INVERSE_ROOT
from canzona_compile.machine.hardware import Machine
from canzona_compile.passes import Canonicalize, Roots, planning_passes
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.random_graphs import evaluate
from tests.kernels.test_roots import error, spectrum, with_spectrum
from tests.passes.root_samples import after, calls, captured, gpu, rates, step_of, values

aten = torch.ops.aten
EIGH, QR = aten._linalg_eigh.default, aten.linalg_qr.default
N = 12


# -- forms -------------------------------------------------------------------------------------


def traced(function: Callable[..., Tensor], shape: Shape = (N, N)) -> Template:
    """A template whose new parameter is `function` of the gradient, which is symmetric, and of a number."""

    def step(grad: Tensor, eps: Tensor) -> Tensor:
        return function(grad, eps.item())

    example = with_spectrum(spectrum("even", shape[-1], 1e2), count=max(1, *shape[:-2], 1)).reshape(shape)
    graph = make_fx(step, tracing_mode="fake")(example, torch.tensor(0.25)).graph
    leaf = (Leaf(Role.GRAD, "grad", shape, torch.float32), Leaf(Role.SCALAR, "eps"))
    for node, name in zip(placeholders(graph), ("grad", "eps"), strict=True):
        node.target = name
    placeholders(graph)[1].meta.clear()  # a captured number has no value
    graph.output_node().args = ((graph.output_node().args[0],),)
    param = Leaf(Role.PARAM, "param", shape, torch.float32)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("param").meta["val"] = placeholders(graph)[0].meta["val"]
    return Template("traced", shape, torch.float32, (param, *leaf), ("param",), graph)


def parts(a: Tensor) -> tuple[Tensor, Tensor]:
    eigenvalues, eigenvectors = torch.linalg.eigh(a)
    return eigenvalues, eigenvectors


def rows(a: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    e, v = parts(a)
    return v * f(e).unsqueeze(-2) @ v.mT


def with_diag(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v @ torch.diag(e.clamp(min=eps).pow(-0.5)) @ v.T


def columns(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v @ (e.add(eps).rsqrt()[:, None] * v.t())


def halves(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    half = v * (e + eps).pow(-0.125)
    return half @ half.T


def divided(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v / (e + eps).sqrt().sqrt() @ v.transpose(0, 1)


def of_product(a: Tensor, eps: float) -> Tensor:
    root = rows(a, lambda e: (e + eps) ** -0.25)
    return root @ root


def twice(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return (v * e.clamp(min=eps).pow(-0.5) @ v.T) - 2 * (v * e.clamp(min=eps).pow(-0.25) @ v.T)


FORMS: dict[str, tuple[Callable[..., Tensor], list[int]]] = {
    "rows": (lambda a, eps: rows(a, lambda e: (e + eps).pow(-0.25)), [4]),
    "clamp": (lambda a, eps: rows(a, lambda e: e.clamp(min=eps).pow(-0.25)), [4]),
    "clamp_min": (lambda a, eps: rows(a, lambda e: e.clamp_min(0.5).pow(-1 / 8)), [8]),
    "relu, then add": (lambda a, eps: rows(a, lambda e: (e.relu() + eps).pow(-0.5)), [2]),
    "clamp, then add": (lambda a, eps: rows(a, lambda e: (e.clamp(min=0.1) + eps + 0.5).rsqrt()), [2]),
    "reciprocal": (lambda a, eps: rows(a, lambda e: 1.0 / (e + eps).sqrt()), [2]),
    "scaled": (lambda a, eps: rows(a, lambda e: 3.0 * (e - 0.0 + 1.0).pow(-0.25)), [4]),
    "squared": (lambda a, eps: rows(a, lambda e: (e + eps).pow(-0.25).square()), [2]),
    "diag": (with_diag, [2]),
    "columns": (columns, [2]),
    "halves": (halves, [4]),
    "divided": (divided, [4]),
    "product of roots": (of_product, [2]),
    "two roots": (twice, [2, 4]),
}


def applied(template: Template, a: Tensor, eps: float) -> Tensor:
    # The graph takes the number as a tensor, or, once canonical, as what the leaf says it is: a number.
    number: Any = torch.tensor(eps) if calls(template.graph, aten._local_scalar_dense.default) else eps
    names = [str(n.target) for n in placeholders(template.graph)]
    given = {"param": a, "grad": a, "eps": number}
    found: Tensor = evaluate(template.graph, {name: given[name] for name in names})[0]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_roots_are_found_however_they_are_written(form: str) -> None:
    function, powers = FORMS[form]
    template = traced(function)
    found = after(template, gpu())
    assert not calls(found.graph, EIGH)
    assert sorted(n.args[1] for n in calls(found.graph, INVERSE_ROOT)) == powers  # type: ignore[type-var]
    a = with_spectrum(spectrum("even", N, 1e2))[0]
    for eps in (0.25, 0.01):
        assert error(applied(found, a, eps)[None], function(a.double(), eps)[None]) < 2e-5


@pytest.mark.parametrize("form", ["rows", "clamp"])
def test_roots_of_stacks(form: str) -> None:
    function, _ = FORMS[form]
    found = after(traced(function, (3, N, N)), gpu())
    assert not calls(found.graph, EIGH)
    a = with_spectrum(spectrum("even", N, 1e2), count=3)
    assert error(applied(found, a, 0.25), function(a.double(), 0.25)) < 2e-5


def kept_vectors(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v * (e + eps).pow(-0.25) @ v.T + v


def kept_values(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v * (e + eps).pow(-0.25) @ v.T + e.sum()


def shifted_by_the_least(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v * (e - e.min().clamp(max=0.0) + eps).pow(-0.25) @ v.T


def two_bases(a: Tensor, eps: float) -> Tensor:
    (e, v), (_, w) = parts(a), parts(a + 1.0)
    return v * (e + eps).pow(-0.25) @ w.T


def mixed(a: Tensor, eps: float) -> Tensor:
    e, v = parts(a)
    return v * (e + eps).pow(-0.25) * e.clamp(min=eps).pow(-0.25) @ v.T


LEFT_ALONE: dict[str, Callable[..., Tensor]] = {
    "logarithm": lambda a, eps: rows(a, lambda e: (e + eps).log()),
    "tanh": lambda a, eps: rows(a, lambda e: e.tanh()),
    "positive power": lambda a, eps: rows(a, lambda e: (e + eps).pow(0.25)),
    "no power of two": lambda a, eps: rows(a, lambda e: (e + eps).pow(-1 / 3)),
    "no root": lambda a, eps: rows(a, lambda e: (e + eps).pow(-0.3)),
    "added after the power": lambda a, eps: rows(a, lambda e: e.pow(-0.25) + eps),
    "absolute": lambda a, eps: rows(a, lambda e: e.abs().pow(-0.25)),
    "absolute, by a square": lambda a, eps: rows(a, lambda e: e.square().pow(-0.25)),
    "absolute, by a product": lambda a, eps: rows(a, lambda e: (e * e).sqrt().rsqrt()),
    "clamped above": lambda a, eps: rows(a, lambda e: e.clamp(min=eps, max=1.0).pow(-0.25)),
    "floor of nothing": lambda a, eps: rows(a, lambda e: e.clamp(min=0.0).pow(-0.25)),
    "not transposed": lambda a, eps: (lambda e, v: v * (e + eps).pow(-0.25) @ v)(*parts(a)),
    "the other way round": lambda a, eps: (lambda e, v: v.T * (e + eps).pow(-0.25) @ v)(*parts(a)),
    "upper triangle": lambda a, eps: (lambda e: e[1] * (e[0] + eps).pow(-0.25) @ e[1].T)(torch.linalg.eigh(a, "U")),
    "more digits": lambda a, eps: rows(a.double(), lambda e: (e + eps).pow(-0.25)).float(),
    "vectors used elsewhere": kept_vectors,
    "values used elsewhere": kept_values,
    "shifted by a value": shifted_by_the_least,
    "two bases": two_bases,
    "two spectra": mixed,
}


@pytest.mark.parametrize("form", LEFT_ALONE)
def test_what_only_looks_like_a_root_stays(form: str) -> None:
    template = traced(LEFT_ALONE[form])
    step = Canonicalize()(step_of(template, gpu()))
    assert calls(step.templates[0].graph, EIGH)
    assert Roots()(step).templates[0] is step.templates[0]


def test_what_does_not_pay_stays() -> None:
    template = traced(FORMS["rows"][0])
    for machine in (gpu(eigh=1e30), gpu(inverse_root=1e-9), Machine("cpu", "gloo", 1, rates())):
        assert calls(after(template, machine).graph, EIGH)
    assert not calls(after(template, gpu(eigh=1e3, inverse_root=1e6)).graph, EIGH)


def test_what_nobody_has_measured_stays() -> None:
    template, known = traced(FORMS["rows"][0]), gpu(eigh=1e-9)
    unknown = tuple(own for own in rates(eigh=1e-9).factorizations if own[0] != "inverse_root")
    assert not calls(after(template, known).graph, EIGH)
    assert calls(after(template, replace(known, rates=replace(rates(), factorizations=unknown))).graph, EIGH)


def test_tasks_that_share_an_owner_are_judged_by_rates_of_stacks() -> None:
    template, machine = traced(FORMS["rows"][0]), gpu(eigh=1e3, eigh_batched=1e12, inverse_root=1e6)
    assert not calls(after(template, machine, count=2).graph, EIGH)  # one for each of two ranks
    assert calls(after(template, machine, count=3).graph, EIGH)


def test_variants_that_no_task_names_are_judged_like_their_family() -> None:
    machine = gpu(eigh=1e3, eigh_batched=1e12, inverse_root=1e6)
    plain, refresh = (replace(traced(FORMS["rows"][0]), name=name, family="f") for name in ("plain", "refresh"))
    step = Canonicalize()(step_of(plain, machine, count=3))
    step = replace(step, templates=(*step.templates, Canonicalize()(step_of(refresh, machine)).templates[0]))
    assert all(calls(template.graph, EIGH) for template in Roots()(step).templates)


def test_fast_numerics_alone_rewrite() -> None:
    names = {numerics: [p.name for p in planning_passes(Options(numerics=numerics))] for numerics in ("exact", "fast")}
    assert "roots" in names["fast"]
    assert "roots" not in names["exact"]


# -- whole optimizers --------------------------------------------------------------------------


def results(template: Template, given: Mapping[str, Any]) -> dict[str, Tensor]:
    return dict(zip(template.writes, evaluate(template.graph, dict(given)), strict=True))


def test_shampoo_takes_products_and_the_same_step() -> None:
    template = captured(Shampoo)
    found = after(template, gpu())
    assert len(calls(template.graph, EIGH)) == len(calls(found.graph, INVERSE_ROOT)) == 2
    assert not calls(found.graph, EIGH)
    for seed in range(3):
        given = values(template, seed)
        new, old = results(found, given), results(template, given)
        for name, value in old.items():
            assert error(new[name][None], value[None]) < 2e-5, name


@pytest.mark.full
def test_soap_takes_products_where_they_were_measured_and_the_same_step() -> None:
    template = captured(SOAP)
    assert len(calls(after(template, gpu()).graph, QR)) == 2  # nobody knows how long ours takes
    assert len(calls(after(template, gpu(cholesky_qr=1e-9)).graph, QR)) == 2
    found = after(template, gpu(cholesky_qr=1e6))
    assert len(calls(template.graph, QR)) == len(calls(found.graph, CHOLESKY_QR)) == 2
    assert not calls(found.graph, QR)
    for seed in range(3):
        given = values(template, seed)
        new, old = results(found, given), results(template, given)
        for side in ("left_basis", "right_basis"):
            signs = (new[side] * old[side]).sum(dim=0).sign()
            new[side] = new[side] * signs  # no QR decomposition prescribes them
        for name, value in old.items():
            assert error(new[name][None], value[None]) < 2e-4, name


def test_qr_of_what_is_no_product_stays() -> None:
    machine = gpu(cholesky_qr=1e6)
    assert calls(after(traced(lambda a, eps: torch.linalg.qr(a + eps).Q), machine).graph, QR)
    assert calls(after(traced(lambda a, eps: torch.linalg.qr(a @ a, "complete").Q), machine).graph, QR)
    wide = traced(lambda a, eps: torch.linalg.qr((a @ a)[:4]).R.sum() * a, (N, N))
    assert calls(after(wide, machine).graph, QR)
    both = after(traced(lambda a, eps: torch.linalg.qr(a @ a).Q @ torch.linalg.qr(a @ a).R), machine)
    assert not calls(both.graph, QR)
    a = with_spectrum(spectrum("even", N, 10.0))[0]
    assert error(applied(both, a, 0.0)[None], (a.double() @ a.double())[None]) < 1e-5
