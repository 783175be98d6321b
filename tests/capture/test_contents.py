"""What objects hold."""

from __future__ import annotations

import torch
import triton

from canzona_compile.replica.snapshot import Snapshot


def test_views_that_autograd_does_not_follow() -> None:
    """A view from within `no_grad` whose base was written outside: autograd raises if it is asked for its history."""
    base = torch.nn.Parameter(torch.ones(2, 3)).clone()
    with torch.no_grad():
        view = base[0]
    base.mul_(2.0)
    walk = Snapshot()
    walk.add("self.view", view)
    assert [*walk.found] == ["self.view"]


@triton.jit
def kernel(pointer) -> None:  # type: ignore[no-untyped-def]
    """Do nothing."""


@torch.library.custom_op("canzona_tests::thrice", mutates_args=())
def operator(value: torch.Tensor) -> torch.Tensor:
    """Return a multiple."""
    return value * 3


def test_kernels_and_operators_are_not_looked_into() -> None:
    """They note their first call and what they compiled, and optimizers name them as globals."""
    walk = Snapshot(bits=False)
    walk.add("self.kernel", kernel)
    walk.add("self.operator", operator)
    before = dict(walk.found)
    operator(torch.ones(2))
    again = Snapshot(bits=False)
    again.add("self.kernel", kernel)
    again.add("self.operator", operator)
    assert again.found == before
    assert not any("cache" in place or "handle" in place for place in before)


def test_what_users_functions_in_operators_count_is_seen() -> None:
    box = {"calls": 0}

    def counted(value: torch.Tensor) -> torch.Tensor:
        box["calls"] += 1
        return value * 3

    made = torch.library.custom_op(
        "canzona_tests::counted", counted, mutates_args=(), schema="(Tensor value) -> Tensor"
    )
    walk = Snapshot(bits=False)
    walk.add("self.fn", made)
    assert any(place.endswith("['calls']") for place in walk.found)


class Counting(torch.library.Library):
    """A user's class, which keeps a number beside what its base holds."""

    def __init__(self) -> None:
        super().__init__("canzona_counting", "FRAGMENT")
        self.calls = 0


def test_users_subclasses_of_operators_are_looked_into() -> None:
    walk = Snapshot(bits=False)
    walk.add("self.library", Counting())
    assert "self.library.calls" in walk.found
