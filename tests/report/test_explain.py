"""`explain` tells what becomes of every parameter, before and after the first step, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.report.explain import ExplainedParameter, Explanation
from tests.harness import toys
from tests.harness.pairs import Pair, muon, parameters
from tests.harness.toy_optimizers import HostReading
from tests.harness.traps import NAMED


def explained(optimizer: Any) -> dict[str, tuple[str, str]]:
    rows = canzona_compile.explain(optimizer).parameters
    return {row.name: (row.how, row.why) for row in rows}


def test_compiled() -> None:
    pair = Pair(captures_anew=True)
    before = explained(pair.wrapped)
    alone = ("compiled", "stored whole on its rank, so nothing is sent")
    assert before == {f"group0.param{i}": alone for i in range(2)}
    pair.steps(2)
    assert explained(pair.wrapped) == before
    captures = pair.report.captures
    assert captures == 2
    assert pair.wrapped.canzona.explain() == canzona_compile.explain(pair.wrapped)


def test_local() -> None:
    optimizer = AdamW(parameters())
    assert {how for how, _ in explained(optimizer).values()} == {"local"}


def test_eager_says_which_line() -> None:
    how, why = explained(HostReading(parameters()))["group0.param0"]
    assert how == "eager"
    assert "toy_optimizers.py, line " in why
    assert "if update.norm().item() > 10:" in why


def test_refused_ones_do_not_hide_the_others() -> None:
    real, imaginary = parameters()[0], torch.nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    found = explained(torch.optim.SGD([imaginary, real], lr=0.1))
    assert found["group0.param0"] == ("refused", "complex parameters are not supported")
    assert found["group0.param1"][0] == "local"


def on_meta() -> Optimizer:
    return AdamW([torch.nn.Parameter(torch.empty(3, 4, device="meta"))])


def matrix_on_meta() -> Optimizer:
    return torch.optim.Muon([torch.nn.Parameter(torch.empty(3, 4, device="meta"))])


def in_columns() -> Optimizer:
    """Steps all parameters at once, of which none may lie in columns."""
    return toys.GlobalNormOnHost([torch.nn.Parameter(torch.ones(4, 3).t()), *parameters()])


def sparse() -> Optimizer:
    param = torch.nn.Parameter(torch.ones(4, 3))
    param.grad = torch.ones(4, 3).to_sparse()
    return AdamW([param])


REFUSED: dict[str, Callable[[], Any]] = {
    name: (lambda name=name: NAMED[name].make(parameters()))  # type: ignore[misc]
    for name in ("optimizer-inside-halved", "address-in-set")
}
REFUSED |= {"on meta": on_meta, "matrix on meta": matrix_on_meta, "in columns": in_columns, "sparse gradient": sparse}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_first_step_refuses_is_refused_with_its_words(name: str) -> None:
    optimizer = REFUSED[name]()
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param) if param.grad is None else param.grad
    found = canzona_compile.explain(optimizer).parameters
    with pytest.raises(CanzonaError) as caught:
        canzona_compile.wrap(optimizer).step()
    assert {(row.how, row.why) for row in found} == {("refused", caught.value.problem)}
    if "inside" in name:
        assert "wrap that one, self.base" in (caught.value.hint or "")


@pytest.mark.usefixtures("captures_shared")
def test_text_and_data() -> None:
    explanation = canzona_compile.explain(muon(parameters()))
    text = str(explanation)
    assert "canzona explains Muon" in text
    assert "6x4" in text
    assert explanation.to_dict()["parameters"][0]["how"] == "compiled"


# -- printed ---------------------------------------------------------------------------------------


def test_matrices_of_one_shape_and_treatment_are_one_row_whoever_owns_them() -> None:
    rows = [ExplainedParameter(f"w{i}", (6, 4), "compiled", f"on rank {i % 2}: it is faster", i % 2) for i in range(5)]
    rows += [ExplainedParameter("v", (4, 6), "compiled", "on rank 7: it was given", 7)]
    text = Explanation("Muon", tuple(rows)).to_text(150)
    first, second = (line for line in text.splitlines() if line.startswith("│") and line.split("│")[1].strip())
    assert all(words in first for words in ("w0, w1, w2 and 2 more ", "on ranks 0, 1: it is faster"))
    assert all(words in second for words in ("v ", "on rank 7: it was given"))


def test_missing_gradients_as_nonsense() -> None:
    with pytest.raises(CanzonaError, match="missing_grads='drop' is not one of 'skip', 'zero'"):
        canzona_compile.wrap(muon(parameters()), missing_grads="drop")  # type: ignore[arg-type]
