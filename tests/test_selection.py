"""`make test` leaves out combinations, and no kind of thing: whatever `make test-all` tests, it tests once at least."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.conftest import COLLECTED
from tests.harness.layouts import BUILDERS, Case

# By test and parameter, what only `make test-all` has: other GPUs to compile for, as much work again for each.
ALLOWED = {("test_ahead", "arch"), ("test_codegen_compiled", "arch")}
FAILURES = (  # each test of these files is a way in which ranks can fail, or be wrong
    "test_failures",
    "test_disagreement",
    "test_split_errors",
    "test_checkpoints_interrupted",
)


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[pytest.Function]:
    """All tests, before any was deselected."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were asked for")
    return [item for item in request.config.stash[COLLECTED] if isinstance(item, pytest.Function)]


def is_full(item: pytest.Function) -> bool:
    return item.get_closest_marker("full") is not None


def kinds(value: Any) -> set[str]:
    """What of a parameter counts: of layouts not the size of their meshes, and no numbers of ranks or steps."""
    if isinstance(value, Case):
        return {value.layout}
    if isinstance(value, list | tuple) and value and all(isinstance(v, Case | int) for v in value):
        return set().union(*map(kinds, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return set()
    return {value if isinstance(value, str) else repr(value)}


def values_of(items: list[pytest.Function]) -> dict[tuple[str, str, str], set[str]]:
    """By file, test and parameter: the kinds of values."""
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for item in items:
        file = item.path.stem
        found[file, item.originalname, ""].add("runs")
        if hasattr(item, "callspec"):
            for name, value in item.callspec.params.items():
                found[file, item.originalname, name] |= kinds(value)
    return found


def test_every_value_of_every_parameter_is_left(collected: list[pytest.Function]) -> None:
    fast = values_of([item for item in collected if not is_full(item)])
    lost = {
        f"{file}::{test} {name}": sorted(values - fast[file, test, name])
        for (file, test, name), values in values_of(collected).items()
        if (file, name) not in ALLOWED
    }
    assert {where: values for where, values in lost.items() if values} == {}


def test_every_layout_dtype_and_failure_is_left(collected: list[pytest.Function]) -> None:
    fast = [item for item in collected if not is_full(item)]
    if not {"test_parity", "test_gpu", *FAILURES} <= {item.path.stem for item in collected}:
        pytest.skip("only some files were collected")
    found = set().union(*values_of(fast).values())
    assert set(BUILDERS) - found == set()
    assert {str(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)} <= found
    assert set(FAILURES) <= {item.path.stem for item in fast}
