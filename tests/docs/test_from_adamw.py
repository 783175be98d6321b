"""Figures of the guide for people who come from AdamW: the size of updates by a formula, and bytes of 8-bit state."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec

import pytest

from tests.docs.scripts import ROOT, SCRIPTS, path_of, ran

SHAPES = ((1024, 1024), (4096, 1024), (1024, 4096))
FACTORS = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "muP, spectral": lambda rows, columns: math.sqrt(rows / columns),
}


def page() -> str:
    return (ROOT / "docs" / "guides" / "from_adamw.md").read_text(encoding="utf-8")


def test_the_table_has_the_size_of_updates() -> None:
    rows = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| ")]
    sizes = {name.strip('`"'): [float(n) for n in cells[1].split(", ")] for name, *cells in rows if ", 0." in cells[1]}
    assert set(sizes) == set(FACTORS)
    for name, found in sizes.items():
        expected = [FACTORS[name](*shape) / math.sqrt(max(shape)) for shape in SHAPES]
        assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.full
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_bytes_of_state_are_those_of_the_page() -> None:
    said = ran(path_of("eight_bit"), SCRIPTS["eight_bit"])[0].said
    lines = re.findall(r"^AdamW.* of state.*$", said, re.MULTILINE)
    assert len(lines) == 2
    assert all(line in page() for line in lines)
