"""`verify` and `profile` with the layout "zero1": gradients are reduced in backward, and ranks know what they own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.profile import profile
from tests.harness.marks import full
from tests.tools.test_trace import checker
from tests.tools.user_builds import muon, muon_with_loss


@pytest.mark.ranks
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


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.usefixtures("forked")
def test_real_iterations_under_zero1(tmp_path: Path) -> None:
    """Reductions and gathers are phases."""
    found = profile(muon, steps=2, layout="zero1", trace=tmp_path / "trace.json")
    measured = found.report.measured
    assert measured is not None
    assert {"reduce", "compute", "gather params"} <= {phase.name for phase in measured.phases}
    assert found.report.data_parallel is not None
    assert found.report.collectives_per_step == 0
    acts = {span.act for own in found.ranks for step in own.steps for span in step.spans}
    assert {"reduce", "gather params"} <= acts
    assert checker().is_valid(json.loads((tmp_path / "trace.json").read_text()))


def test_a_mean_that_rounds_is_refused() -> None:
    with pytest.raises(CanzonaError, match="which is not exact on 3 ranks"):
        canzona_compile.verify(muon, layout="zero1", ranks=3)
