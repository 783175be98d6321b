"""The figures of the published table of ownership planners, computed anew."""

from __future__ import annotations

import pytest

from benchmarks.ownership_table import OFF, RULES, SETTINGS, Row, Setting, figures_of


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.model}-tp{s.tensor_parallel}-dp{s.rows}")
def test_table(setting: Setting) -> None:
    ours = figures_of(setting)
    assert len(ours) == len(RULES)
    assert ours == pytest.approx(setting.reference, rel=OFF)


def test_a_figure_that_is_off() -> None:
    reference = SETTINGS[0].reference
    row = Row(SETTINGS[0], (reference[0] * 1.03, *reference[1:]))
    assert [off > OFF for off in row.off] == [True, *[False] * 5]
