"""`verify` with the layout "zero1": gradients are reduced in backward, and ranks know what they own."""

from __future__ import annotations

from typing import Any

import pytest

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.harness.marks import full
from tests.tools.user_builds import muon, muon_with_loss


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("build", [muon_with_loss, full(muon)], ids=lambda value: value.__name__)
def test_equal_under_zero1(build: Any) -> None:
    """Each rank knows what it owns; the result knows all."""
    found = canzona_compile.verify(build, steps=3, layout="zero1")
    assert found.ok, found
    names = {"0.weight"} if build is muon_with_loss else {"0.weight", "1.weight"}
    assert set(found.compiled) == names
    assert {(leaf.parameter, leaf.leaf) for leaf in found.leaves if leaf.leaf != "parameter"} == {
        (name, "momentum_buffer") for name in names
    }


def test_a_mean_that_rounds_is_refused() -> None:
    with pytest.raises(CanzonaError, match="which is not exact on 3 ranks"):
        canzona_compile.verify(muon, layout="zero1", ranks=3)
