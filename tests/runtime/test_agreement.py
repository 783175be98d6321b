"""A rank that is alone agrees with itself, without a process group."""

from __future__ import annotations

import pytest

from canzona_compile import CanzonaError
from canzona_compile.runtime.agreement import PLANNING, Agreement


def test_a_rank_alone() -> None:
    alone = Agreement(None, "Muon optimizer")
    assert (alone.ranks, alone.name, alone.meeting, alone.boards) == ((), "Muon optimizer", None, [])
    assert alone.compare(PLANNING, {"plan": "a plan"}) == [{"plan": "a plan"}]
    assert alone.share("a text") == ["a text"]
    alone.take_number()
    alone.check()
    with pytest.raises(KeyError), alone.on_its_way():
        raise KeyError
    alone.interrupt(KeyError())
    alone.check()


@pytest.mark.parametrize("call", ["compare", "share"])
def test_its_own_error_is_raised(call: str) -> None:
    error = CanzonaError("no gradient")
    arguments = {"compare": ("step()", {}), "share": ("a text",)}[call]
    with pytest.raises(CanzonaError) as caught:
        getattr(Agreement(None, "Muon optimizer"), call)(*arguments, error)
    assert caught.value is error
