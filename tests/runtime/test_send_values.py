"""Values that one rank sends to others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from canzona_compile.runtime.send_values import LARGE, LargeTensor, packed, send_values, without_large
from tests.harness.ranks import run


class Waits:
    """Waits for collectives."""

    def wait(self, work: Any) -> None:
        work.wait()


def values() -> dict[str, Any]:
    """Values of all sorts, with large tensors of several dtypes among them."""
    torch.manual_seed(0)
    large, wide = torch.randn(300, 301), torch.randn(200, 400)
    return {
        "large": large,
        "again": [large],
        "odd": torch.randn(99_999).bfloat16(),
        "flags": torch.rand(70_001) > 0.5,
        "turned": wide.T,
        "view": wide[:, :300],
        "small": torch.randn(3),
        "empty": torch.empty(0, 5),
        "plain": (1, "two", None, {"three": 3.0}),
    }


def on_rank() -> list[str]:
    mine = values() if dist.get_rank() == 1 else None
    found = send_values(mine, 1, dist.group.WORLD, torch.device("cpu"), Waits())
    wanted, wrong = values(), []
    for name, value in wanted.items():
        own = found[name]
        if isinstance(value, torch.Tensor):
            same = torch.equal(own, value) and own.dtype == value.dtype
        else:
            same = name == "again" or own == value
        wrong += [] if same else [name]
    return wrong + ([] if found["again"][0] is found["large"] else ["again"])


@pytest.mark.ranks
def test_values_arrive_as_they_were_sent() -> None:
    assert run(2, on_rank) == [[], []]


def test_elements_of_large_tensors_are_not_pickled() -> None:
    given = values()
    assert without_large(given) == (given, {})  # two of them share memory
    form, large = without_large({name: value for name, value in given.items() if name != "view"})
    assert isinstance(form["large"], LargeTensor)
    assert form["again"] == [form["large"]]
    assert isinstance(form["turned"], torch.Tensor)  # which has another order
    assert len(large) == 3
    assert len(packed({name: form[name] for name in ("large", "odd", "flags")})) < LARGE
    assert all(own.start % 16 == 0 for own in large)
