"""Views: values, gradients and state of a parameter, seen as its parts and put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import canzona_compile
from canzona_compile import Split
from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import Box
from canzona_compile.views.pieces import PiecesView, SlicesView
from canzona_compile.views.view import ParamView
from tests.harness.layouts import Case
from tests.harness.ranks import run
from tests.session.test_split import BLOCK, Both, alone

SHAPE = (8, 4)
CUTS = [BucketSlice("w", 0, 20, 0, 0), BucketSlice("w", 20, 12, 1, 0)]
VIEWS: dict[str, Callable[[Tensor], ParamView]] = {
    "views of the memory": lambda w: PiecesView("w", w, Split({"q": 6, "k": 2}), Box.whole(SHAPE)),
    "copies": lambda w: PiecesView("w", w, Split({"q": 4, "k": 4}, interleaved=2), Box.whole(SHAPE)),
    "heads": lambda w: PiecesView("w", w, Split({"q": 4, "k": 4}, head=2), Box.whole(SHAPE)),
    "columns": lambda w: PiecesView("w", w, Split({"q": 2, "k": 2}, dim=1), Box.whole(SHAPE)),
    "slices": lambda w: SlicesView("w", w, CUTS),
    "one slice": lambda w: SlicesView("w", w, [BucketSlice("w", 0, 32, 0, 0)]),
}


def never(*_: Any) -> Tensor:
    raise AssertionError("nothing here lies on another rank")


@pytest.fixture(params=VIEWS)
def view(request: Any) -> ParamView:
    made = VIEWS[request.param](nn.Parameter(torch.arange(32.0).view(SHAPE)))
    made.show()
    return made


def test_what_a_step_writes_arrives(view: ParamView) -> None:
    view.source.grad = torch.arange(32.0).view(SHAPE) * 10
    view.take()
    expected = view.source.detach() - view.source.grad
    with torch.no_grad():
        for param in view.params:
            assert param.grad is not None
            assert param.grad.shape == param.shape
            param.sub_(param.grad)
    view.give_back()
    assert torch.equal(view.source, expected)
    assert all(param.grad is None for param in view.params)


def test_nothing_is_written_that_was_not_read(view: ParamView) -> None:
    with torch.no_grad():
        view.source.add_(1)
    before = view.source.detach().clone()
    view.give_back()
    assert torch.equal(view.source, before)
    view.take()
    view.give_back()
    assert torch.equal(view.source, before)


def test_state_comes_back(view: ParamView) -> None:
    state = {"momentum": torch.rand(SHAPE), "both": [torch.rand(SHAPE), {}], "step": torch.tensor(3.0), "count": 7}
    parts = view.state_in(state)
    assert parts[0]["count"] == 7
    again = view.state_out(parts, never)
    parts[0]["momentum"].zero_()
    if len(view.parts) == 1:
        return  # the state of a parameter that is one slice is its own
    assert torch.equal(again["momentum"], state["momentum"])
    assert torch.equal(again["both"][0], state["both"][0])
    assert all(read["step"] == 3 for read in view.state_in(again))


@pytest.mark.parametrize("name", ["views of the memory", "copies", "heads", "columns"])
def test_entries_with_leaves_of_both_sorts_come_back(name: str) -> None:
    view = VIEWS[name](nn.Parameter(torch.zeros(SHAPE)))
    view.show()
    states = [
        {"own": {"like": torch.rand(p.shape), "side": torch.rand(3)}, "count": i} for i, p in enumerate(view.parts)
    ]
    joined = view.state_out(states, never)
    assert sorted(joined) == sorted(["own", *(f"{p.key}.{key}" for p in view.parts for key in ("count", "own"))])
    assert joined["own"]["like"].shape == SHAPE
    for before, after in zip(states, view.state_in(joined), strict=True):
        assert torch.equal(before["own"]["like"], after["own"]["like"])
        assert torch.equal(before["own"]["side"], after["own"]["side"])
        assert before["count"] == after["count"]


def plain_state() -> dict[str, Any]:
    """The state of an unwrapped optimizer after the steps of `load_on_ranks`."""
    both = Both("muon", BLOCK, None)
    both.go(4)
    saved: dict[str, Any] = canzona_compile.unwrap(both.wrapped).state_dict()
    return saved


def load_on_ranks(saved: dict[str, Any]) -> list[str]:
    both = Both("muon", BLOCK, Case("fsdp", (2,)))
    both.go(4)
    both.wrapped.load_state_dict(saved)
    both.go(1)
    return both.different()


def test_whole_state_of_one_process_is_loaded_on_ranks() -> None:
    (saved,) = run(1, plain_state, group=False, after=alone("muon", BLOCK))
    assert run(2, load_on_ranks, saved, after=alone("muon", BLOCK)) == [[], []]
