"""Values that one rank sends to others."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.runtime.send_values import (
    ALIGNED,
    LARGE,
    LargeTensor,
    is_large,
    packed,
    send_values,
    unpacked,
    with_large,
    without_large,
)
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
        "border": torch.randn(LARGE // 4),
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
    one, two, kept = send_values(
        [*[wanted["small"]] * 2, Fraction(1, 3)] if mine else None, 1, dist.group.WORLD, torch.device("cpu"), Waits()
    )
    wrong += [] if kept == Fraction(1, 3) else ["object"]
    return wrong + ([] if found["again"][0] is found["large"] and one is two else ["again"])


def test_values_arrive_as_they_were_sent() -> None:
    assert run(2, on_rank) == [[], []]


def test_elements_of_large_tensors_are_not_pickled() -> None:
    given = values()
    assert without_large(given) == (given, {})  # two of them share memory
    form, large = without_large({name: value for name, value in given.items() if name != "view"})
    assert isinstance(form["large"], LargeTensor)
    assert form["again"] == [form["large"]]
    assert isinstance(form["turned"], torch.Tensor)  # which has another order
    names = ("large", "odd", "flags", "border")
    assert [*large] == [form[name] for name in names]
    assert len(packed({name: form[name] for name in names})) < LARGE
    ends = [-(-(own.start + own.bytes) // ALIGNED) * ALIGNED for own in large]
    assert [own.start for own in large] == [0, *ends[:-1]]


class Marked(torch.Tensor):
    """A class of its own."""


def marked() -> Tensor:
    """A tensor with an attribute of a user."""
    made: Any = torch.zeros(LARGE)
    made.mark = True
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(LARGE // 4 - 1),
        torch.zeros(LARGE).as_subclass(Marked),
        torch.zeros(LARGE).to_sparse(),
        torch.zeros(LARGE, requires_grad=True),
        marked(),
        torch.zeros(LARGE, 2)[:, 0],
        "text",
    ],
    ids=["small", "subclass", "sparse", "with history", "marked", "strided", "no tensor"],
)
def test_what_is_more_than_its_elements_is_pickled(value: Any) -> None:
    assert is_large(torch.zeros(LARGE // 4))
    assert not is_large(value)


def test_tensors_of_the_host_stay_there() -> None:
    """All else goes to the device of the communicator, for which `meta` stands here."""
    device = torch.device("meta")
    given = {"host": torch.ones(LARGE), "device": torch.ones(LARGE, device=device), "small": torch.ones(3)}
    form, large = without_large({name: value for name, value in given.items() if name != "small"})
    assert {name: own.on_host for name, own in form.items()} == {"host": True, "device": False}
    size = sum(own.bytes for own in large)
    found = with_large({"device": form["device"]}, torch.empty(size, dtype=torch.uint8, device=device))
    assert found["device"].device == device
    assert torch.equal(
        with_large(form, torch.cat([t.view(torch.uint8) for t in [given["host"]] * 2]))["host"], given["host"]
    )
    assert unpacked(packed(given["small"]), device).device.type == "cpu"
