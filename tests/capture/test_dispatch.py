"""Capture by dispatch: of what Dynamo cannot trace, and with which guards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import canzona_compile
from canzona_compile.compat.torch_private import FAKE_LOGGER
from tests.harness import toys
from tests.harness.marks import crossed
from tests.harness.pairs import Pair, feed, parameters
from tests.harness.traps.grammar import toy
from tests.harness.traps.kit import matmul_precision


def ways(pair: Pair) -> set[tuple[str, str]]:
    """How the parameters of a pair are updated now, and the way in which they were captured."""
    rows = canzona_compile.explain(pair.wrapped).parameters
    return {(row.how, "dispatch" if "captured by dispatch" in row.why else row.why) for row in rows}


def test_what_people_write_for_people_is_captured_once() -> None:
    pair = Pair(toys.DecoratedMuon, captures_anew=True)
    pair.steps(2)
    assert ways(pair) == {("compiled", "dispatch")}
    captures = pair.report.captures
    for step in range(4):
        pair.set("lr", 0.1 / (step + 2))
        pair.set("beta", 0.9 - step / 100)
        pair.step()
    assert pair.report.captures == captures
    kinds = pair.wrapped.canzona.session.capture.kinds.values()
    inputs = {leaf.name for kind in kinds for leaf in kind.template.inputs}
    assert {"param", "grad", "momentum"} < inputs
    assert all(len(kind.templates) == 1 for kind in kinds)


class Precisions(TorchDispatchMode):
    """Notes the precision in which each product of matrices is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.seen.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["highest", "high"])
def ambient(request: pytest.FixtureRequest) -> Iterator[str]:
    """The precision that the user has set."""
    with matmul_precision(request.param):
        yield request.param


@pytest.mark.parametrize("kind", [toys.OnePrecision, toys.TwoPrecisions, toys.PlainPrecision])
def test_products_keep_the_precision_that_the_step_sets(kind: type[Any], ambient: str) -> None:
    if kind is toys.PlainPrecision and ambient != "highest":
        pytest.skip("it leaves another precision behind than it found")
    pair = Pair(kind, ((6, 4),))
    pair.steps(2)
    assert ways(pair) == {("compiled", "dispatch")}
    seen = []
    for optimizer in pair.both:
        feed(optimizer, 7)
        with Precisions() as mode:
            optimizer.step()
        seen.append(mode.seen)
    assert seen[0] == seen[1] != []
    assert torch.get_float32_matmul_precision() == ambient


@pytest.mark.parametrize(("kind", "every"), crossed([toys.TurningBasis, toys.DecoratedBasis], [1, 2, 3]))
def test_one_step_that_changes_the_strides_of_state_is_interpreted(kind: type[Any], every: int) -> None:
    pair = Pair(lambda params: kind([{"params": params, "every": every}]), captures_anew=True)
    pair.steps(8)
    assert {how for how, _ in ways(pair)} == {"compiled"}
    pair.steps(4)


def test_state_that_keeps_changing_its_strides_is_interpreted_for_good() -> None:
    pair = Pair(toys.FloppingBasis, captures_anew=True)
    pair.steps(14)
    assert {how for how, _ in ways(pair)} == {"eager"}
    driver = pair.wrapped.canzona.session.driver
    pair.steps(2)
    assert pair.wrapped.canzona.session.driver is driver, "it plans anew on every step"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (toys.Retrying, "catches the errors of aten._linalg_check_errors"),
        (toys.Differentiating, "its step differentiates"),
        (toys.MemorySwapping, "replaces the gradient, or the memory of a tensor"),
    ],
)
def test_what_a_path_cannot_tell_is_interpreted(kind: type[Any], reason: str) -> None:
    pair = Pair(kind)
    pair.steps(4)
    rows = canzona_compile.explain(pair.wrapped).parameters
    assert {row.how for row in rows} == {"eager"}
    assert all(reason in row.why for row in rows), rows[0].why


def test_the_step_is_taken_again_as_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(toys.Looking)
    pair.steps(2)
    assert ways(pair) == {("compiled", "dispatch")}
    for scale in (0.5, 2.0, 4.0, 0.25):  # another number, and another path
        monkeypatch.setitem(vars(sys.modules[toys.Looking.__module__])["SCALE"], "of", scale)
        pair.steps(2)
    assert ways(pair) == {("compiled", "dispatch")}


def test_graphs_stay_a_family_when_the_first_one_is_dropped() -> None:
    pair = Pair(toys.LateInput, ((6, 4),), captures_anew=True)
    for step in range(3):
        pair.set("lr", 0.1 / (step + 1))
        pair.step()
    assert ways(pair) == {("compiled", "dispatch")}


# An operator whose meta function branches on the rate, which has no value while the step is recorded.
Noisy = toy("noisy")('param.sub_(grad + torch.randn_like(param), alpha=group["lr"])')


@pytest.mark.filterwarnings("ignore::canzona_compile.errors.DrawsRandomNumbers")
def test_errors_that_a_recording_expects_are_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch logs them with a traceback of sixty lines, which looks like a crash."""
    logged: list[str] = []
    monkeypatch.setattr(FAKE_LOGGER, "callHandlers", lambda record: logged.append(record.getMessage()))
    optimizer = canzona_compile.wrap(Noisy(parameters()))
    feed(optimizer, 0)
    optimizer.step()
    assert logged == []
